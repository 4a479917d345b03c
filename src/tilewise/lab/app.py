# /// script
# [tool.marimo.display]
# theme = "system"
# ///
"""The lab as a page: controls on what `lab/views.py` draws. `tilewise lab` serves it; `marimo edit` opens it as code.

Each function below is a cell of a marimo notebook. A cell's arguments are what other cells return, and it runs again
when one of those changes.
"""
# mypy: disable-error-code="no-untyped-def"
# marimo finds a cell's arguments by name and rewrites its head when the notebook is saved: annotations would be lost.

import marimo

app = marimo.App(width="medium", app_title="tilewise lab")


@app.cell
def _():
    import marimo as mo

    from tilewise.lab import step, views
    from tilewise.lab.count import Question, findings, ways_table
    from tilewise.machine import detect
    from tilewise.machine.device import DEVICES, find

    return DEVICES, Question, detect, find, findings, mo, step, views, ways_table


@app.cell
def _(mo):
    def row(*controls):
        return mo.hstack(controls, justify="start", gap=2, wrap=True)

    mo.md(
        "# The lab\n\nWhat attention moves, how its tiles run, and what that costs. Every number is computed by "
        "tilewise itself; `tilewise count`, `tilewise step` and `tilewise measure` print the same in a terminal."
    )
    return (row,)


# ---- memory ladder ----


@app.cell
def _(DEVICES, mo, row):
    THIS = "this machine"
    chosen_device = mo.ui.dropdown([THIS, *(each.name for each in DEVICES)], value=THIS, label="device")
    measure = mo.ui.run_button(label="measure this machine")
    mo.vstack([mo.md("## Memory ladder"), row(chosen_device, measure)])
    return THIS, chosen_device, measure


@app.cell
def _(mo):
    get_rates, set_rates = mo.state({})  # by dtype: measured once, kept while the page is open
    return get_rates, set_rates


@app.cell
def _(detect, dtype, get_rates, measure, set_rates):
    if measure.value and dtype.value not in get_rates():
        measured = detect.measure_rates(dtype=dtype.value)
        set_rates(lambda known: {**known, measured.dtype: measured})


@app.cell
def _(THIS, chosen_device, detect, dtype, find, get_rates):
    device = detect.detect() if chosen_device.value == THIS else find(chosen_device.value)
    if chosen_device.value == THIS and dtype.value in get_rates():
        device = get_rates()[dtype.value].on(device)
    return (device,)


@app.cell
def _(device, mo, views):
    mo.vstack([mo.Html(views.ladder(device)), mo.Html(views.styled(views.ladder_table(device)))])


# ---- bytes ----


@app.cell
def _(mo, row):
    length = mo.ui.slider(steps=[2**power for power in range(7, 18)], value=16384, label="N", show_value=True)
    dim = mo.ui.slider(steps=[16, 32, 64, 128, 256], value=128, label="d", show_value=True)
    heads = mo.ui.slider(steps=[1, 2, 4, 8, 16, 32], value=1, label="heads", show_value=True)
    block_q = mo.ui.slider(steps=[16, 32, 64, 128, 256], value=128, label="block_q", show_value=True)
    block_kv = mo.ui.slider(steps=[16, 32, 64, 128, 256], value=64, label="block_kv", show_value=True)
    dtype = mo.ui.dropdown(["float16", "bfloat16", "float32"], value="float16", label="dtype")
    causal = mo.ui.switch(label="causal")
    backward = mo.ui.switch(label="backward")
    cached = mo.ui.switch(label="best case: reloads come from cache")
    mo.vstack(
        [
            mo.md("## Bytes"),
            row(length, dim, heads, block_q, block_kv),
            row(dtype, causal, backward, cached),
        ]
    )
    return backward, block_kv, block_q, cached, causal, dim, dtype, heads, length


@app.cell
def _(Question, backward, block_kv, block_q, cached, causal, dim, dtype, heads, length, views):
    question = Question(
        length=length.value,
        dim=dim.value,
        heads_q=heads.value,
        heads_kv=heads.value,
        dtype=dtype.value,
        causal=causal.value,
        block_q=block_q.value,
        block_kv=block_kv.value,
    )
    ways = views.ways(backward=backward.value, cached=cached.value)
    return question, ways


@app.cell
def _(findings, mo, question, views, ways, ways_table):
    mo.vstack(
        [
            mo.Html(views.byte_bars(question, ways)),
            mo.Html(views.styled(ways_table("", ways, question))),
            mo.md("\n\n".join(findings(question))),
        ]
    )


# ---- roofline ----


@app.cell
def _(device, mo, question, views, ways):
    roofline = views.roofline(question, ways, device)
    mo.vstack(
        [
            mo.md("## Roofline"),
            mo.md(
                f"Of {device.name} no speeds are known in {question.dtype}. Measure this machine, or choose a device."
            )
            if roofline is None
            else mo.Html(f'<div style="max-width:44rem">{roofline.svg()}</div>'),
            mo.md("\n".join(f"- {words}" for words in views.floor_words(question, ways, device))),
        ]
    )


