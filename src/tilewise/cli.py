"""The command line: reads options, prints results. What the commands do is in `tilewise.bench` and `tilewise.lab`.

torch is imported inside the commands, so that ``tilewise --help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from tilewise.bench.terminal import example, open_console, print_blocks, show_progress, whole_numbers, words, writable
from tilewise.lab.commands import COMMANDS as LAB

if TYPE_CHECKING:
    from tilewise.bench.report import Report
    from tilewise.bench.row_softmax import Settings as SoftmaxSettings
    from tilewise.bench.sketch import Kind
    from tilewise.lab.masks import Mask

app = typer.Typer(
    name="tilewise",
    help="Exact attention, computed tile by tile: measure it, and ask what a call would do.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# Programs set these to steer OpenBLAS; they would make the NumPy rows slower than NumPy is here.
OPENBLAS_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
UNSET = "TILEWISE_BENCH_UNSET"  # says, after a new start, what was unset; guards against a second one

# Options of the benchmark of attention that the one of the row softmax has not.
ATTENTION_ONLY = (
    *("lengths", "batch", "heads", "heads_kv", "dim", "causal", "window", "alibi"),
    *("memory", "compare", "html", "plots"),
)

# What typer raises for bad options: its own class, or click's in older releases.
_USAGE_ERROR = cast("type[Exception]", typer.BadParameter.__bases__[0])


def main() -> None:
    """Run the command line. Bad options and input end it with one line and exit code 2."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["bench"]:
        _start_clean()
    try:
        code: object = app(args=arguments or ["--help"], prog_name="tilewise", standalone_mode=False)
    except _USAGE_ERROR as error:
        message = getattr(error, "format_message", error.__str__)()
        code = _complain(f"{message} (see {_command(arguments)} --help)")
    except (ValueError, TypeError) as error:
        code = _complain(str(error))
    except typer.Abort:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: object) -> int:
    sys.stderr.write(f"tilewise: {' '.join(str(message).split())}\n")
    return 2


def _command(arguments: list[str]) -> str:
    known = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    return f"tilewise {arguments[0]}" if arguments and arguments[0] in known else "tilewise"


def _start_clean() -> None:
    """Start this program anew without the variables that steer OpenBLAS, which reads them once, when NumPy is loaded.

    Windows cannot replace a running program; there they stay, and the report's environment shows them.
    """
    found = [name for name in OPENBLAS_VARIABLES if name in os.environ]
    if not found or UNSET in os.environ or os.name == "nt":
        return
    environment = {name: value for name, value in os.environ.items() if name not in found}
    environment[UNSET] = ",".join(found)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606  # the same program


# ---- bench ----------------------------------------------------------------------------------------------------------


@app.command(epilog=example("tilewise bench --lengths 256,512 --causal --seconds 20"))
def bench(
    op: Annotated[str, typer.Option(help="attention, or softmax over the rows of a matrix.")] = "attention",
    shapes: Annotated[
        list[str] | None,
        typer.Option(metavar="RxC,...", help="With --op softmax: rows x columns.  [default: by device]"),
    ] = None,
    lengths: Annotated[
        list[str] | None, typer.Option(metavar="N,N,...", help="Queries, and keys.  [default: by device]")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences.  [default: 1]")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.  [default: CPU 8, GPU 32]")] = None,
    heads_kv: Annotated[int | None, typer.Option(help="Key heads.  [default: as many]")] = None,
    dim: Annotated[int | None, typer.Option(help="Head dim.  [default: CPU 64, GPU 128]")] = None,
    dtype: Annotated[str | None, typer.Option(help="[default: CPU float32, GPU float16]")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Hide keys behind the diagonal.")] = False,
    window: Annotated[
        int | None, typer.Option(help="Keys visible to each side of the diagonal; SDPA is given a dense mask.")
    ] = None,
    alibi: Annotated[
        bool, typer.Option("--alibi", help="Subtract slope times distance; SDPA is given a dense bias.")
    ] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Measure the backward pass too.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An implementation or family; may be repeated.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N, mps.  [default: the best here]")] = None,
    seconds: Annotated[float, typer.Option(help="For everything.")] = 300.0,
    memory: Annotated[
        float | None, typer.Option(help="GiB for everything.  [default: CPU half of what is free, GPU 95 %]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the data.")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the results.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the tables.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page of tables and plots.")] = None,
    plots: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write the plots, SVG and PNG.")] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="OLD.json", help="Say what became slower, less exact or larger since.")
    ] = None,
) -> int:
    """Time every implementation that this machine can run, and check each one's error and memory.

    Nothing that exceeds the error budget is timed, and what does not fit in memory or time is a row that says so. Exit
    code 1: a tilewise backend exceeded its budget, or not all agree on the real input.
    """
    writable(json, markdown, html, plots)
    if op == "softmax":
        from tilewise.bench import row_softmax

        _refuse("--op softmax", locals(), *ATTENTION_ONLY)
        sizes = tuple(map(row_softmax.parse_shape, words(shapes or []))) or None
        chosen = row_softmax.default_settings(
            device, dtype=dtype, shapes=sizes, backward=backward, only=tuple(only or ()), seconds=seconds, seed=seed
        )
        return _bench_softmax(chosen, json, markdown)
    if op != "attention":
        raise ValueError(f"op must be attention or softmax; got {op!r}")
    _refuse("--op attention", locals(), "shapes")
    from tilewise.bench.report import Report
    from tilewise.bench.run import Bench, default_settings

    old = None if compare is None else Report.load(compare)
    settings = default_settings(
        device,
        lengths=whole_numbers(lengths),
        batch=batch,
        heads_q=heads,
        heads_kv=heads_kv,
        dim=dim,
        dtype=dtype,
        causal=causal,
        window=window,
        alibi=alibi,
        backward=backward,
        only=tuple(only or ()),
        seconds=seconds,
        memory=None if memory is None else int(memory * 2**30),
        seed=seed,
    )
    with show_progress() as tell:
        report = Bench(settings, tell=tell).run()
    _show(report, old)
    _write(report, json, markdown, html, plots)
    return 0 if report.sound else 1


