"""What holds for measuring against the model: counters are read rightly, bounds are the model's, verdicts follow."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tilewise import cli
from tilewise.backends import hopper_backward, triton_portable
from tilewise.bench.cases import Case
from tilewise.bench.implementations import Pass, plan
from tilewise.bench.show import Table
from tilewise.lab import bounds as bounds_module
from tilewise.lab import counters, measure, plot, probe, roofline
from tilewise.lab.bounds import ASSUMED_BLOCK, bounds
from tilewise.lab.counters import CountersError, Kernel, choose, find_ncu, metric_names, parse_csv
from tilewise.lab.measure import Measurement, Report, Row
from tilewise.lab.plot import Plot, Series
from tilewise.lab.roofline import Point
from tilewise.machine import cost, detect
from tilewise.machine.tiles import Tiles

CASE = Case(64, 1, 1, 1, 8, "float32", "cpu")

QUERY = """\
Device NVIDIA H200 (GH100)
---------------------------------------- --------- --------------- ------------------------------
Metric Name                              Metric Type     Metric Unit     Metric Description
---------------------------------------- --------- --------------- ------------------------------
dram__bytes_read                         Counter   byte            # of bytes read from DRAM
dram__bytes_write                        Counter   byte            # of bytes written to DRAM
gpu__time_duration                       Counter   nsecond         incremental duration in ns
l1tex__m_xbar2l1tex_read_bytes           Counter   byte            # of bytes read from crossbar to L1TEX
lts__t_sectors_op_read                   Counter   sector          # of LTS sectors for reads
"""

RECORDED = """\
==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "forward_kernel" - 0: 0%....50%....100% - 1 pass
a line of the program's own
==PROF== Disconnected from process 4242
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum","l1tex__m_xbar2l1tex_read_bytes.sum"
"","","","","","","","","","","","byte","Kbyte","ns","byte"
"0","4242","python3.12","127.0.0.1","forward_kernel","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0",\
"100,663,552","33,554.432","1,234,567","2,147,483,648"
"1","4242","python3.12","127.0.0.1","void combine<float>(int, float *)","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0",\
"1024","1.024","2000","n/a"
"""


def tilewise(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tilewise", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.fixture(autouse=True)
def _known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "measure_rates", lambda *_: detect.Rates("float32", 1e10, 1e11))
    monkeypatch.setattr(measure, "SECONDS", 0.001)


# ---- counters -------------------------------------------------------------------------------------------------------


def test_a_recorded_table_is_read_in_bytes_and_seconds() -> None:
    (name, first), (other, second) = parse_csv(RECORDED)
    assert (name, other) == ("forward_kernel", "void combine<float>(int, float *)")
    assert first == {
        "dram__bytes_read.sum": 100_663_552.0,
        "dram__bytes_write.sum": 33_554_432.0,
        "gpu__time_duration.sum": pytest.approx(1.234567e-3),
        "l1tex__m_xbar2l1tex_read_bytes.sum": 2_147_483_648.0,
    }
    assert second["dram__bytes_write.sum"] == 1024.0
    assert "l1tex__m_xbar2l1tex_read_bytes.sum" not in second, "n/a is no number"


def test_kernels_answer_the_questions_by_the_counters_chosen() -> None:
    ncu = choose("ncu", metric_names(QUERY))
    assert ncu.missing() == []
    forward, combine = ncu.kernels(RECORDED)
    assert forward == Kernel("forward_kernel", 100_663_552.0, 33_554_432.0, 2_147_483_648.0, forward.seconds)
    assert combine.loads is None


def test_sectors_stand_for_32_bytes_where_a_chip_counts_no_bytes() -> None:
    ncu = choose("ncu", ["lts__t_sectors_op_read_lookup_miss", "lts__t_sectors_op_write", "gpu__time_duration"])
    header = '"ID","Kernel Name","lts__t_sectors_op_read_lookup_miss.sum","lts__t_sectors_op_write.sum"\n'
    (kernel,) = ncu.kernels(header + '"","","sector","sector"\n"0","k","10","3"\n')
    assert (kernel.read, kernel.written, kernel.loads) == (320.0, 96.0, None)
    told = "\n".join(ncu.missing())
    assert "read: lts__t_sectors_op_read_lookup_miss, since there is no dram__bytes_read" in told
    assert "loads: none of l1tex__m_xbar2l1tex_read_bytes, lts__t_sectors_op_read on this chip" in told


def test_an_unknown_unit_is_an_error_and_no_guess() -> None:
    with pytest.raises(CountersError, match="'furlong'"):
        parse_csv('"ID","Kernel Name","dram__bytes_read.sum"\n"","","furlong"\n"0","k","1"\n')


def fake_ncu(folder: Path, *, table: str = RECORDED, fails: str = "") -> str:
    """Write a program that answers as ncu does."""
    path = folder / "ncu"
    path.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"if {fails!r}: print('==ERROR== ' + {fails!r}); sys.exit(1)\n"
        f"print({QUERY!r} if '--query-metrics' in sys.argv else {table!r})\n"
        f"open({str(folder / 'asked')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
    )
    path.chmod(0o755)
    return str(path)


def test_the_tool_is_asked_for_its_counters_and_leaves_the_clocks_alone(tmp_path: Path) -> None:
    ncu = find_ncu(fake_ncu(tmp_path))
    assert [kernel.name for kernel in ncu.count("program", "argument")] == [name for name, _ in parse_csv(RECORDED)]
    asked, counted = (tmp_path / "asked").read_text().splitlines()
    assert asked == "--query-metrics"
    for option in ("--csv", "--page raw", "--clock-control none", "--profile-from-start off", "dram__bytes_read.sum"):
        assert option in counted
    assert counted.endswith("program argument")


def test_a_tool_that_is_missing_fails_or_sees_nothing_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(CountersError, match="not on the PATH"):
        find_ncu()
    with pytest.raises(CountersError, match="could not be run"):
        find_ncu(str(tmp_path / "absent"))
    with pytest.raises(CountersError, match="ERR_NVGPUCTRPERM"):
        find_ncu(fake_ncu(tmp_path, fails="ERR_NVGPUCTRPERM - no permission to access the counters"))
    with pytest.raises(CountersError, match="saw no kernel"):
        find_ncu(fake_ncu(tmp_path, table="==WARNING== No kernels were profiled.")).count("program")


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_the_probe_runs_once_between_start_and_stop(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    kind = type(probe.named("numpy/tiled").prepare(CASE, CASE.inputs(0)))
    run = getattr(kind, which)

    def watched(self: object) -> object:
        happened.append(which)
        return run(self)

    monkeypatch.setattr(kind, which, watched)
    probe.main(
        probe.specification("numpy/tiled", which, CASE),
        lambda: happened.append("start"),
        lambda: happened.append("stop"),
    )
    assert happened == [which, which, "start", which, "stop"]


def test_a_probe_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="implementation must be one of naive"):
        probe.named("flash_attn_9")


# ---- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_bounds_of_tiled_ways_are_the_models(which: Pass) -> None:
    found = bounds("numpy/tiled", replace(CASE, length=2048), which)
    shape = replace(CASE, length=2048).shape
    if which == "forward":
        best, worst = cost.tiled_best(shape, 512, 512), cost.tiled_worst(shape, 512, 512)
    else:
        best, worst = cost.tiled_backward_best(shape, 512, 512), cost.tiled_backward_worst(shape, 512, 512)
    assert (found.best, found.worst) == (best.bytes, worst.bytes)
    assert found.memory == best.memory + 4 * 512 * 512 * (1 if which == "forward" else 2)
    assert found.least == found.best
    assert bounds("numpy/tiled", CASE, which, l2_bytes=1 << 30).least < bounds("numpy/tiled", CASE, which).least


def test_bounds_of_gpu_kernels_follow_their_own_tiles_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASE, length=4096, dim=128, dtype="bfloat16")
    plain = plan(case, "forward", "torch_tiled").problem
    planned = SimpleNamespace(problem=plain, tiles=Tiles(128, 64))
    monkeypatch.setattr(bounds_module, "plan", lambda *_: planned)
    monkeypatch.setattr(triton_portable, "_capability", lambda _: (9, 0))
    shape = case.shape
    assert bounds("tilewise/hopper", case, "forward").worst == cost.tiled_worst(shape, 128, 64).bytes
    both = triton_portable.backward_tiles(plain)
    two = cost.tiled_backward_worst(shape, both.q.block_q, both.kv.block_kv, passes=2)
    assert bounds("tilewise/triton_portable", case, "backward").worst == two.bytes
    chosen = hopper_backward.settings(plain)
    one = cost.tiled_backward_worst(shape, chosen.block_q, chosen.block_kv)
    assert bounds("tilewise/hopper", case, "backward").worst == one.bytes
    assert "1 passes" in bounds("tilewise/hopper", case, "backward").tiles


def test_products_in_tiles_load_their_operands_as_often_as_their_loops() -> None:
    case = replace(CASE, length=3 * ASSUMED_BLOCK, dim=2 * ASSUMED_BLOCK)
    n, d, b = case.length, case.dim, ASSUMED_BLOCK

    def loads(rows: int, depth: int, columns: int) -> int:
        tiles = [(min(b, rows - i), min(b, columns - j)) for i in range(0, rows, b) for j in range(0, columns, b)]
        return sum((height + width) * depth for height, width in tiles)

    passes = 4 * n * n  # read by scale, mask, softmax and dropout
    forward = loads(n, d, n) + loads(n, n, d) + passes
    assert bounds("naive", case, "forward").loads == 4 * forward
    backward = loads(n, n, d) + loads(n, d, n) + 2 * loads(n, n, d)
    once = 5 * n * n - 3 * n * n  # p and dp, read by the softmax's own step; the products read the other three
    assert bounds("naive", case, "backward").loads == 4 * (backward + once + 3 * n * n)


@pytest.mark.parametrize("name", ["naive", "sdpa/flash", "sdpa/math", "tilewise/torch_tiled", "numpy/tiled"])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_the_worst_is_never_below_the_best(name: str, which: Pass) -> None:
    for length in (1, 64, 100, 1000):
        found = bounds(name, replace(CASE, length=length, causal=True), which)
        assert 0 < found.least <= found.best <= found.worst


# ---- rows and reports -----------------------------------------------------------------------------------------------


def row(**changes: object) -> Row:
    told = bounds("numpy/tiled", replace(CASE, length=2048), "forward", l2_bytes=1000)
    return replace(Row("numpy/tiled", "forward", 2048, told, 1.0, 0.5), **changes)  # type: ignore[arg-type]


def test_a_verdict_says_where_bytes_stand() -> None:
    told = row().bounds
    assert row().verdict == ""
    assert row(read=float(told.least), written=0.0).verdict == "inside"
    assert row(read=float(told.least) - 1, written=0.0).verdict == "BELOW"
    assert row(read=float(told.worst), written=0.0).verdict == "inside"
    assert row(read=float(told.worst), written=1.0).verdict == "ABOVE"


def test_the_counters_of_all_kernels_are_summed_and_shown(tmp_path: Path) -> None:
    ncu = find_ncu(fake_ncu(tmp_path))
    report = Measurement([CASE], ["numpy/tiled"], ["forward"], ncu).run()
    (found,) = report.rows
    assert (found.read, found.written, found.loads) == (100_664_576.0, 33_555_456.0, None)
    assert found.verdict == "ABOVE"
    assert not report.sound
    told = measure.bytes_table(report.rows)
    assert isinstance(told, Table)
    assert (told.rows[0][6], told.rows[0][8]) == ("128", "ABOVE")
    words = "\n".join(measure._remarks(report.rows))
    assert "2 kernels, 100% of it in forward_kernel" in words
    kept = json.loads(report.to_json())
    assert kept["rows"][0]["verdict"] == "ABOVE"
    assert kept["rows"][0]["kernels"][0]["name"] == "forward_kernel"


def test_what_cannot_be_counted_or_run_is_a_row_that_says_why(tmp_path: Path) -> None:
    ncu = find_ncu(fake_ncu(tmp_path))
    fake_ncu(tmp_path, fails="out of luck")
    report = Measurement([CASE], ["numpy/tiled"], ["forward"], ncu).run()
    assert report.rows[0].moved is None
    assert "out of luck" in report.rows[0].note
    report = Measurement([replace(CASE, dtype="bfloat16")], ["numpy/tiled", "naive"], ["forward"]).run()
    assert report.absent == {"numpy/tiled (forward)": "NumPy has no bfloat16"}
    assert [one.name for one in report.rows] == ["naive"]


def test_a_wrong_result_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_wrong", lambda *_: "out is off by 1, 0 may be")
    report = Measurement([CASE], ["numpy/tiled"], ["forward"]).run()
    assert (report.rows[0].seconds, report.rows[0].note) == (None, "out is off by 1, 0 may be")
    assert not report.sound


def test_defaults_suit_the_device_and_bad_sizes_are_refused() -> None:
    assert [case.length for case in measure.cases("cpu")] == [512, 1024, 2048, 4096]
    for given, message in (
        ({"lengths": [0]}, "n must be 1 or more"),
        ({"dim": 0}, "d must be 1 or more"),
        ({"heads_q": 3, "heads_kv": 2}, "multiple of heads-kv"),
        ({"dtype": "int8"}, "dtype must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            measure.cases("cpu", **given)


def test_on_a_cpu_time_and_peak_stand_beside_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, drawn = tmp_path / "measure.json", tmp_path / "roof.svg"
    words = ("measure", "--device", "cpu", "--n", "128,512", "--backward", "--json", str(file), "--plot", str(drawn))
    assert tilewise(monkeypatch, *words) == 0
    told = capsys.readouterr().out
    for text in ("copy 10.0 GB/s", "matrix product 0.1 TFLOP/s", "peak MiB", "model MiB", "4 times the length", "roof"):
        assert text in told
    rows = json.loads(file.read_text())["rows"]
    peaks = {(one["name"], one["which"], one["length"]): one["memory"] for one in rows}
    for which in ("forward", "backward"):
        naive = peaks["numpy/naive", which, 512] / peaks["numpy/naive", which, 128]
        tiled = peaks["numpy/tiled", which, 512] / peaks["numpy/tiled", which, 128]
        assert naive > 1.5 * tiled
    for one in rows:
        assert one["memory"] < 4 * one["bounds"]["memory"] + 2**20
    assert ET.fromstring(drawn.read_text()).tag.endswith("svg")  # noqa: S314  # written here


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--n", "1k"), "n must be whole numbers"),
        (("--only", "fa9"), "implementation must be one of naive"),
        (("--device", "abacus"), "device must be cpu"),
        (("--json", "no/such/folder/x.json"), "cannot write"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tilewise(monkeypatch, "measure", *words) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    assert message in told.err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_bytes_counted_stand_inside_the_bounds() -> None:
    report = measure.measure(measure.cases("cuda", lengths=[2048], heads_q=4), backward=True, tell=lambda *_: None)
    if report.notes:
        pytest.skip(report.notes[0])
    assert {one.name: one.verdict for one in report.rows if one.verdict != "inside"} == {}


# ---- pictures -------------------------------------------------------------------------------------------------------


def test_the_sketch_has_the_roof_the_ridge_and_every_point_beside_its_number() -> None:
    points = [Point("one", 10.0, 5e12), Point("other", 10.0, 5e12), Point("far", 1000.0, 5e13)]
    lines = roofline.sketch(points, 1e12, 1e14)
    drawn = "\n".join(lines[:18])
    assert "ab" in drawn, "points in one place stand side by side"
    assert "c" in drawn
    assert any("ridge 100" in line for line in lines)
    assert "  a  one: 10 FLOP/byte, 5 TFLOP/s, 50% of the roof" in lines
    assert "  c  far: 1000 FLOP/byte, 50 TFLOP/s, 50% of the roof" in lines


@pytest.mark.parametrize("scale", ["linear", "log2", "log10"])
def test_a_plot_is_sound_xml_with_every_point_inside_the_paper(scale: plot.Scale) -> None:
    points = [(512.0, 0.5), (1024.0, 2.0), (16384.0, 900.0), (0.0, 1.0), (1.0, float("nan"))]
    series = [Series(f"<{number}>", points, kind) for number, kind in enumerate(("both", "line", "marks", "both"))]  # type: ignore[arg-type]
    drawn = Plot("a < b", "N", "ms", series, scale, scale)
    tree = ET.fromstring(drawn.svg())  # noqa: S314  # written here
    width, height = (float(size) for size in tree.attrib["viewBox"].split()[2:])
    kept = 4 if scale == "linear" else 3
    assert len(drawn.points(series[0])) == kept
    places = [
        (float(x), float(y))
        for line in tree.iter("{http://www.w3.org/2000/svg}polyline")
        for x, y in (pair.split(",") for pair in line.attrib["points"].split())
    ]
    assert len(places) >= 3 * kept
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)


def test_ticks_are_round_and_few() -> None:
    for values, scale in (([3.0, 70000.0], "log10"), ([1.0, 2.0**30], "log2"), ([0.0, 0.7], "linear"), ([5.0], "log2")):
        ticks = plot._Axis.around(values, scale, 0, 100).ticks()  # type: ignore[arg-type]
        assert 2 <= len(ticks) <= 11


def test_pictures_are_written_by_their_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = roofline.plot("t", [Point("a", 10.0, 1e12)], 1e12, 1e13)
    drawn.write(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    with pytest.raises(ValueError, match=r"\.svg or \.png"):
        drawn.write(tmp_path / "a.gif")
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(ValueError, match="pip install tilewise"):
        drawn.write(tmp_path / "a.png")


def test_png_is_made_where_the_library_is_there(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="vl-convert-python makes PNG")
    roofline.plot("t", [Point("a", 10.0, 1e12)], 1e12, 1e13).write(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_an_empty_report_draws_an_empty_roof() -> None:
    empty = Report("", "", {}, {"device": "cpu"}, {"bandwidth": 1.0, "matmul": 2.0}, {}, (), {})
    assert measure.picture(empty).title == "Roofline"
    assert counters.UNITS["byte"] == 1
