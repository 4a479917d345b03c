"""What became worse between two reports: slower, less exact, or larger, beyond noise."""

from __future__ import annotations

from collections.abc import Iterator

from tilewise.bench.report import Report, Row

SLOWER = 1.05  # medians nearer than that are the same on a shared machine, whatever the spread
LARGER = 1.05  # memory repeats, but for what a library happens to round up
LESS_EXACT = 1.25  # errors repeat on the same data; another number of threads sums in another order


def compare(old: Report, new: Report) -> list[str]:
    """Say what became worse, one line each; first what makes the reports hard to compare."""
    lines = [f"differs: {text}" for text in _differences(old, new)]
    before = {row.key: row for row in old.rows}
    worse = [text for row in new.rows if row.key in before for text in _worse(before[row.key], row)]
    here = {row.key for row in new.rows}
    gone = [f"gone: {which} {name} N={n}" for which, name, n in before if (which, name, n) not in here]
    common = len(here & set(before))
    return [*lines, *worse, *gone] + ([] if worse else [f"nothing became worse in {common} common rows"])


def _differences(old: Report, new: Report) -> Iterator[str]:
    for name in ("batch", "heads_q", "heads_kv", "dim", "dtype", "causal", "window", "alibi", "seed"):
        if old.settings.get(name) != new.settings.get(name):
            yield f"{name}: {old.settings.get(name)} then, {new.settings.get(name)} now"
    for name in ("device", "threads", "torch", "numpy", "triton", "driver", "variables"):
        if old.environment.get(name) != new.environment.get(name):
            yield f"{name}: {old.environment.get(name)} then, {new.environment.get(name)} now"


def _worse(old: Row, new: Row) -> Iterator[str]:
    where = f"{new.which} {new.name} N={new.length}"
    if old.status == "ok" and new.status != "ok":
        yield f"lost: {where}: {new.status}: {new.note}"
    if old.median is not None and new.median is not None and old.p80 is not None and new.p20 is not None:
        factor = new.median / old.median
        if factor > SLOWER and new.p20 > old.p80:  # beyond a margin, and most of the times lie apart
            yield f"slower: {where}: {old.median * 1e3:.3g} ms then, {new.median * 1e3:.3g} ms now ({factor:.2f} times)"
    before = {error.tensor: error for error in old.errors}
    for error in new.errors:
        then = before.get(error.tensor)
        if then is None:
            continue
        for kind, was, now in (("largest", then.max, error.max), ("mean", then.mean, error.mean)):
            if now > LESS_EXACT * was:
                yield f"less exact: {where}: {kind} error of {error.tensor} {was:.2e} then, {now:.2e} now"
    if old.memory is not None and new.memory is not None and new.memory > LARGER * old.memory:
        yield f"larger: {where}: {old.memory / 2**20:.1f} MiB then, {new.memory / 2**20:.1f} MiB now"
