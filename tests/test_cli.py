"""What holds of the command line: it answers at once, says in one line what is wrong, and does what its help shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise import cli
from tilewise.bench import compare, plan, run
from tilewise.bench.report import Report
from tilewise.machine import detect

SOURCE = str(Path(cli.__file__).parents[1])
COMMANDS = ("bench", "info", "explain")
QUICK = ("--lengths", "16,32", "--only", "naive", "--only", "sdpa", "--only", "tilewise", "--seconds", "60")


@pytest.fixture
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time as little as can be: these tests look at what is printed, not at how fast anything is."""
    monkeypatch.setattr(run, "ROUND_SECONDS", 0.001)
    monkeypatch.setattr(plan, "MOST_ROUNDS", plan.LEAST_ROUNDS)
    monkeypatch.setattr(detect, "measure_rates", lambda *_: detect.Rates("float32", 1e10, 1e11))


def tilewise(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run a command in this process and give its exit code."""
    monkeypatch.setattr(sys, "argv", ["tilewise", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


def started(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": SOURCE, **variables}
    command = [sys.executable, "-m", "tilewise", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


# ---- help ----


def test_help_comes_within_three_tenths_of_a_second() -> None:
    def seconds() -> float:
        begin = os.times()
        done = started("--help")
        end = os.times()
        assert done.returncode == 0
        assert all(name in done.stdout for name in COMMANDS)
        return end.children_user - begin.children_user + end.children_system - begin.children_system

    # Processor time, which is all there is to wait for, and the least of several: others on the machine only ever add.
    assert min(seconds() for _ in range(7)) < 0.3


def test_help_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; sys.argv = ['tilewise', 'bench', '--help']\n"
        "from tilewise import cli\n"
        "try: cli.main()\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_without_a_command_help_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert tilewise(monkeypatch) == 0
    assert "Commands:" in capsys.readouterr().out


@pytest.mark.usefixtures("_brief")
@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_in_each_help_works_as_printed(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tilewise(monkeypatch, command, "--help") == 0
    examples = re.findall(r"^ +tilewise (.+)$", capsys.readouterr().out.partition("Example")[2], re.MULTILINE)
    assert examples
    for line in examples:
        assert tilewise(monkeypatch, *line.split()) == 0
        assert capsys.readouterr().out.count("\n") > 5


# ---- bad options ----


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bench", "--foo"), "(see tilewise bench --help)"),
        (("frobnicate",), "No such command 'frobnicate'. (see tilewise --help)"),
        (("bench", "--lengths", "512,1k"), "lengths must be whole numbers with commas between them, got '512,1k'"),
        (("bench", "--lengths", ","), "lengths must be whole numbers"),
        (("bench", "--heads", "many"), "Invalid value for '--heads'"),
        (("bench", "--heads", "8", "--heads-kv", "3"), "heads must be a multiple of heads-kv, got 8 and 3"),
        (("bench", "--only", "fa9"), "only must name some of naive, sdpa, sdpa/flash"),
        (("bench", "--device", "abacus"), "device must be cpu, cuda, cuda:N or mps; got 'abacus'"),
        (("bench", "--dtype", "int8"), "dtype must be one of float16, bfloat16, float32, float64; got 'int8'"),
        (("bench", "--json", "no/such/folder/x.json"), "cannot write no/such/folder/x.json"),
        (("bench", "--compare", "absent.json"), "cannot read absent.json: No such file"),
        (("info", "--device", "abacus"), "device must be cpu"),
        (("explain", "--kind", "round"), "kind must be dense, varlen or cache; got 'round'"),
        (("explain", "--window", "5"), "window must be two whole numbers, such as 256,0; got '5'"),
        (("explain", "--window", "-7,0"), "window's left side counts keys beside the diagonal"),
        (("explain", "--heads", "8", "--heads-kv", "3"), "heads_q must be a multiple of heads_kv"),
        (("explain", "--kind", "varlen", "--mask", "dense"), "mask is no option of varlen attention"),
        (("explain", "--kind", "cache", "--mask", "causal"), "mask is no option of cache attention"),
        (("explain", "--mask", "dashed"), "mask must be dense, FILE.py:FUNCTION, or one of causal, "),
        (("explain", "--mask", "sliding_window:wide"), "mask sliding_window does not take 'wide'"),
        (("explain", "--mask", "absent.py:mask"), "cannot read absent.py"),
        (("explain", "--backend", "none"), "backend must be one of"),
        (("explain", "--backend", "torch_sdpa", "--sink", "--device", "cpu"), "cannot serve this call: has no sink"),
        (("explain", "--dropout", "2"), "dropout"),
        (("explain", "--len-q", "-1"), "len-q must be 0 or more, got -1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_bad_option_is_one_line_and_exit_code_2(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tilewise(monkeypatch, *words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert message in told.err


def test_a_defect_of_our_own_is_no_bad_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object, **__: object) -> None:
        raise KeyError("somewhere inside")

    monkeypatch.setattr("tilewise.bench.info.describe", defect)
    monkeypatch.setattr(sys, "argv", ["tilewise", "info"])
    with pytest.raises(KeyError, match="somewhere inside"):
        cli.main()


# ---- bench ----


@pytest.mark.usefixtures("_brief")
def test_bench_prints_tables_writes_files_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, text = tmp_path / "old.json", tmp_path / "table.md"
    assert tilewise(monkeypatch, "bench", *QUICK, "--json", str(old), "--markdown", str(text)) == 0
    out = capsys.readouterr()
    assert "tilewise/torch_tiled" in out.out
    assert "agree on the real input: yes" in out.out
    assert "…" not in out.out, "a cell was cut off"
    assert out.err == "", "stderr is no terminal here, so there is no progress bar"
    kept = json.loads(old.read_text())
    assert kept["command"] == f"tilewise bench {' '.join(QUICK)} --json {old} --markdown {text}"
    assert {row["length"] for row in kept["rows"]} == {16, 32}
    assert "| N | implementation |" in text.read_text()
    monkeypatch.setattr(compare, "SLOWER", 1e9)  # at such lengths times are noise
    assert tilewise(monkeypatch, "bench", *QUICK, "--compare", str(old)) == 0
    assert "nothing became worse in" in capsys.readouterr().out


@pytest.mark.usefixtures("_brief")
def test_an_unsound_benchmark_ends_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Report, "sound", property(lambda _: False))
    assert tilewise(monkeypatch, "bench", "--lengths", "16", "--only", "naive", "--seconds", "60") == 1


def test_bench_starts_anew_without_what_steers_openblas_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ("bench", "--lengths", "16", "--only", "numpy/tiled", "--seconds", "60", "--json", str(file))
    done = started(*words, OPENBLAS_CORETYPE="Haswell", OPENBLAS_L2_SIZE="1")
    assert done.returncode == 0, done.stderr
    told = json.loads(file.read_text())["environment"]
    assert told["unset_variables"] == ["OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"]
    assert not {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"} & set(told["variables"])


def test_only_bench_starts_anew_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[dict[str, str]] = []

    def execve(path: str, arguments: list[str], environment: dict[str, str]) -> None:
        starts.append(environment)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.delenv(cli.UNSET, raising=False)
    tilewise(monkeypatch, "info", "--help")
    assert starts == []
    tilewise(monkeypatch, "bench", "--help")
    assert [environment.get(cli.UNSET) for environment in starts] == ["OPENBLAS_CORETYPE"]
    assert "OPENBLAS_CORETYPE" not in starts[0]
    monkeypatch.setenv(cli.UNSET, "OPENBLAS_CORETYPE")  # as in the process started anew, even if the variable came back
    tilewise(monkeypatch, "bench", "--help")
    assert len(starts) == 1


# ---- info and explain ----


def test_info_describes_the_machine_and_its_backends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tilewise(monkeypatch, "info", "--device", "cpu") == 0
    told = capsys.readouterr().out
    for word in ("cores", "memory", "torch", "numpy", "python", "torch_tiled", "runs", "taken for plain attention"):
        assert word in told


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ("dense attention, B=1 N=4096x4096 d=64 8 heads, float32 on cpu", "backend  torch_sdpa")),
        (("--len-q", "1000000", "--bias", "--mask", "dense"), ("torch_tiled", "dense mask", "bias")),
        (
            ("--causal", "--window", "256,-1", "--align", "top_left", "--softcap", "30"),
            ("256", "softcap 30.0"),
        ),
        (("--alibi", "--sink", "--kv-start", "3", "--kv-stop", "9"), ("ALiBi", "sink", "key ranges")),
        (("--dropout", "0.1", "--layout", "bshd", "--deterministic", "--return-lse"), ("dropout 0.1", "N=4096x4096")),
        (("--heads-kv", "2", "--dim", "128", "--dim-v", "64", "--scale", "0.5"), ("8 heads over 2", "d=128/64")),
        (
            ("--dtype", "bfloat16", "--backend", "naive", "--len-q", "64", "--len-kv", "100"),
            ("N=64x100", "backend  naive"),
        ),
        (("--kind", "varlen", "--batch", "3", "--bias", "--page-size", "16"), ("varlen attention, B=3", "bias")),
        (
            ("--kind", "cache", "--len-q", "1", "--len-kv", "4000", "--page-size", "256", "--layout", "bhsd"),
            ("cache attention", "N=1x4096"),
        ),
        (("--kind", "cache", "--len-q", "2", "--len-kv", "500", "--causal", "--alibi"), ("N=2x500", "ALiBi")),
        (
            ("--len-q", "300", "--mask", "causal"),
            ("torch_tiled", "1 full (#), 5 partial (+), 3 empty (.)\n+..\n#+.\n+++"),
        ),
        (("--len-q", "300", "--window", "0,0", "--mask", "causal"), ("3 partial (+)", "\n+..\n.+.\n..+")),
    ],
    ids=" ".join,
)
def test_explain_takes_every_option_and_allocates_next_to_nothing(
    words: tuple[str, ...],
    expected: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tilewise(monkeypatch, "explain", "--device", "cpu", *words) == 0
    told = capsys.readouterr().out
    for text in expected:
        assert text in told
    assert "flops" in told
