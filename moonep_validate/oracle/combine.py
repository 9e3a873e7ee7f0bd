"""What does combine return, to the last bit? (docs/contract.md, C1)

On the holder, a token's rows are summed in float32 in ascending k and the sum is rounded to BF16 once if there
are two or more; then the token's rank sums these partial sums in float32, in the order of their first k, and
rounds once more. No atomics, no reordering: the result is deterministic but depends on co-location.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonep_validate.contract import Ints


def combined(rows: Tensor, rank_of: Ints, row_of: Ints) -> Tensor:
    """Sum each token's rows.

    Args:
        rows: ``[R, NvS, H]`` bf16, expert outputs before combine.
        rank_of, row_of: ``[R, S, K]``, where each route's row is.

    Returns:
        bf16 ``[R, S, H]``.
    """
    ranks, tokens, top_k = rank_of.shape
    place = torch.from_numpy(rank_of.reshape(-1, top_k))
    values = rows[place, torch.from_numpy(row_of.reshape(-1, top_k))].float()
    total = torch.zeros(len(place), rows.shape[2])
    for k in range(top_k):
        same = place == place[:, k : k + 1]
        partial = torch.zeros_like(total)
        for later in range(k, top_k):
            partial = torch.where(same[:, later, None], partial + values[:, later], partial)
        partial = torch.where(same.sum(1, keepdim=True) > 1, partial.bfloat16().float(), partial)
        is_first = ~same[:, :k].any(dim=1, keepdim=True)
        total = torch.where(is_first, total + partial, total)
    return total.bfloat16().view(ranks, tokens, -1)
