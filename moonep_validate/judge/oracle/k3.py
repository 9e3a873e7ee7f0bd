"""What should the parts around the routed experts give? Router, projections, norm and shared expert in float64.

Router: ``s = sigmoid(x @ gate)``; the K experts of largest ``s + bias`` are chosen; their weights are
``factor * s / sum(s)``, without the bias. Then ``up @ rms_norm(sum of the routed rows) + shared(x)``. Sources:
vLLM and SGLang, ``kimi_k3.py``; NeMo AutoModel, ``models/kimi_k3``.

The router works in float32, so its bounds are worst cases, with unit roundoff e = 2**-24: a sum of n products in
any order errs by at most n * e * sum |products|; a sigmoid has slope s * (1 - s) and errs by at most 4 * e * s by
itself. The BF16 parts have variances, see bounds.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moonep_validate.judge.oracle.activation import SITU
from moonep_validate.judge.oracle.arithmetic import Arithmetic
from moonep_validate.judge.oracle.bounds import FLOAT32_BITS, accumulation_variance, rounding_variance
from moonep_validate.judge.oracle.dense import gated_mlp

_EPSILON = 2.0**-FLOAT32_BITS


def scores(hidden: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Sigmoid scores, and how far those of a float32 router may be from them.

    Args:
        hidden: ``[..., M]``.
        gate: ``[E, M]``.

    Returns:
        Both float64 ``[..., E]``.
    """
    x, rows = hidden.double(), gate.double()
    score = torch.sigmoid(x @ rows.T)
    logit_error = x.shape[-1] * _EPSILON * (x.abs() @ rows.abs().T)
    return score, score * (1 - score) * logit_error + 4 * _EPSILON * score


def chosen(score: Tensor, error: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The experts to choose, and whether float32 must choose the same.

    The biased scores err by the scores' error and one addition. Two of them cannot change places if they are
    further apart than twice the largest such error.

    Args:
        score, error: see ``scores``.
        bias: ``[E]``.
        top_k: K.

    Returns:
        Ids in ascending order, int64 ``[..., K]``; bool ``[...]``.
    """
    biased = score + bias.double()
    best = biased.topk(min(top_k + 1, biased.shape[-1]), dim=-1)
    ids = best.indices[..., :top_k].sort(dim=-1).values
    if biased.shape[-1] == top_k:
        return ids, torch.ones(ids.shape[:-1], dtype=torch.bool)
    # Between the last that is chosen and the first that is not; among the chosen, the order does not matter here.
    margin = best.values[..., top_k - 1] - best.values[..., top_k]
    largest = (error + _EPSILON * biased.abs()).amax(dim=-1)
    return ids, margin > 2 * largest


def route_weights(score: Tensor, error: Tensor, ids: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Weights of the given ids and their largest error.

    Relative errors add up in a quotient: that of the score, the largest of any summed score, K roundings of the
    sum, and one each of the tiny constant in the sum, the division, the factor and the product.

    Args:
        score, error: see ``scores``.
        ids: int64 ``[..., K]`` in ``0..E-1``.
        factor: the scaling factor.

    Returns:
        Both float64 ``[..., K]``.
    """
    mine = score.gather(-1, ids)
    relative = error.gather(-1, ids) / mine
    weights = factor * mine / mine.sum(dim=-1, keepdim=True)
    bound = relative + relative.amax(dim=-1, keepdim=True) + (ids.shape[-1] + 4) * _EPSILON
    return weights, weights * bound


def projected(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``x @ weight.T`` rounded once: value and error variance, float64 ``[..., rows]``.

    Args:
        x: ``[..., columns]``.
        weight: ``[rows, columns]``.
    """
    x, weight = x.double(), weight.double()
    value = x @ weight.T
    return value, rounding_variance(value) + accumulation_variance(x**2 @ (weight**2).T, x.shape[-1])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``weight * x / sqrt(mean(x**2) + eps)`` in float32, rounded to BF16 once: value and variance, float64.

    The mean of n squares, all positive, errs relatively by at most (n + 2) * e and its root by half of that; the
    root, the reciprocal and two products add at most 5 * e. The sum of these is taken as a standard deviation.

    Args:
        x: ``[..., H]``.
        weight: ``[H]``.
        eps: added to the mean square.
    """
    x, weight = x.double(), weight.double()
    value = weight * x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + eps)
    relative = (x.shape[-1] / 2 + 6) * _EPSILON
    return value, rounding_variance(value) + (relative * value) ** 2


def shared_expert(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The shared expert, without route weight or factor: value and variance, float64 ``[n, M]``.

    Args:
        x: ``[n, M]``.
        weights: gate and up ``[2 * I, M]``, down ``[M, 2 * I]``.
    """
    y, variance = gated_mlp(x, weights, Arithmetic(activation=SITU))
    return y, variance + rounding_variance(y)
