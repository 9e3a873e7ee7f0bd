"""What is the mixture of experts, densely, in float64? With the error that correct BF16 code may have.

``y = w * down @ (silu(gate @ x) * (up @ x))``, summed over a token's K experts; other models have
another activation. The variances follow the rounding points of a BF16 implementation: gate, up, activation, down
and weighted row, then one partial sum per destination rank with several rows, then the token's sum
(docs/contract.md, C1).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moonep_validate.judge.oracle.arithmetic import Arithmetic
from moonep_validate.judge.oracle.bounds import accumulation_variance, block_variance, rounding_variance

#: BF16 data on the reference experts.
_USUAL = Arithmetic()
#: Rows of one group that are computed at once, so that memory is bounded whatever a group holds.
CHUNK = 8192


def gated_mlp(x: Tensor, weights: Sequence[Tensor], arithmetic: Arithmetic = _USUAL) -> tuple[Tensor, Tensor]:
    """``down @ (gate_factor(gate @ x) * up_factor(up @ x))``, before any route weight.

    The errors of g and u travel through the activation by its own derivatives.

    Args:
        x: ``[n, H]``.
        weights: gate and up ``[I, H]``, down ``[H, I]``.
        arithmetic: whether the data are exact, what is rounded, and what is between the matrix products.

    Returns:
        Output and error variance, both ``[n, H]``: float64 (float32 if exact on a CPU), and the variance
        float64, or on a GPU float32; without the rounding of the output (``weighted``).
    """
    # Exact data are integers below 2**24 in every sum, so float32 gives the float64 result, in half the time; but
    # a GPU may be set to multiply float32 in fewer bits.
    activation, rounds = arithmetic.activation, arithmetic.rounds
    kind = torch.float32 if arithmetic.exact and x.device.type == "cpu" else torch.float64
    wide, gate, up, down = (tensor.to(kind) for tensor in (x, *weights))
    g, u = wide @ gate.T, wide @ up.T
    if arithmetic.exact:
        y = (activation.gate(g)[0] * activation.up(u)[0]) @ down.T
        return y, torch.zeros_like(y)
    rough = _rough(x.device)
    x = x.to(rough)
    products = [_product_variance(x, weight, rounds) for weight in weights[:2]]
    inner, variance = fused(_between, x.device)(g, u, *products, arithmetic)
    y = inner @ down.T
    return y, _product_variance(inner.to(rough), weights[2], rounds, variance)


def fused(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A function of elementwise operations; on a GPU compiled, so that memory is read and written only once."""
    return _compiled(function) if device.type == "cuda" and importlib.util.find_spec("triton") else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    with warnings.catch_warnings():  # its first import uses what torch itself calls deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled


