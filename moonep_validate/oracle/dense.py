"""What is the mixture of experts, densely, in float64? With the error that correct BF16 code may have.

``y = w * down @ (silu(gate @ x) * (up @ x))``, summed over a token's K experts. The variances follow the
rounding points of a BF16 implementation: gate, up, activation, down and weighted row, then one partial sum per
destination rank with several rows, then the token's sum (docs/contract.md, C1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moonep_validate.oracle.bounds import accumulation_variance, rounding_variance


def expert_rows(x: Tensor, weights: Sequence[Tensor], route_weights: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    """One expert on some rows.

    Args:
        x: ``[n, H]``.
        weights: gate and up ``[I, H]``, down ``[H, I]``.
        route_weights: ``[n]``.
        exact: the data leaves nothing to round, so the variance is zero and is not computed.

    Returns:
        Output and error variance, both float64 ``[n, H]``.
    """
    # Exact data are integers below 2**24 in every sum, so float32 gives the float64 result, in half the time.
    kind = torch.float32 if exact else torch.float64
    x, gate, up, down = (tensor.to(kind) for tensor in (x, *weights))
    scale = route_weights.to(kind)[:, None]
    g, u = x @ gate.T, x @ up.T
    sigmoid = torch.sigmoid(g)
    silu = g * sigmoid
    activation = silu * u
    y = activation @ down.T
    if exact:
        y = (scale * y).double()
        return y, torch.zeros_like(y)
    slope = sigmoid * (1 + g * (1 - sigmoid))
    variance_g = rounding_variance(g) + accumulation_variance(x**2 @ (gate**2).T, x.shape[1])
    variance_u = rounding_variance(u) + accumulation_variance(x**2 @ (up**2).T, x.shape[1])
    variance = (slope * u) ** 2 * variance_g + silu**2 * variance_u + rounding_variance(activation)
    variance = variance @ (down**2).T + accumulation_variance(activation**2 @ (down**2).T, down.shape[1])
    variance = (variance + rounding_variance(y)) * scale**2 + rounding_variance(scale * y)
    return scale * y, variance


def grouped_rows(
    x: Tensor, group: Tensor, weights: Sequence[Tensor], route_weights: Tensor, exact: bool
) -> tuple[Tensor, Tensor]:
    """Rows that belong to different groups.

    Args:
        x: ``[n, H]``.
        group: ``[n]``, index of each row's group.
        weights: gate and up ``[groups, I, H]``, down ``[groups, H, I]``.
        route_weights: ``[n]``.
        exact: see ``expert_rows``.

    Returns:
        Output and error variance, both float64 ``[n, H]``.
    """
    out, variance = torch.empty(x.shape, dtype=torch.float64), torch.zeros(x.shape, dtype=torch.float64)
    order = group.argsort(stable=True)
    counts = group.bincount().tolist()
    begin = 0
    for index, count in enumerate(counts):
        if count:
            rows = order[begin : begin + count]
            result = expert_rows(x[rows], [weight[index] for weight in weights], route_weights[rows], exact)
            out[rows], begin = result[0], begin + count
            if not exact:
                variance[rows] = result[1]
    return out, variance


def dense_layer(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: Sequence[Tensor],
    rank_of: Tensor | None,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    """All tokens of all ranks.

    Args:
        hidden: ``[R, S, H]``.
        topk_ids: ``[R, S, K]``.
        topk_weights: ``[R, S, K]``.
        weights: gate and up ``[E, I, H]``, down ``[E, H, I]``.
        rank_of: ``[R, S, K]``, where each route is computed; None counts each route as a rank of its own.
        exact: see ``expert_rows``.

    Returns:
        Output and error variance, both float64 ``[R, S, H]``.
    """
    top_k, width = topk_ids.shape[-1], hidden.shape[-1]
    x = hidden.flatten(0, 1).repeat_interleave(top_k, dim=0)
    rows, variance = grouped_rows(x, topk_ids.flatten(), weights, topk_weights.flatten(), exact)
    rows, variance = rows.view(-1, top_k, width), variance.view(-1, top_k, width)
    total = rows.sum(dim=1)
    if exact:
        return total.view(hidden.shape), torch.zeros_like(hidden, dtype=torch.float64)
    # Routes of a token to one expert round the same intermediates: their errors add up, not their variances.
    ids, sigma = topk_ids.reshape(-1, top_k), variance.sqrt()
    same = (ids[:, :, None] == ids[:, None, :]).double()
    summed = torch.einsum("tkj,tkh,tjh->th", same, sigma, sigma)
    summed += rounding_variance(total) + _partial_sum_variance(rows, rank_of)
    return total.view(hidden.shape), summed.view(hidden.shape)


def _partial_sum_variance(rows: Tensor, rank_of: Tensor | None) -> Tensor:
    """One rounding of each sum of two or more rows of a token on one rank: ``[tokens, H]``.

    Args:
        rows: ``[tokens, K, H]``.
        rank_of: ``[R, S, K]`` or None.
    """
    tokens, top_k, _ = rows.shape
    place = torch.arange(top_k).expand(tokens, -1) if rank_of is None else rank_of.reshape(-1, top_k)
    variance = torch.zeros_like(rows[:, 0])
    for k in range(top_k):
        together = place == place[:, k : k + 1]
        several = ~together[:, :k].any(dim=1) & (together.sum(dim=1) > 1)
        partial = (rows * together[..., None]).sum(dim=1)
        variance += rounding_variance(partial) * several[:, None]
    return variance
