"""What does combine return, to the last bit? (docs/contract.md, C1)

On the holder, a token's rows are summed in float32 in ascending k and the sum is rounded to BF16 once if there
are two or more; then the token's rank sums these partial sums in float32, in the order of their first k, and
rounds once more. No atomics, no reordering: the result is deterministic but depends on co-location.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonep_validate.cases.layout import Ints


def combined(rows: Tensor, rank_of: Ints, row_of: Ints, *, rounding: bool = True, reverse: bool = False) -> Tensor:
    """Sum each token's rows.

    Args:
        rows: ``[R, NvS, H]`` bf16, expert outputs before combine.
        rank_of, row_of: ``[R, S, K]``, where each route's row is.
        rounding, reverse: switch one rule off, to see whether the data shows it (sensitivity witnesses).

    Returns:
        bf16 ``[R, S, H]``.
    """
    ranks, tokens, top_k = rank_of.shape
    place = torch.from_numpy(rank_of.reshape(-1, top_k))
    values = rows[place, torch.from_numpy(row_of.reshape(-1, top_k))].float()
    if reverse:
        place, values = place.flip(1), values.flip(1)
    total = torch.zeros(len(place), rows.shape[2])
    for k in range(top_k):
        is_first, partial = _partial_sum(place, values, k, rounding)
        total = torch.where(is_first, total + partial, total)
    return total.bfloat16().view(ranks, tokens, -1)


def prologue(rows: Tensor, rank_of: Ints, row_of: Ints) -> Tensor:
    """The rows as the in-place prologue leaves them: each primary row holds its rank's sum.

    Args:
        rows: ``[R, NvS, H]`` bf16.
        rank_of, row_of: ``[R, S, K]``.
    """
    top_k = rank_of.shape[2]
    place, row = (torch.from_numpy(x.reshape(-1, top_k)) for x in (rank_of, row_of))
    values = rows[place, row].float()
    out = rows.clone()
    for k in range(top_k):
        is_first, partial = _partial_sum(place, values, k, rounding=True)
        first = is_first[:, 0]
        out[place[first, k], row[first, k]] = partial[first].bfloat16()
    return out


def _partial_sum(place: Tensor, values: Tensor, k: int, rounding: bool) -> tuple[Tensor, Tensor]:
    """(whether k is the first of its token on its rank ``[T, 1]``, the sum of that rank's rows from k on)."""
    same = place == place[:, k : k + 1]
    partial = torch.zeros_like(values[:, 0])
    for later in range(k, values.shape[1]):
        partial = torch.where(same[:, later, None], partial + values[:, later], partial)
    if rounding:
        partial = torch.where(same[:, k:].sum(1, keepdim=True) > 1, partial.bfloat16().float(), partial)
    return ~same[:, :k].any(dim=1, keepdim=True), partial