# ---- step ----


@app.cell
def _(mo):
    get_at, set_at = mo.state(0)
    return get_at, set_at


@app.cell
def _(mo):
    rows_in_tile = mo.ui.slider(1, 2, value=2, label="queries in a tile", show_value=True)
    keys_in_block = mo.ui.slider(1, 8, value=2, label="keys in a block", show_value=True)
    step_causal = mo.ui.switch(label="causal")
    return keys_in_block, rows_in_tile, step_causal


@app.cell
def _(keys_in_block, rows_in_tile, set_at, step, step_causal):
    tiling = step.tiling_of(step.DEFAULT, rows_in_tile.value, keys_in_block.value, causal=step_causal.value)
    watched = step.forward(step.DEFAULT, tiling, 1.0)
    set_at(0)  # another run begins
    return (watched,)


@app.cell
def _(mo, set_at, watched):
    last = len(watched.frames)
    back = mo.ui.button(label="back", on_change=lambda _: set_at(lambda at: max(at - 1, 0)))
    onward = mo.ui.button(label="step", on_change=lambda _: set_at(lambda at: min(at + 1, last)))
    again = mo.ui.button(label="from the start", on_change=lambda _: set_at(0))
    play = mo.ui.switch(label="play")
    return again, back, last, onward, play


@app.cell
def _(last, mo, play, set_at):
    clock = mo.ui.refresh(
        options=["0.5s", "1s", "3s"],
        default_interval="1s",
        label="a step each",
        on_change=lambda _: set_at(lambda at: 0 if at >= last else at + 1),
    )
    shown_clock = clock if play.value else mo.md("")
    return (shown_clock,)


@app.cell
def _(again, back, keys_in_block, mo, onward, play, row, rows_in_tile, shown_clock, step_causal):
    mo.vstack(
        [
            mo.md("## Step"),
            row(rows_in_tile, keys_in_block, step_causal),
            row(onward, back, again, play, shown_clock),
        ]
    )


@app.cell
def _(get_at, last, mo, step, views, watched):
    at = min(get_at(), last)
    told = [mo.Html(views.step_picture(step.DEFAULT, watched.frames, at)), mo.md(f"step {at} of {last}")]
    if at:
        told.append(mo.Html(views.styled(views.step_table(watched.frames, at))))
    if at == last:
        told += [mo.Html(views.styled(views.answer_table(watched))), mo.md("\n\n".join(step.remarks(watched)))]
    mo.vstack(told)


# ---- masks ----


@app.cell
def _(mo, row):
    mask_q = mo.ui.slider(4, 48, value=24, label="queries", show_value=True)
    mask_kv = mo.ui.slider(4, 48, value=24, label="keys", show_value=True)
    mask_block_q = mo.ui.slider(steps=[1, 2, 4, 8, 16], value=4, label="block_q", show_value=True)
    mask_block_kv = mo.ui.slider(steps=[1, 2, 4, 8, 16], value=4, label="block_kv", show_value=True)
    mask_causal = mo.ui.switch(value=True, label="causal")
    windowed = mo.ui.switch(label="window")
    window = mo.ui.slider(0, 24, value=8, label="keys behind", show_value=True)
    bottom_right = mo.ui.switch(value=True, label="last query sees the last key")
    mo.vstack(
        [
            mo.md("## Masks"),
            row(mask_q, mask_kv, mask_block_q, mask_block_kv),
            row(mask_causal, windowed, window, bottom_right),
        ]
    )
    return bottom_right, mask_block_kv, mask_block_q, mask_causal, mask_kv, mask_q, window, windowed


@app.cell
def _(bottom_right, mask_block_kv, mask_block_q, mask_causal, mask_kv, mask_q, mo, views, window, windowed):
    mask = views.Mask(
        len_q=mask_q.value,
        len_kv=mask_kv.value,
        left=window.value if windowed.value else None,
        right=0 if mask_causal.value else None,
        offset=mask_kv.value - mask_q.value if bottom_right.value else 0,
    )
    mask_tiles = views.mask_tiles(mask, mask_block_q.value, mask_block_kv.value)
    mo.vstack(
        [
            mo.Html(views.mask_picture(mask, mask_block_q.value, mask_block_kv.value)),
            mo.md(views.mask_words(mask_tiles)),
        ]
    )


# ---- joining splits ----


@app.cell
def _(mo, row):
    parts = mo.ui.slider(1, 8, value=2, label="parts", show_value=True)
    merge_query = mo.ui.dropdown({"query 0": 0, "query 1": 1}, value="query 0", label="of")
    mo.vstack(
        [
            mo.md(
                "## Joining splits\n\nThe keys of the stepper in parts, each attended to by itself, then joined: "
                "lse = log sum exp(lse of the parts), out = sum of weight times out."
            ),
            row(parts, merge_query),
        ]
    )
    return merge_query, parts


@app.cell
def _(merge_query, mo, parts, step, views):
    mo.Html(views.styled(views.split_table(step.DEFAULT, merge_query.value, parts.value)))


if __name__ == "__main__":
    app.run()
