"""How a benchmark keeps within its seconds: what is admitted, what is dropped, and how many rounds there are."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

LEAST_ROUNDS, MOST_ROUNDS = 3, 9
ENOUGH_SECONDS = 40.0  # beyond the fewest rounds, for all rows of one length: more makes no median better
CAUTION = 0.8  # runs may become slower than the first one was
_RUNS_A_ROUND = 2  # one that finds the block size and warms up, one that counts


class Budget:
    """A number of seconds, spent by the clock, over groups of rows of known relative weight.

    Args:
        seconds: what may be spent in all.
        weights: how long each group takes relative to the others, in the order in which they come.
        clock: what tells the time.
    """

    def __init__(
        self, seconds: float, weights: Sequence[float], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds = seconds
        self.kept = 0.0  # for what follows the last group
        self._clock = clock
        self._start = clock()
        self._weights = list(weights)

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    @property
    def left(self) -> float:
        """Seconds that may still be spent."""
        return max(self.seconds - self.kept - self.spent, 0.0)

    def share(self, group: int) -> float:
        """Give the seconds that this group may take if all later ones get theirs by weight.

        >>> clock = iter([0.0, 0.0, 60.0]).__next__
        >>> budget = Budget(100, [1, 1, 2], clock)
        >>> budget.share(0), round(budget.share(1), 2)
        (25.0, 13.33)
        """
        later = sum(self._weights[group:])
        return self.left * self._weights[group] / later if later else self.left

    def limit(self, group: int) -> float:
        """Give the seconds that this group may take at the most: twice its share, or a quarter of what is left.

        So what is slow at one length does not take the time of what is quick at the next, and a first length has the
        time that compiling and warming up take.
        """
        return min(self.left, max(2 * self.share(group), self.left / 4))


def admit(estimates: Mapping[str, float], left: float) -> dict[str, float]:
    """Choose which rows to begin, quickest first, so that each can be checked and timed in the time left.

    Gives the dropped ones, with the seconds that each would need together with those that are begun.

    >>> admit({"fast": 0.5, "slow": 10.0}, left=20.0)
    {'slow': 73.5}
    """
    dropped: dict[str, float] = {}
    taken = 0.0
    for name, seconds in sorted(estimates.items(), key=lambda item: item[1]):
        need = taken + seconds * (1 + _RUNS_A_ROUND * LEAST_ROUNDS)
        if need <= left:
            taken = need
        else:
            dropped[name] = need
    return dropped


def rounds(
    seconds: Mapping[str, float], least: float, share: float, left: float
) -> tuple[dict[str, int], dict[str, float]]:
    """Choose how many interleaved rounds each row takes part in, and what must be dropped for them, slowest first.

    All take part in the fewest rounds; what is spare then is divided equally, so that quick rows have more.

    Args:
        seconds: what one run of each takes.
        least: seconds that a round gives to a run that is shorter.
        share: seconds meant for this; more are used where the fewest rounds need them.
        left: seconds that there are.

    Gives the number of rounds of each, and the dropped, with the seconds that each would need beside the quicker ones.

    >>> rounds({"fast": 0.5, "slow": 2.0}, least=0.1, share=35.0, left=100.0)
    ({'fast': 9, 'slow': 4}, {})
    >>> rounds({"fast": 0.5, "slow": 2.0}, least=0.1, share=0.0, left=5.0)
    ({'fast': 3}, {'slow': 15.0})
    """
    kept = {name: round_seconds(each, least) for name, each in seconds.items()}
    dropped: dict[str, float] = {}
    while kept and LEAST_ROUNDS * sum(kept.values()) > left:
        slowest = max(kept, key=lambda name: kept[name])
        dropped[slowest] = LEAST_ROUNDS * sum(kept.values())
        del kept[slowest]
    spare = CAUTION * min(share, left) - LEAST_ROUNDS * sum(kept.values())
    each_spare = min(max(spare, 0.0), ENOUGH_SECONDS) / max(len(kept), 1)
    counts = {name: LEAST_ROUNDS + math.floor(each_spare / each) for name, each in kept.items()}
    return {name: min(count, MOST_ROUNDS) for name, count in counts.items()}, dropped


def round_seconds(run: float, least: float) -> float:
    """Estimate what one round of a run takes."""
    return run + max(run, least)
