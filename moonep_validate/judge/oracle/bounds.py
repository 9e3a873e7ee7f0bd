"""How far may a correct result be from float64? Bounds from dtype and accumulation order, nothing else.

One rounding to BF16 (8 significant bits) of a value v errs by at most half a unit in the last place, spread
evenly: its variance is ulp(v)**2 / 12. A float32 accumulation of n products adds at most about
sqrt(n) * 2**-24 * ||products||_2. Variances are propagated through the layer by its own derivatives
(oracle/dense.py), and an element may be 6 standard deviations off: for a normal error that is one element in
500 million. Seen on correct code: the median of |error| / sigma is 0.69, with FP8 inputs and weights 0.68 (0.67
for a normal error), so the bound is neither loose nor tight.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: An element may be so many standard deviations off: for a normal error, one element in 500 million.
SIGMAS = 6.0
#: Elements of a row that share an FP8 scale, in DeepGEMM and in block-quantised checkpoints.
_BLOCK = 128
#: Significant bits, the hidden one among them.
BF16_BITS = 8
#: Of float32 and of E4M3, the hidden one among them.
FLOAT32_BITS = 24
E4M3_BITS = 4
#: Exponent bits of a dtype, and the integers to see them in.
_EXPONENT = {torch.float32: (0x7F800000, torch.int32), torch.float64: (0x7FF << 52, torch.int64)}


def rounding_variance(value: Tensor, bits: int = BF16_BITS) -> Tensor:
    """Variance of one rounding of ``value`` to ``bits`` significant bits, shape kept.

    Zero stays exact, as does what is not finite: it is compared as it is.

    Args:
        value: float32 or float64.
        bits: of the format that it is rounded to.
    """
    mask, kind = _EXPONENT[value.dtype]
    power = (value.view(kind) & mask).view(value.dtype)  # the power of two at or below it: ulp * 2**(bits - 1)
    # ulp = power * 2**(1 - bits), and an error spread evenly over one ulp has the variance ulp**2 / 12.
    return torch.where(value.isfinite(), power, 0.0) ** 2 * (2.0 ** (2 - 2 * bits) / 12)


def block_variance(value: Tensor, rows: int) -> Tensor:
    """Variance of rounding to E4M3 under one scale per ``rows`` x 128 elements of a matrix, shape kept.

    The scale is at most the block's largest magnitude / 224 (a power of two that keeps it within E4M3's 448), so
    the smallest step, that of subnormals, is at most that times 2**-9. Zero stays exact.

    Args:
        value: ``[n, K]``; blocks at the edges are smaller.
        rows: 1 or 128.
    """
    pad = (0, -value.shape[1] % _BLOCK, 0, -value.shape[0] % rows)
    blocks = torch.nn.functional.pad(value.abs(), pad).unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, rows))
    floor = blocks.amax(dim=(1, 3), keepdim=True) * (2.0**-9 / 224)
    floor = floor.expand(blocks.shape).flatten(2, 3).flatten(0, 1)[: value.shape[0], : value.shape[1]]
    variance = torch.maximum(rounding_variance(value, E4M3_BITS), floor**2 / 12)
    return torch.where(value == 0, 0.0, variance)


def accumulation_variance(sum_of_squares: Tensor, terms: int) -> Tensor:
    """Variance allowed to a float32 sum of ``terms`` products whose squares sum to ``sum_of_squares``."""
    # The square of sqrt(n) * 2**-24 * ||products||: one error for each addition, of a partial sum of that size.
    return terms * 2.0 ** (-2 * FLOAT32_BITS) * sum_of_squares


def within(expected: Tensor, actual: Tensor, variance: Tensor) -> Tensor:
    """Whether each element is inside its bound: bool, shape kept.

    Args:
        expected: float64 ``[..., columns]``.
        actual: the subject's values as float64, same shape; NaN is inside only where NaN is expected.
        variance: error variance per element, same shape.
    """
    # A NaN against a number, and inf - inf, become infinitely far: only a NaN that is due may pass.
    error = (actual - expected).nan_to_num(nan=torch.inf).abs()
    return (error <= SIGMAS * variance.sqrt()) | (expected.isnan() & actual.isnan())


def combine_bound(terms: Tensor, rank_of: Tensor) -> Tensor:
    """Largest legal error of a combine, whatever its order: one BF16 rounding per rank's sum, one at the end.

    Half a unit in the last place of v is at most 2**-8 * |v|; a float32 sum of K terms in any order errs by at
    most K * 2**-24 of the sum of magnitudes.

    Args:
        terms: float64 ``[R, S, K, H]``, the rows of each token.
        rank_of: ``[R, S, K]``.

    Returns:
        float64 ``[R, S, H]``.
    """
    unit = 2.0**-BF16_BITS
    top_k = terms.shape[2]
    same = (rank_of[..., :, None] == rank_of[..., None, :]).double()
    # Each rank's sum is counted once, at the first of the token's rows there.
    first = ~(same.tril(-1) > 0).any(dim=-1)
    partial = torch.einsum("rskj,rsjh->rskh", same, terms.nan_to_num()).abs() * first[..., None]
    magnitude = terms.abs().nan_to_num().sum(dim=2)
    accumulated = top_k * 2.0**-FLOAT32_BITS * magnitude
    rounded = unit * (partial.sum(dim=2) + accumulated)
    return rounded + accumulated + unit * (terms.nan_to_num().sum(dim=2).abs() + rounded + accumulated)