def _between(
    g: Tensor, u: Tensor, product_g: Tensor, product_u: Tensor, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    """What is between the products: the activation in the dtype of g, its error variance in that of the others.

    Args:
        g, u: ``[n, I]``.
        product_g, product_u: error variances of the products, before g and u are rounded.
        arithmetic: see ``gated_mlp``.
    """
    activation, rounds = arithmetic.activation, arithmetic.rounds
    inner = activation.gate(g)[0] * activation.up(u)[0]
    g, u, value = (tensor.to(product_g.dtype) for tensor in (g, u, inner))
    (gated, gate_slope), (linear, up_slope) = activation.gate(g), activation.up(u)
    variance = (gate_slope * linear) ** 2 * (rounding_variance(g) + product_g)
    variance = variance + (gated * up_slope) ** 2 * (rounding_variance(u) + product_u)
    variance = variance + rounding_variance(value)
    if "silu" in rounds:
        variance = variance + linear**2 * rounding_variance(gated)
    if "weighted_activation" in rounds:  # of the weighted one, whose relative error is of the same size
        variance = variance + rounding_variance(value)
    return inner, variance


def _rough(device: torch.device) -> torch.dtype:
    """The dtype of variances: beside float64 values on a GPU, float32 is enough for a bound, and much faster."""
    return torch.float64 if device.type == "cpu" else torch.float32


def _product_variance(x: Tensor, weight: Tensor, rounds: Sequence[str], variance: Tensor | float = 0.0) -> Tensor:
    """Error variance of ``x @ weight.T`` by its inputs, its sum, and what is rounded before it: ``[n, rows]``.

    Args:
        x: ``[n, K]``, in the dtype of variances.
        weight: ``[rows, K]``, of any dtype.
        rounds: of ``arithmetic.ROUNDS``.
        variance: ``[n, K]``, what x itself errs by.
    """
    variance = variance + accumulation_variance(x**2, x.shape[1])
    if "fp8_inputs" in rounds:
        variance += block_variance(x, 1)
    total = _product(variance, _squared(weight, x.dtype))
    if "fp8_weights" in rounds:
        total += _product(x**2, block_variance(weight.to(x.dtype), 128))
    return total


def _squared(weight: Tensor, rough: torch.dtype) -> Tensor:
    """Squares; where they go into ``_product`` in BF16 anyway, at once rounded to it."""
    if rough == torch.float32 and weight.dtype == torch.bfloat16:
        return weight * weight
    return weight.to(rough) ** 2


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right.T`` of terms that are not negative, so that each product is right to the size of its factors.

    Float32 (see ``_rough``) in BF16: that is 3 roundings of at most 2**-8, and the result is made larger by more.
    """
    if left.dtype == torch.float64:
        return left @ right.T
    return (left.bfloat16() @ right.bfloat16().T).float().mul_(1 + 2.0**-6)


def expert_rows(
    x: Tensor,
    weights: Sequence[Tensor],
    route_weights: Tensor,
    arithmetic: Arithmetic = _USUAL,
) -> tuple[Tensor, Tensor]:
    """One expert on some rows.

    Args:
        x: ``[n, H]``.
        weights: gate and up ``[I, H]``, down ``[H, I]``.
        route_weights: ``[n]``.
        arithmetic: see ``gated_mlp``.

    Returns:
        Output float64 and error variance, both ``[n, H]``; see ``gated_mlp``.
    """
    y, variance = gated_mlp(x, weights, arithmetic)
    if arithmetic.exact:
        return (route_weights.to(y.dtype)[:, None] * y).double(), variance.double()
    return weighted(y, variance, route_weights, arithmetic.rounds)


def weighted(y: Tensor, variance: Tensor, route_weights: Tensor, rounds: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Rows times their route weights, and the error variance of that.

    Args:
        y, variance: ``[n, H]``, of ``gated_mlp``.
        route_weights: ``[n]``.
        rounds: of ``arithmetic.ROUNDS``.
    """
    rough = variance.dtype
    out, factor = route_weights.to(y.dtype)[:, None] * y, route_weights.to(rough)[:, None]
    if "weighted_activation" not in rounds:
        variance = variance + rounding_variance(y.to(rough))
    variance = variance * factor**2 + rounding_variance(out.to(rough))
    if "route_weight" in rounds:
        variance = variance + y.to(rough) ** 2 * rounding_variance(factor)
    return out, variance


def grouped_rows(
    x: Tensor,
    group: Tensor,
    weights: Sequence[Tensor],
    route_weights: Tensor,
    arithmetic: Arithmetic = _USUAL,
) -> tuple[Tensor, Tensor]:
    """Rows that belong to different groups, computed where they are, at most ``CHUNK`` at a time.

    Args:
        x: ``[n, H]``.
        group: ``[n]``, index of each row's group.
        weights: gate and up ``[groups, I, H]``, down ``[groups, H, I]``.
        route_weights: ``[n]``.
        arithmetic: see ``gated_mlp``.

    Returns:
        Output and error variance, both float64 ``[n, H]``.
    """
    out = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    variance = torch.zeros_like(out)
    for index, rows in pieces(group):
        mine = [weight[index] for weight in weights]
        result = expert_rows(x[rows], mine, route_weights[rows], arithmetic)
        out[rows] = result[0]
        if not arithmetic.exact:
            variance[rows] = result[1].double()
    return out, variance


def pieces(group: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The rows of each group in order, at most ``CHUNK`` at a time: pairs of the group and int64 row numbers.

    Args:
        group: ``[n]``, index of each row's group.
    """
    order, begin = group.argsort(stable=True), 0
    found, counts = group[order].unique_consecutive(return_counts=True)
    for index, count in zip(found.tolist(), counts.tolist(), strict=True):
        for rows in order[begin : begin + count].split(CHUNK):
            yield index, rows
        begin += count


def dense_layer(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: Sequence[Tensor],
    rank_of: Tensor | None,
    arithmetic: Arithmetic = _USUAL,
) -> tuple[Tensor, Tensor]:
    """Tokens of any ranks.

    Args:
        hidden: ``[..., H]``.
        topk_ids: ``[..., K]``.
        topk_weights: ``[..., K]``.
        weights: gate and up ``[E, I, H]``, down ``[E, H, I]``.
        rank_of: ``[..., K]``, where each route is computed; None counts each route as a rank of its own.
        arithmetic: see ``gated_mlp``.

    Returns:
        Output and error variance, both float64 ``[..., H]``.
    """
    top_k, width = topk_ids.shape[-1], hidden.shape[-1]
    x = hidden.reshape(-1, width).repeat_interleave(top_k, dim=0)
    scale = topk_weights.flatten()
    rows, variance = grouped_rows(x, topk_ids.flatten(), weights, scale, arithmetic)
    rows, variance = rows.view(-1, top_k, width), variance.view(-1, top_k, width)
    total = rows.sum(dim=1)
    if arithmetic.exact:
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
        rank_of: ``[..., K]`` or None.
    """
    tokens, top_k, _ = rows.shape
    place = (
        torch.arange(top_k, device=rows.device).expand(tokens, -1)
        if rank_of is None
        else rank_of.reshape(-1, top_k)
    )
    variance = torch.zeros_like(rows[:, 0])
    for k in range(top_k):
        together = place == place[:, k : k + 1]
        several = ~together[:, :k].any(dim=1) & (together.sum(dim=1) > 1)
        partial = (rows * together[..., None]).sum(dim=1)
        variance += rounding_variance(partial) * several[:, None]
    return variance
