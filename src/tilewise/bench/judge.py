"""How far a result is from the right one, beside what it may be: the error budget of `tilewise.testing`, on a sample.

At large lengths the oracle cannot compute everything, so it computes some rows of every head: the first, some in the
middle and the last, against all of their keys. The gradient that starts the backward pass is zero in all other rows.
Then dk and dv, whole, depend on the sampled rows alone, and the oracle need look at nothing else.
"""

from __future__ import annotations

import torch

from tilewise.backends.naive import Terms, naive, naive_backward
from tilewise.bench.cases import Case, Inputs
from tilewise.bench.implementations import Outcome
from tilewise.testing import Error, Results, delta_error, errors, worse

ORACLE_BYTES = 96  # that one score costs at the peak of the oracle's backward pass, float64 temporaries and all


def sampled_rows(length: int, count: int) -> list[tuple[int, int]]:
    """Choose (start, stop) of the rows to look at: all where count allows, else three runs of them.

    >>> sampled_rows(100, 100), sampled_rows(1000, 30)
    ([(0, 100)], [(0, 10), (495, 505), (990, 1000)])
    """
    if count >= length:
        return [(0, length)]
    run = max(count // 3, 1)
    middle = max((length - run) // 2, run)
    return [(0, run), (middle, middle + run), (length - run, length)] if length >= 3 * run else [(0, run)]


class Judge:
    """The oracle's results on a case's data, to measure others against.

    Args:
        case, inputs: the data under test.
        gradients: judge dq, dk and dv too.
        scores: how many scores of all heads the oracle may compute.
    """

    def __init__(self, case: Case, inputs: Inputs, *, gradients: bool, scores: int) -> None:
        self.case = case
        self.rows = sampled_rows(case.length, scores // (case.batch * case.heads_q * case.length))
        # Apple's GPUs have no float64: there the CPU judges.
        self._home = torch.device("cpu") if case.device.startswith("mps") else inputs.q.device
        self.d_out = None
        if gradients:
            self.d_out = torch.zeros_like(inputs.d_out)
            for start, stop in self.rows:
                self.d_out[:, :, start:stop] = inputs.d_out[:, :, start:stop]
        self._ref = self._formula(inputs, torch.float64)
        self._low = self._formula(inputs, inputs.q.dtype)
        if self.d_out is not None:
            d_lse = delta_error(self._low, self._ref, self._sample(self.d_out.to(self._home)))
            self._low = worse(self._low, self._ref, self._formula(inputs, torch.float64, d_lse))
        self._spread = self._sums(inputs)

    @property
    def share(self) -> float:
        """The share of all rows that is looked at."""
        return sum(stop - start for start, stop in self.rows) / max(self.case.length, 1)

    def measure(self, outcome: Outcome) -> dict[str, Error]:
        """Measure every tensor of a result; "lse" only where it has one.

        Raises:
            ArithmeticError: the data are too large for the dtype: the yardstick is not finite.
        """
        lse = self._ref.lse.float() if outcome.lse is None else self._sample(outcome.lse.to(self._home))
        dq, dk, dv = (None if x is None else x.to(self._home) for x in (outcome.dq, outcome.dk, outcome.dv))
        got = Results(self._sample(outcome.out.to(self._home)), lse, None if dq is None else self._sample(dq), dk, dv)
        found = dict(errors(got, self._ref, self._low, self.case.length, self._spread))
        return found if outcome.lse is not None else {name: error for name, error in found.items() if name != "lse"}

    def _sample(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :, start:stop] for start, stop in self.rows], dim=2)

    def _terms(self, start: int, slopes: torch.Tensor | None) -> Terms[torch.Tensor]:
        """Say what rows from ``start`` on see."""
        case = self.case
        return Terms(left=case.left, right=case.right, offset=start, kv_stop=case.kv_stop, alibi_slopes=slopes)

    def _sums(self, inputs: Inputs) -> torch.Tensor:
        """Do for the sampled rows what `tilewise.testing.spread` does for a call."""
        q, k = (x.to(self._home, torch.promote_types(x.dtype, torch.float32)).abs() for x in inputs[:2])
        parts = [naive(torch, q[:, :, start:stop], k, k, self._terms(start, None))[1] for start, stop in self.rows]
        return torch.cat(parts, dim=2)

    def _formula(self, inputs: Inputs, dtype: torch.dtype, d_lse: torch.Tensor | None = None) -> Results:
        """Run the untiled formula on the sampled rows; lse in float32 at least, as the budget has it.

        What arrives for the gradients is d_out, or d_lse of the sampled rows alone.
        """
        q, k, v = (x.to(self._home, dtype) for x in inputs[:3])
        slopes = None if inputs.alibi_slopes is None else inputs.alibi_slopes.to(self._home, dtype)
        exact = torch.promote_types(dtype, torch.float32)
        parts: list[list[torch.Tensor]] = []
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for start, stop in self.rows:
            terms = self._terms(start, slopes)
            rows = q[:, :, start:stop]
            out, lse = naive(torch, rows, k, v, terms)
            if exact != dtype:
                wide = self._terms(start, None if slopes is None else slopes.to(exact))
                lse = naive(torch, rows.to(exact), k.to(exact), v.to(exact), wide)[1]
            parts.append([out, lse])
            if self.d_out is not None:
                d_out = self.d_out[:, :, start:stop].to(self._home, dtype)
                if d_lse is None:
                    grads = naive_backward(torch, rows, k, v, d_out, terms=terms)
                else:
                    at = sum(part[0].shape[2] for part in parts[:-1])
                    own = d_lse[:, :, at : at + stop - start]
                    grads = naive_backward(torch, rows, k, v, torch.zeros_like(d_out), own, terms)
                parts[-1].append(grads.dq)
                dk += grads.dk
                dv += grads.dv
        out, lse, *dq = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
        return Results(out, lse, dq[0], dk, dv) if dq else Results(out, lse)
