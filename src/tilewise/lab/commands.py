"""The lab's commands: options in, tables out. `tilewise.cli` takes them from `COMMANDS`.

Everything heavy is imported inside the commands, so that ``tilewise --help`` answers at once.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from tilewise.bench.terminal import print_blocks, show_progress, whole_numbers, words, writable

Heads = Annotated[int, typer.Option(help="Query heads.")]
HeadsKv = Annotated[int | None, typer.Option(help="Key heads.  [default: as many]")]
Dtype = Annotated[str, typer.Option(help="Of q, k, v and out.")]
Causal = Annotated[bool, typer.Option("--causal", help="Hide keys behind the diagonal.")]
JsonFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the results.")]


# ---- count ----------------------------------------------------------------------------------------------------------


def count(
    n: Annotated[int, typer.Option("--n", help="Queries, and keys.")] = 16384,
    d: Annotated[int, typer.Option("--d", help="Head dim.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    heads: Heads = 1,
    heads_kv: HeadsKv = None,
    dtype: Dtype = "float16",
    causal: Causal = False,
    backward: Annotated[bool, typer.Option("--backward", help="Count the backward pass too.")] = False,
    block_q: Annotated[int, typer.Option(help="Queries in a tile.")] = 128,
    block_kv: Annotated[int, typer.Option(help="Keys in a tile.")] = 64,
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,...", help="Data sheets, or here: this machine, measured.  [default: all sheets]"),
    ] = None,
    bandwidth: Annotated[float | None, typer.Option(help="What if main memory moved so many GB/s?")] = None,
    sram_bandwidth: Annotated[float | None, typer.Option(help="What if on-chip memory moved so many GB/s?")] = None,
    flops: Annotated[float | None, typer.Option(help="What if arithmetic made so many TFLOP/s?")] = None,
    json: JsonFile = None,
) -> None:
    """Count operations, bytes and memory of each way to compute attention, and the least time on a device."""
    writable(json)
    from tilewise.lab import count as counting

    question = counting.Question(
        length=n,
        dim=d,
        batch=batch,
        heads_q=heads,
        heads_kv=heads if heads_kv is None else heads_kv,
        dtype=dtype,
        causal=causal,
        block_q=block_q,
        block_kv=block_kv,
    )
    on = counting.devices(
        [name.strip() for text in device or [] for name in text.split(",")],  # names have spaces
        dtype,
        bandwidth=None if bandwidth is None else bandwidth * 1e9,
        onchip_bandwidth=None if sram_bandwidth is None else sram_bandwidth * 1e9,
        flops=None if flops is None else flops * 1e12,
    )
    print_blocks(counting.blocks(question, on, backward=backward))
    if json is not None:
        json.write_text(json_format.dumps(counting.record(question, on), indent=1) + "\n", encoding="utf-8")


# ---- step -----------------------------------------------------------------------------------------------------------


def step(
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON or .npz with q, k, v and, if it likes, d_out.  [default: small ones]"),
    ] = None,
    row: Annotated[
        str | None, typer.Option(metavar="X,X,...", help="Watch the softmax of these numbers alone; -inf is one.")
    ] = None,
    block_q: Annotated[int, typer.Option(help="Queries in a tile.")] = 2,
    block_kv: Annotated[int, typer.Option(help="Keys in a block.")] = 2,
    causal: Causal = False,
    scale: Annotated[float, typer.Option(help="What products of queries and keys are multiplied by.")] = 1.0,
    backward: Annotated[bool, typer.Option("--backward", help="Watch the backward pass too.")] = False,
) -> None:
    """Watch the online softmax and a tile of queries run over blocks of keys, number by number."""
    from tilewise.lab import step as stepping

    if row is not None:
        print_blocks([stepping.softmax_table(stepping.numbers_in(row))])
        return
    numbers = stepping.DEFAULT if file is None else stepping.load(file)
    tiling = stepping.tiling_of(numbers, block_q, block_kv, causal=causal)
    watched = stepping.forward(numbers, tiling, scale)
    score = numbers.q[0] @ numbers.k.T * scale
    print_blocks([stepping.softmax_table(score), *stepping.forward_tables(watched), *stepping.remarks(watched)])
    if backward:
        print_blocks(stepping.backward_tables(stepping.backward(numbers, tiling, scale)))


# ---- break ----------------------------------------------------------------------------------------------------------


def break_(
    name: Annotated[str | None, typer.Argument(help="Which one.  [default: list them]")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them, one after the other.")] = False,
) -> None:
    """Leave one thing out, see what comes of it and why, and which test would have noticed."""
    from tilewise.lab import breaks

    if name is None and not every:
        width = max(len(each.name) for each in breaks.BREAKS)
        print_blocks(f"{each.name:<{width}}  {each.title}" for each in breaks.BREAKS)
        return
    for each in breaks.BREAKS if name is None else (breaks.find_break(name),):
        print_blocks([*breaks.lines(each), ""])


# ---- measure --------------------------------------------------------------------------------------------------------


def measure(
    n: Annotated[
        list[str] | None, typer.Option("--n", metavar="N,N,...", help="[default: CPU 512 to 4096, GPU 8192]")
    ] = None,
    d: Annotated[int | None, typer.Option("--d", help="Head dim.  [default: CPU 64, GPU 128]")] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    heads: Annotated[int | None, typer.Option(help="Query heads.  [default: CPU 1, GPU 16]")] = None,
    heads_kv: HeadsKv = None,
    dtype: Annotated[str | None, typer.Option(help="[default: CPU float32, GPU bfloat16]")] = None,
    causal: Causal = False,
    backward: Annotated[bool, typer.Option("--backward", help="Measure the backward pass too.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An implementation of tilewise bench; may be repeated.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N.  [default: the best here]")] = None,
    ncu: Annotated[str | None, typer.Option(metavar="PATH", help="Nsight Compute.  [default: as found]")] = None,
    json: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the forward pass's roofline: .svg, or .png with extras.")
    ] = None,
) -> int:
    """Measure time, bytes and memory, and set them beside the least and the most that the model allows.

    Bytes are counted on a GPU by Nsight Compute, where it may; without a GPU, NumPy's time and peak memory stand beside
    the model. Exit code 1: something failed, or moved what the model does not allow.
    """
    writable(json, plot)
    from tilewise.lab import measure as measuring

    cases = measuring.cases(
        device,
        lengths=whole_numbers(n, "n"),
        dim=d,
        batch=batch,
        heads_q=heads,
        heads_kv=heads_kv,
        dtype=dtype,
        causal=causal,
    )
    with show_progress() as tell:
        report = measuring.measure(cases, only=words(only or []), backward=backward, ncu=ncu, tell=tell)
    print_blocks(measuring.blocks(report))
    if json is not None:
        json.write_text(report.to_json() + "\n", encoding="utf-8")
    if plot is not None:
        measuring.picture(report).write(plot)
    return 0 if report.sound else 1


# Name, command, and what stands below its help as examples.
COMMANDS: tuple[tuple[str, Callable[..., int | None], tuple[str, ...]], ...] = (
    (
        "count",
        count,
        (
            "tilewise count --n 8192 --d 128 --causal --backward --device H200,A100",
            "tilewise count --device A100 --bandwidth 19500",
        ),
    ),
    ("break", break_, ("tilewise break", "tilewise break no-rescale")),
    (
        "measure",
        measure,
        ("tilewise measure --device cpu --n 256,512,1024", "tilewise measure --device cpu --n 512 --backward"),
    ),
    ("step", step, ("tilewise step", "tilewise step --row 3,1,6,2", "tilewise step --causal --backward")),
)
