"""Run a sample of another project's tests in this process, and write what passed, failed and was skipped, and why.

The tests stay where they are: only their path is given. Files of this kind multiply their parameters into hundreds of
thousands of cases, so each test function is sampled, by a fixed seed, before its cases are collected, and the run ends
at a deadline; what it did not reach is counted as not run.
"""
# ruff: noqa: INP001, T201 - a script's part, and a script prints

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
        items[:] = [case for turn in itertools.zip_longest(*picked) for case in turn if case is not None]

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


def run(
    options: argparse.Namespace,
    group: Callable[[pytest.Item], str | None],
    device: str,
    explained: dict[str, str] | None = None,
    **record: object,
) -> int:
    """Run the sample.

    Args:
        options: of `parser`.
        group: names the function that a case belongs to, None for cases that are not wanted.
        device: that the record describes. record: what else it says.
        explained: functions whose failure is expected, and why.

    Returns:
        0 where nothing failed but what is explained.
    """
    recorder = Recorder(options, group)
    words = [str(options.tests), "-q", "-p", "no:cacheprovider", "--tb=short", "-W", "ignore", "--no-header"]
    words += ["--collect-only"] if options.collect else []
    words += ["-k", options.only] if options.only else []
    # The settings of this project are not for the tests of others.
    words += ["-c", "/dev/null", "--rootdir", str(options.tests.parent)]
    start = time.monotonic()
    code = pytest.main(words, plugins=[recorder])
    total: collections.Counter[str] = collections.Counter()
    for outcomes in recorder.outcomes.values():
        total.update(outcomes)
    environment, command = provenance(device)
    result = {
        "environment": environment,
        "command": command,
        "tests": options.tests.name,
        "sha256": hashlib.sha256(options.tests.read_bytes()).hexdigest(),
        **record,
        "seconds": round(time.monotonic() - start, 1),
        "cases": dict(recorder.found),
        "total": dict(total),
        "explained": explained or {},
        "outcomes": {name: dict(outcomes) for name, outcomes in sorted(recorder.outcomes.items())},
        **recorder.reasons,
    }
    print(json.dumps(result["total"]))
    unexplained = 0
    for failure in recorder.reasons["failed"]:
        why = next((text for name, text in (explained or {}).items() if name in failure["case"]), "")
        unexplained += not why
        print(f"FAILED {failure['case']}: {failure['reason']}" + (f" (explained: {why})" if why else ""))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    collected = code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if not collected:
        print(f"pytest ended with {code!r}", file=sys.stderr)
    return 0 if collected and not unexplained else 1