def _refuse(what: str, given: Mapping[str, object], *names: str) -> None:
    """Refuse options that another kind of benchmark has."""
    for name in names:
        if given[name]:
            raise ValueError(f"--{name.replace('_', '-')} is no option of {what}")


def _bench_softmax(settings: SoftmaxSettings, json: Path | None, markdown: Path | None) -> int:
    from tilewise.bench import row_softmax

    with show_progress() as tell:
        report = row_softmax.Bench(settings, tell).run()
    tables = [row_softmax.table(report, which) for which in settings.passes]
    before, after = row_softmax.heading(report), row_softmax.footnotes(report)
    print_blocks((before, *tables, after))
    if json is not None:
        json.write_text(report.to_json() + "\n", encoding="utf-8")
    if markdown is not None:
        parts = [before, *(table.markdown() for table in tables), after]
        markdown.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return 0 if report.sound else 1


def _show(report: Report, old: Report | None) -> None:
    """Print a report, and what became worse since an older one."""
    from tilewise.bench import show
    from tilewise.bench.compare import compare

    print_blocks(show.blocks(report))
    if old is not None:
        print_blocks(["\nsince " + old.date + "\n" + "\n".join(compare(old, report))])


def _write(report: Report, json: Path | None, markdown: Path | None, html: Path | None, plots: Path | None) -> None:
    """Write a report where asked."""
    from tilewise.bench import show
    from tilewise.lab import page

    if json is not None:
        json.write_text(report.to_json() + "\n", encoding="utf-8")
    if markdown is not None:
        markdown.write_text(show.markdown(report), encoding="utf-8")
    if html is not None:
        html.write_text(page.page(report), encoding="utf-8")
    if plots is not None:
        page.write_plots(report, plots)


# ---- tune -----------------------------------------------------------------------------------------------------------


@app.command(epilog=example("tilewise tune --kinds forward --dims 64,128 --table sm_90.json"))
def tune(
    kinds: Annotated[list[str] | None, typer.Option(metavar="KIND,...", help="[default: forward, backward]")] = None,
    dims: Annotated[list[str] | None, typer.Option(metavar="D,D,...", help="Head dims.  [default: 64,128,256]")] = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "bfloat16",
    workers: Annotated[int, typer.Option(help="Processes that compile.")] = 8,
    table: Annotated[Path | None, typer.Option(metavar="PATH", help="Write the fastest into this table.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the times of all.")] = None,
) -> None:
    """Find the fastest tiles of the Triton kernels on this GPU.

    Kernels read their tiles from the tables in the package's data/tiles, named after the GPU: copy a table there to use
    it. Nothing is tuned in a first call.
    """
    writable(table, json)
    if workers < 1:
        raise ValueError(f"workers must be above 0, got {workers}")
    from tilewise.bench import tune as tuning

    jobs = tuning.jobs(words(kinds or []), words(dims or []), dtype)
    console = open_console()
    trials = tuning.tune(jobs, lambda text: console.print(text, soft_wrap=True), workers)
    for line in tuning.summary(trials):
        console.print(line, soft_wrap=True)
    if table is not None:
        tuning.write(tuning.rows(trials), table)
    if json is not None:
        json.write_text(tuning.to_json(trials) + "\n", encoding="utf-8")


