"""Bytes that a GPU's memory really moved, as Nsight Compute (`ncu`) counts them, kernel by kernel.

Which counters there are depends on the chip, so the tool is asked first: a GPU with memory of its own counts in its
memory controllers, one that shares memory with the CPU may know only what missed in its L2 cache. Before each kernel
the tool empties the caches, and it is told to leave the clocks alone.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SECTOR = 32  # bytes

# For each question the counters that answer it, best first, and the bytes (or seconds) that one count stands for.
COUNTERS: Mapping[str, tuple[tuple[str, float], ...]] = {
    "read": (
        ("dram__bytes_read", 1),
        ("fbpa__dram_read_bytes", 1),
        ("lts__t_sectors_op_read_lookup_miss", SECTOR),  # shared memory: what the L2 cache had to fetch
    ),
    "written": (
        ("dram__bytes_write", 1),
        ("fbpa__dram_write_bytes", 1),
        ("lts__t_sectors_op_write", SECTOR),  # what reached the L2 cache; all of it leaves it sooner or later
    ),
    "loads": (("l1tex__m_xbar2l1tex_read_bytes", 1), ("lts__t_sectors_op_read", SECTOR)),
    "seconds": (("gpu__time_duration", 1),),
}
UNITS = {
    "": 1.0,
    "byte": 1.0,
    "Kbyte": 1e3,
    "Mbyte": 1e6,
    "Gbyte": 1e9,
    "Tbyte": 1e12,
    "sector": 1.0,
    "ns": 1e-9,
    "nsecond": 1e-9,
    "us": 1e-6,
    "usecond": 1e-6,
    "ms": 1e-3,
    "msecond": 1e-3,
    "s": 1.0,
    "second": 1.0,
}


class CountersError(RuntimeError):
    """The tool is missing, or could not count; the message says why."""


@dataclass(frozen=True)
class Kernel:
    """What one kernel moved: bytes from and to main memory, bytes that multiprocessors loaded, and its seconds."""

    name: str
    read: float | None = None
    written: float | None = None
    loads: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Ncu:
    """The tool, and the counters that it has on this chip.

    Args:
        path: of the program.
        chosen: for each question the counter that answers it, and what a count stands for.
        absent: the questions that no counter answers, and the counters that were looked for.
    """

    path: str
    chosen: Mapping[str, tuple[str, float]]
    absent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def command(self, *program: str) -> list[str]:
        """Give the command that counts a program's kernels between cudaProfilerStart and cudaProfilerStop."""
        metrics = ",".join(f"{name}.sum" for name, _ in self.chosen.values())
        options = ["--csv", "--page", "raw", "--print-units", "base", "--metrics", metrics]
        options += ["--clock-control", "none", "--cache-control", "all", "--profile-from-start", "off"]
        return [self.path, *options, "--target-processes", "all", *program]

    def count(self, *program: str, timeout: float = 300.0) -> list[Kernel]:
        """Run a program under the tool and give its kernels, in order.

        Raises:
            CountersError: it failed, or saw no kernel.
        """
        text = _run(self.command(*program), timeout)
        kernels = self.kernels(text)
        if not kernels:
            raise CountersError(f"ncu saw no kernel: {_complaint(text)}")
        return kernels

    def kernels(self, text: str) -> list[Kernel]:
        """Read what ``ncu --csv --page raw`` printed."""
        found = []
        for name, values in parse_csv(text):
            told = {
                question: value * factor
                for question, (counter, factor) in self.chosen.items()
                if (value := values.get(f"{counter}.sum")) is not None
            }
            found.append(Kernel(name, **told))
        return found

    def missing(self) -> list[str]:
        """Say in words which counters this chip has not."""
        return [
            f"{question}: none of {', '.join(names)} on this chip"
            if question not in self.chosen
            else f"{question}: {self.chosen[question][0]}, since there is no {', '.join(names)}"
            for question, names in self.absent.items()
        ]


def find_ncu(path: str | None = None) -> Ncu:
    """Find the tool: as named, on the PATH or in CUDA's folder; and ask which counters it has here.

    Raises:
        CountersError: it is not there, or does not answer.
    """
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "ncu"
    program = path or shutil.which("ncu") or (str(cuda) if cuda.is_file() else None)
    if program is None:
        raise CountersError(
            "Nsight Compute (ncu) is not on the PATH; it comes with CUDA's toolkit, or name it by --ncu"
        )
    known = metric_names(_run([program, "--query-metrics"], timeout=120.0))
    if not known:
        raise CountersError(f"{program} --query-metrics names no counter on this machine")
    return choose(program, known)


def choose(path: str, known: Iterable[str]) -> Ncu:
    """Choose for each question the best counter among those known.

    >>> choose("ncu", ["lts__t_sectors_op_read_lookup_miss", "dram__bytes_write"]).chosen["read"]
    ('lts__t_sectors_op_read_lookup_miss', 32)
    """
    names = set(known)
    chosen: dict[str, tuple[str, float]] = {}
    absent: dict[str, tuple[str, ...]] = {}
    for question, candidates in COUNTERS.items():
        first = next((place for place, (name, _) in enumerate(candidates) if name in names), len(candidates))
        if first < len(candidates):
            chosen[question] = candidates[first]
        if first:
            absent[question] = tuple(name for name, _ in candidates[:first])
    return Ncu(path, chosen, absent)


def metric_names(text: str) -> list[str]:
    r"""Read the names of counters from what ``ncu --query-metrics`` printed.

    >>> metric_names("Device NVIDIA H200 (GH100)\ndram__bytes_read   Counter   byte   # of bytes read from DRAM")
    ['dram__bytes_read']
    """
    return re.findall(r'^\s*"?([a-z]\w*__\w+)', text, re.MULTILINE)


def parse_csv(text: str) -> list[tuple[str, dict[str, float]]]:
    """Read kernels' names and sums, in bytes, seconds or counts, from what ``ncu --csv --page raw`` printed.

    Columns of other kinds, such as a launch's sizes, stand among them in units of their own. Lines that are no table
    (the tool's own messages, a program's output) are passed over. Values that are no number ("n/a") are left out.

    Raises:
        CountersError: a unit that is not known.
    """
    rows = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    found: list[tuple[str, dict[str, float]]] = []
    header: list[str] = []
    units: list[str] = []
    for row in rows:
        if row[0] == "ID":
            header, units = row, []
        elif header and len(row) == len(header):
            if not units:
                units = row  # the line below the header
                continue
            cells = dict(zip(header, zip(row, units, strict=True), strict=True))
            values = {name: _value(*cell) for name, cell in cells.items() if name.endswith(".sum")}
            numbers = {name: value for name, value in values.items() if value is not None}
            found.append((cells["Kernel Name"][0], numbers))
    return found


def _value(text: str, unit: str) -> float | None:
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    if unit not in UNITS:
        raise CountersError(f"ncu told a value in {unit!r}; known are {', '.join(filter(None, UNITS))}")
    return number * UNITS[unit]


def _run(command: Sequence[str], timeout: float) -> str:
    try:
        done = subprocess.run(  # noqa: S603  # a program that the user named or has
            command, capture_output=True, text=True, timeout=timeout, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CountersError(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        raise CountersError(f"ncu failed: {_complaint(done.stdout + done.stderr)}")
    return done.stdout


def _complaint(text: str) -> str:
    """Give what the tool complained of, or its last words."""
    told = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("==ERROR==").strip() for line in told if line.startswith("==ERROR==")]
    return (errors or told or ["it said nothing"])[-1][:300]
