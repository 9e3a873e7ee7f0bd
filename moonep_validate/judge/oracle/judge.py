"""How far is each expert row from the oracle? Streaming, on the device of the tensors, in bounded memory.

For layers too large to keep a float64 copy of: rows are judged group by group, at most ``dense.CHUNK`` at a time,
and only counts and the worst element stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonep_validate.judge.oracle.arithmetic import Arithmetic
from moonep_validate.judge.oracle.bounds import SIGMAS
from moonep_validate.judge.oracle.dense import fused, gated_mlp, pieces, weighted

#: Of this many layers one may be a false alarm, if errors are normal; 6 deviations are too few for 10**8 elements.
LAYERS_PER_FALSE_ALARM = 1000


def sigmas(elements: int) -> float:
    """Standard deviations that an element of so many may be off."""
    tail = torch.tensor(1 / (2 * LAYERS_PER_FALSE_ALARM * max(elements, 1)), dtype=torch.float64)
    return max(SIGMAS, -float(torch.special.ndtri(tail)))


@dataclass(frozen=True)
class Judged:
    """What became of all elements.

    Attributes:
        elements: how many were compared.
        wrong: how many are outside their bound, or not equal on exact data.
        worst: largest error in standard deviations (of exact data: largest error); NaN counts as infinite.
        row, group, column: of the worst element.
    """

    elements: int
    wrong: int
    worst: float
    row: int
    group: int
    column: int

    def __str__(self) -> str:
        place = f"row {self.row} of group {self.group}, column {self.column}"
        return f"{self.wrong} of {self.elements} elements are wrong; worst is {self.worst:.3g} sigma at {place}"


def _compare(
    y: Tensor, variance: Tensor, out: Tensor, route_weights: Tensor, limit: float, rounds: tuple[str, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """For each row: how many elements are outside, how far off the worst is, and its column; see ``weighted``."""
    want, variance = weighted(y, variance, route_weights, rounds)
    error = (out.to(want.dtype) - want).to(variance.dtype).nan_to_num(nan=torch.inf).abs()
    off = torch.where(error == 0, 0.0, error * variance.rsqrt())
    largest, column = off.max(dim=1)
    return (off > limit).sum(dim=1), largest, column


def _compare_exact(want: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same where nothing rounds: any difference is wrong."""
    error = (out.to(want.dtype) - want).nan_to_num(nan=torch.inf).abs()
    largest, column = error.max(dim=1)
    return (error > 0).sum(dim=1), largest, column


def judge_rows(
    given: Tensor,
    out: Tensor,
    group: Tensor,
    weights: Sequence[Tensor],
    route_weights: Tensor,
    arithmetic: Arithmetic,
) -> Judged:
    """Judge rows that belong to different groups.

    Args:
        given: ``[n, H]`` bf16.
        out: ``[n, H]``, what a part made of them.
        group: ``[n]``, group of each row, -1 for rows that do not count.
        weights: gate and up ``[groups, I, H]``, down ``[groups, H, I]``.
        route_weights: ``[n]``.
        arithmetic: see ``dense.gated_mlp``.
    """
    counted = torch.nonzero(group >= 0)[:, 0]
    limit = 0.0 if arithmetic.exact else sigmas(len(counted) * given.shape[1])
    compare = fused(_compare, given.device)
    found = []  # read only at the end, so that nothing waits for the device
    for index, part in pieces(group[counted]):
        rows = counted[part]
        mine = [weight[index] for weight in weights]
        y, variance = gated_mlp(given[rows], mine, arithmetic)
        factor = route_weights[rows]
        if arithmetic.exact:
            found.append((rows, *_compare_exact(factor.to(y.dtype)[:, None] * y, out[rows])))
        else:
            found.append((rows, *compare(y, variance, out[rows], factor, limit, arithmetic.rounds)))
    if not found:
        return Judged(0, 0, 0.0, -1, -1, -1)
    rows, wrong, worst, column = (torch.cat(parts) for parts in zip(*found, strict=True))
    top = worst.argmax()
    row = int(rows[top])
    elements = len(counted) * given.shape[1]
    return Judged(elements, int(wrong.sum()), float(worst[top]), row, int(group[row]), int(column[top]))
