"""Run a sample of another project's tests in this process, and write what passed, failed and was skipped, and why.

The tests stay where they are: only their path is given. Files of this kind multiply their parameters into hundreds of
thousands of cases, so each test function is sampled, by a fixed seed, before its cases are collected, and the run ends
at a deadline; what it did not reach is counted as not run. ``--workers`` shares the sample out over processes: most of
a case's time goes to compiling its kernels, and what one process has compiled the others find.
"""
# ruff: noqa: INP001, T201 - a script's part, and a script prints

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypedDict

import pytest

from tilewise.bench.provenance import provenance


def parser(description: str) -> argparse.ArgumentParser:
    """Make the arguments that all scripts share."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("tests", type=Path, help="the other project's test file")
    made.add_argument("--each", type=int, default=20, help="cases of each test function (default: %(default)s)")
    made.add_argument("--seconds", type=float, default=220.0, help="begin no case after (default: %(default)s)")
    made.add_argument("--seed", type=int, default=0, help="of the sample (default: %(default)s)")
    made.add_argument("--only", default="", help="as pytest's -k")
    made.add_argument("--workers", type=int, default=1, help="processes (default: %(default)s)")
    made.add_argument("--share", default="0/1", help="which part of the sample runs here (default: %(default)s)")
    made.add_argument("--collect", action="store_true", help="collect the sample and run nothing")
    made.add_argument("--json", type=Path)
    return made


class Recorder:
    """A plugin of pytest that samples, stops at the deadline and remembers every outcome."""

    def __init__(self, options: argparse.Namespace, group: Callable[[pytest.Item], str | None]) -> None:
        self.options, self.group = options, group
        self.names: dict[str, str] = {}
        self.random = random.Random(options.seed)  # noqa: S311 - a sample, no secret
        self.deadline = time.monotonic() + options.seconds
        self.outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.reasons: dict[str, list[dict[str, str]]] = {"failed": [], "skipped": []}
        self.found: collections.Counter[str] = collections.Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Sample the cases of a parametrized function before they become tests."""
        calls = metafunc._calls  # noqa: SLF001 - sampled later, a file of this kind takes gigabytes
        self.found[metafunc.function.__name__] = len(calls)
        if len(calls) > self.options.each:
            metafunc._calls = self.random.sample(calls, self.options.each)  # noqa: SLF001

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sample what is left, and run one case of each function before the second of any: the deadline may come."""
        by_function: dict[str, list[pytest.Item]] = collections.defaultdict(list)
        for item in items:
            name = self.group(item)
            if name is not None:
                by_function[name].append(item)
                self.names[item.nodeid] = name
        picked = []
        for name, cases in by_function.items():
            self.found[name] = max(self.found[name], len(cases))
            picked.append(self.random.sample(cases, min(len(cases), self.options.each)))
        part, parts = map(int, self.options.share.split("/"))
        items[:] = [case for turn in itertools.zip_longest(*picked) for case in turn if case is not None][part::parts]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Count what begins too late as not run."""
        if time.monotonic() > self.deadline:
            item.add_marker(pytest.mark.skip(reason="DEADLINE"))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember an outcome and its reason."""
        if report.when != "call" and report.outcome == "passed":
            return
        case, reason = report.nodeid.partition("::")[2], short(report)
        outcome = "not run" if "DEADLINE" in reason else report.outcome
        self.outcomes[self.names[report.nodeid]][outcome] += 1
        if outcome in self.reasons:
            self.reasons[outcome].append({"case": case, "reason": reason})


def short(report: pytest.TestReport) -> str:
    """Give the line that says why: an exception's message, or a skip's reason."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = getattr(crash, "message", None) or str(report.longrepr or "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[:4])[:500]


class Found(TypedDict):
    """What a process found: outcomes by function and name, failures and skips with their reasons, calls served."""

    cases: dict[str, int]
    outcomes: dict[str, dict[str, int]]
    failed: list[dict[str, str]]
    skipped: list[dict[str, str]]
    served: dict[str, int]


