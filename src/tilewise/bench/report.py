"""What a benchmark found, as plain data: kept in JSON, shown by ``show.py``, compared by ``compare.py``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

FORMAT = 1

Status = Literal["ok", "memory", "time", "wrong", "failed"]


@dataclass(frozen=True)
class TensorError:
    """How far one tensor is from float64, beside the budget."""

    tensor: str
    max: float
    max_budget: float
    mean: float
    mean_budget: float

    @property
    def within(self) -> bool:
        """True where both hold."""
        return self.max <= self.max_budget and self.mean <= self.mean_budget

    @property
    def used(self) -> float:
        """The share of the budget that is used, the larger of both."""
        pairs = ((self.max, self.max_budget), (self.mean, self.mean_budget))
        return max(0.0 if not error else (error / budget if budget else float("inf")) for error, budget in pairs)


def telling(errors: Sequence[TensorError]) -> TensorError | None:
    """Give the tensor that uses most of its budget: of the gradients, else out, unless lse is the one over its budget.

    lse is measured in another unit than the rest and not by every implementation, so that rows that show it cannot be
    set side by side.
    """
    over = [error for error in errors if not error.within]
    shown = over or [error for error in errors if error.tensor.startswith("d")]
    shown = shown or [error for error in errors if error.tensor != "lse"]
    return max(shown, key=lambda error: error.used, default=None)


@dataclass(frozen=True)
class Row:
    """One implementation at one length in one direction.

    Args:
        name: the implementation.
        which: "forward" or "backward".
        length: queries, and keys.
        status: "ok"; "memory", "time": not run, since there was not enough; "wrong": over the error budget and
            therefore not timed; "failed": it raised.
        note: what an unusual status is about.
        times: seconds of each run or block of runs.
        median, p20, p80: of the times, in seconds.
        tflops: 10^12 operations a second at the median.
        ratio: speed relative to SDPA's best in the same run; above 1 is faster.
        memory: bytes at the peak beyond the inputs; a backward row's holds the forward pass too.
        dense: bytes of it that are dense masks and biases, made before the call.
        errors: of each tensor.
        predicted: the least seconds, by the counting model, said before the run.
        predicted_memory: bytes, by the same model.
    """

    name: str
    which: str
    length: int
    status: Status
    note: str = ""
    times: tuple[float, ...] = ()
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    tflops: float | None = None
    ratio: float | None = None
    memory: int | None = None
    dense: int | None = None
    errors: tuple[TensorError, ...] = ()
    predicted: float | None = None
    predicted_memory: int | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        """What names the row in a report."""
        return self.which, self.name, self.length

    @property
    def worst(self) -> TensorError | None:
        """The tensor that tells most: see `telling`."""
        return telling(self.errors)


@dataclass(frozen=True)
class Agreement:
    """One implementation on the real input."""

    name: str
    agrees: bool
    errors: tuple[TensorError, ...] = ()
    note: str = ""

    @property
    def worst(self) -> TensorError | None:
        """The tensor that tells most: see `telling`."""
        return telling(self.errors)


@dataclass(frozen=True)
class Report:
    """Everything one command found, and where.

    Args:
        command: what was typed.
        date: when it began, UTC, ISO 8601.
        environment: the machine and its software.
        settings: the problem and the limits.
        roof: what the predictions stand on, "bandwidth" and "matmul", measured before the rows, and both again after.
        chosen: the backend that tilewise takes by itself, by direction.
        absent: why an implementation has no rows, by its name; "name (backward)" where only that direction is missing.
        notes: what else a reader must know.
        seconds: what it all took.
    """

    command: str
    date: str
    environment: Mapping[str, object]
    settings: Mapping[str, object]
    roof: Mapping[str, float]
    chosen: Mapping[str, str]
    absent: Mapping[str, str]
    rows: tuple[Row, ...]
    real_input: tuple[Agreement, ...] = ()
    real_input_note: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """True where tilewise kept its budget everywhere and all agree on the real input."""
        ours = (row for row in self.rows if row.name.startswith("tilewise/"))
        return all(row.status not in {"wrong", "failed"} for row in ours) and all(x.agrees for x in self.real_input)

    def best_sdpa(self, which: str, length: int) -> Row | None:
        """Give the fastest of SDPA's kernels at a length."""
        timed = [
            row
            for row in self.rows
            if row.name.startswith("sdpa/") and (row.which, row.length) == (which, length) and row.median is not None
        ]
        return min(timed, key=lambda row: row.median or 0.0, default=None)

    def to_json(self) -> str:
        """Write all of it."""
        return json.dumps({"format": FORMAT, **_strict(asdict(self))}, indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Report:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            document: object = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f'not a report of this version of tilewise bench: it needs "format": {FORMAT}')
        try:
            values = {key: document[key] for key in (f.name for f in fields(Report))}
            values["rows"] = tuple(_row(row) for row in values["rows"])
            values["real_input"] = tuple(_agreement(entry) for entry in values["real_input"])
            values["notes"] = tuple(values["notes"])
            return Report(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"a damaged report of tilewise bench: {error!r}") from error

    @staticmethod
    def load(path: Path) -> Report:
        """Read a report from a file.

        Raises:
            ValueError: the file cannot be read, or is something else.
        """
        try:
            return Report.from_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"{path} is {error}") from error


def _strict(value: dict[str, object]) -> dict[str, object]:
    """Write infinities as text, since JSON has none."""

    def plain(item: object) -> object:
        if isinstance(item, float) and not math.isfinite(item):
            return str(item)
        if isinstance(item, dict):
            return {key: plain(each) for key, each in item.items()}
        return [plain(each) for each in item] if isinstance(item, (list, tuple)) else item

    return {key: plain(item) for key, item in value.items()}


def _errors(entry: Mapping[str, object]) -> dict[str, object]:
    listed = entry["errors"]
    if not isinstance(listed, list):
        raise TypeError("errors must be a list")
    read = [TensorError(**{**error, **{key: float(error[key]) for key in _NUMBERS}}) for error in listed]
    return {**entry, "errors": tuple(read)}


_NUMBERS = ("max", "max_budget", "mean", "mean_budget")


def _agreement(entry: Mapping[str, object]) -> Agreement:
    return Agreement(**_errors(entry))  # type: ignore[arg-type]  # as asdict wrote them


def _row(entry: Mapping[str, object]) -> Row:
    times = entry["times"]
    if not isinstance(times, list):
        raise TypeError("times must be a list")
    return Row(**{**_errors(entry), "times": tuple(times)})  # type: ignore[arg-type]  # as asdict wrote them