# ---- warmup ---------------------------------------------------------------------------------------------------------


@app.command(epilog=example("tilewise warmup --dim 64,128 --dtype bfloat16", "tilewise warmup --target sm_90"))
def warmup(
    dim: Annotated[list[str] | None, typer.Option(metavar="D,D,...", help="Head dims.  [default: 64,128]")] = None,
    dtype: Annotated[list[str] | None, typer.Option(metavar="T,T,...", help="[default: bfloat16,float16]")] = None,
    kinds: Annotated[
        list[str] | None, typer.Option(metavar="KIND,...", help="[default: forward,backward,decode]")
    ] = None,
    target: Annotated[str | None, typer.Option(help="An architecture such as sm_90.  [default: this GPU's]")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that compile.  [default: as many as cores, 8]")] = None,
) -> int:
    """Compile kernels ahead of time and keep them, so that no first call waits. Needs no GPU if a target is named."""
    from tilewise.backends.compile import cache_folder
    from tilewise.bench import warmup as warming

    dims = whole_numbers(dim, "head dims") or warming.DIMS
    wanted = warming.jobs(dims, tuple(words(dtype or [])) or warming.DTYPES, tuple(words(kinds or [])) or warming.KINDS)
    capability, console = warming.target_of(target), open_console()
    with show_progress() as tell:
        done = list(warming.warm_up(wanted, capability, workers or min(os.cpu_count() or 1, 8), tell))
    for one in done:
        if one.refusal:
            console.print(f"not compiled: {one.job}: {one.refusal}", soft_wrap=True)
    compiled, seconds = sum(one.compiled for one in done), sum(one.seconds for one in done)
    text = f"{len(done)} calls on sm_{capability}: {compiled} kernels compiled in {seconds:.0f} s of all processes"
    console.print(f"{text}, kept in {cache_folder()}", soft_wrap=True)
    return int(any(one.refusal for one in done))


# ---- info -----------------------------------------------------------------------------------------------------------


@app.command(epilog=example("tilewise info --device cpu --measure"))
def info(
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N, mps.  [default: the best here]")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Time a copy and a matrix product too.")] = False,
    timings: Annotated[bool, typer.Option("--timings", help="Time a first call too, in new processes.")] = False,
) -> None:
    """Describe this machine: the device, its memories, the software, and which backends run here."""
    from tilewise.bench.info import describe

    console = open_console()
    sections = describe(device, measure=measure)
    if timings:
        from tilewise.bench.warmup import timing_lines
        from tilewise.bench.warmup import timings as time_first_call
        from tilewise.machine.detect import best_device

        sections["first call (d=128)"] = timing_lines(time_first_call(device or best_device()))
    for title, lines in sections.items():
        console.print(title, style="bold")
        width = max(len(name) for name, _ in lines)
        for name, value in lines:
            console.print(f"  {name:<{width}}  {value}", soft_wrap=True)


# ---- explain --------------------------------------------------------------------------------------------------------

ShownMask = Annotated[
    str | None,
    typer.Option(
        metavar="MASK", help="dense; a known one, as documents or sliding_window:256,0; or FILE.py:FUNCTION. Draws it."
    ),
]