def here(
    options: argparse.Namespace, group: Callable[[pytest.Item], str | None], served: dict[str, int]
) -> tuple[bool, Found]:
    """Run this process's share; say whether all could be collected, and give what was found."""
    recorder = Recorder(options, group)
    words = [str(options.tests), "-q", "-p", "no:cacheprovider", "--tb=short", "-W", "ignore", "--no-header"]
    words += ["--collect-only"] if options.collect else []
    words += ["-k", options.only] if options.only else []
    # The settings of this project are not for the tests of others.
    words += ["-c", "/dev/null", "--rootdir", str(options.tests.parent)]
    code = pytest.main(words, plugins=[recorder])
    collected = code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if not collected:
        print(f"pytest ended with {code!r}", file=sys.stderr)
    return collected, {
        "cases": dict(recorder.found),
        "outcomes": {name: dict(counts) for name, counts in sorted(recorder.outcomes.items())},
        "failed": recorder.reasons["failed"],
        "skipped": recorder.reasons["skipped"],
        "served": served,
    }


def shared_out(workers: int) -> tuple[bool, Found]:
    """Run this script again in so many processes, each with its share, and add up what they found."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{part}.json" for part in range(workers)]
        script = [sys.executable, *sys.argv, "--workers", "1"]
        processes = [
            subprocess.Popen(  # noqa: S603 - this script
                [*script, "--share", f"{part}/{workers}", "--json", str(file)],
                stdout=subprocess.DEVNULL,
            )
            for part, file in enumerate(files)
        ]
        for process in processes:
            process.wait()
        parts = [json.loads(file.read_text()) for file in files if file.exists()]
    if not parts:
        raise SystemExit("no process could collect the tests; run with --workers 1 to see why")
    return len(parts) == workers, added(parts)


def added(parts: list[Found]) -> Found:
    """Add up what the processes found; each of them has counted all cases.

    >>> one = {"cases": {"f": 2}, "outcomes": {"f": {"passed": 1}}, "failed": [], "skipped": [], "served": {"op": 3}}
    >>> added([one, one])["outcomes"], added([one, one])["served"]
    ({'f': {'passed': 2}}, {'op': 6})
    """
    outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    served: collections.Counter[str] = collections.Counter()
    for part in parts:
        served.update(part["served"])
        for name, counts in part["outcomes"].items():
            outcomes[name].update(counts)
    return {
        "cases": parts[0]["cases"],
        "outcomes": {name: dict(counts) for name, counts in sorted(outcomes.items())},
        "failed": [failure for part in parts for failure in part["failed"]],
        "skipped": [skip for part in parts for skip in part["skipped"]],
        "served": dict(served),
    }


def run(
    options: argparse.Namespace,
    group: Callable[[pytest.Item], str | None],
    device: str,
    explained: dict[str, str] | None = None,
    served: dict[str, int] | None = None,
) -> int:
    """Run the sample, write the record and print what failed.

    Args:
        options: of `parser`.
        group: names the function that a case belongs to, None for cases that are not wanted.
        device: that the record describes.
        explained: functions whose failure is expected, and why.
        served: calls that reached what is tested, by name, filled while the tests run.

    Returns:
        0 where nothing failed but what is explained.
    """
    start = time.monotonic()
    if options.workers > 1:
        collected, found = shared_out(options.workers)
    else:
        collected, found = here(options, group, {} if served is None else served)
    total: collections.Counter[str] = collections.Counter()
    for outcomes in found["outcomes"].values():
        total.update(outcomes)
    environment, command = provenance(device)
    result = {
        "environment": environment,
        "command": command,
        "tests": options.tests.name,
        "sha256": hashlib.sha256(options.tests.read_bytes()).hexdigest(),
        "seconds": round(time.monotonic() - start, 1),
        "total": dict(total),
        "explained": explained or {},
        **found,
    }
    print(json.dumps(result["total"]), "served:", json.dumps(found["served"]))
    unexplained = 0
    for failure in found["failed"]:
        why = next((text for name, text in (explained or {}).items() if name in failure["case"]), "")
        unexplained += not why
        print(f"FAILED {failure['case']}: {failure['reason']}" + (f" (explained: {why})" if why else ""))
    if options.json and collected:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if collected and not unexplained else 1