@app.command(
    epilog=example(
        "tilewise explain --len-q 16384 --causal --window 4096,0 --device cpu",
        "tilewise explain --len-q 4096 --mask documents",
    )
)
def explain(
    kind: Annotated[str, typer.Option(help="dense, varlen (packed sequences) or cache (decoding).")] = "dense",
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    heads_kv: Annotated[int | None, typer.Option(help="Key heads.  [default: as many]")] = None,
    len_q: Annotated[int, typer.Option(help="Queries of each sequence.")] = 4096,
    len_kv: Annotated[int | None, typer.Option(help="Keys of each sequence.  [default: as many]")] = None,
    dim: Annotated[int, typer.Option(help="Head dim of queries and keys.")] = 64,
    dim_v: Annotated[int | None, typer.Option(help="Head dim of values.  [default: the same]")] = None,
    dtype: Annotated[str | None, typer.Option(help="[default: CPU float32, GPU float16]")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N, mps.  [default: the best here]")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Hide keys behind the diagonal.")] = False,
    window: Annotated[
        str | None, typer.Option(metavar="L,R", help="Keys visible to the left and right of the diagonal; -1 = all.")
    ] = None,
    align: Annotated[str, typer.Option(help="bottom_right or top_left.")] = "bottom_right",
    scale: Annotated[float | None, typer.Option(help="[default: dim ** -0.5]")] = None,
    softcap: Annotated[float | None, typer.Option(help="Cap of the scores.")] = None,
    alibi: Annotated[bool, typer.Option("--alibi", help="Slopes for each head.")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="A dense bias.")] = False,
    mask: ShownMask = None,
    sink: Annotated[bool, typer.Option("--sink", help="A sink for each head.")] = False,
    kv_start: Annotated[int | None, typer.Option(help="First visible key of each sequence.")] = None,
    kv_stop: Annotated[int | None, typer.Option(help="End of the visible keys.")] = None,
    dropout: Annotated[float, typer.Option(help="Probability.")] = 0.0,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Gradients equal in every bit.")] = False,
    return_lse: Annotated[bool, typer.Option("--return-lse", help="Ask for lse too.")] = False,
    layout: Annotated[str | None, typer.Option(help="bhsd or bshd.  [default: dense bhsd, cache bshd]")] = None,
    page_size: Annotated[int | None, typer.Option(help="Keys in pages of so many tokens.")] = None,
    backend: Annotated[str | None, typer.Option(help="Name one.  [default: the first that serves the call]")] = None,
) -> None:
    """Say what a call would do: which backend and tiles, why the others refuse, what it costs. Nothing is computed."""
    from tilewise.bench.sketch import Sketch
    from tilewise.machine.detect import best_device

    if kind not in {"dense", "varlen", "cache"}:
        raise ValueError(f"kind must be dense, varlen or cache; got {kind!r}")
    device = device or best_device()
    len_kv = len_q if len_kv is None else len_kv
    known = None if mask is None or mask == "dense" else _mask(mask, len_q, len_kv, device)
    sketch = Sketch(
        kind=cast("Kind", kind),
        batch=batch,
        heads_q=heads,
        heads_kv=heads if heads_kv is None else heads_kv,
        len_q=len_q,
        len_kv=len_kv,
        dim=dim,
        dim_v=dim if dim_v is None else dim_v,
        dtype=dtype or ("float32" if device == "cpu" else "float16"),
        device=device,
        causal=causal,
        window=_window(window),
        align=align,
        scale=scale,
        softcap=softcap,
        alibi=alibi,
        bias=bias,
        mask=mask == "dense",
        mask_mod=known,
        sink=sink,
        kv_start=kv_start,
        kv_stop=kv_stop,
        dropout=dropout,
        deterministic=deterministic,
        return_lse=return_lse,
        layout=layout,
        page_size=page_size,
        backend=backend,
    )
    console = open_console()
    console.print(str(sketch.explain()), soft_wrap=True)
    if known is not None:
        console.print(sketch.blocks().draw(), soft_wrap=True, markup=False, highlight=False)


def _mask(text: str, len_q: int, len_kv: int, device: str) -> Mask:
    """Find a mask by its name or file; what traces it takes seconds to load."""
    from tilewise.lab.masks import find

    return find(text, len_q, len_kv, device)


def _window(text: str | None) -> tuple[int | None, int | None] | None:
    """Read "left,right"."""
    if text is None:
        return None
    try:
        left, right = (int(side) for side in text.split(","))
    except ValueError:
        raise ValueError(f"window must be two whole numbers, such as 256,0; got {text!r}") from None
    return left, right


# ---- the lab --------------------------------------------------------------------------------------------------------

for _name, _function, _examples in LAB:
    app.command(_name, epilog=example(*_examples))(_function)


@app.command(epilog=example("tilewise lab --port 8000"))
def lab(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of this machine alone; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Open the lab as a page: counter, stepper, masks, joined splits and roofline with controls. Ctrl-C ends it."""
    from tilewise.lab.serve import serve

    serve(port, browser=browser, tell=lambda address: print_blocks([f"the lab is at {address}; Ctrl-C ends it"]))
