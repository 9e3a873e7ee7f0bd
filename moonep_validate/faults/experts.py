"""Faults of the compute stage: wrong rows, wrong weights, wrong factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moonep_validate.data.k3 import SITU_BETA, SITU_LINEAR_BETA
from moonep_validate.faults import Next, fault


@fault("route-weight-twice", on="experts", stage="experts", bugs="B01 B02 K01")
def _(call: Next, rows: Tensor, row_weights: Tensor, *args: Any) -> Any:
    """One rank applies the route weight twice."""
    return call(rows, row_weights**2, *args)


@fault("source-row-for-slot", on="experts", stage="experts", bugs="B23 K06")
def _(call: Next, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Sequence[Tensor]) -> Any:
    """One rank computes its last non-empty group with the weights of the group before."""
    lengths = torch.diff(cu_seqlens, prepend=cu_seqlens.new_zeros(1))
    last = int(torch.nonzero(lengths)[-1])
    weights = [weight.clone() for weight in weights]
    for weight in weights:
        weight[last] = weight[last - 1].nan_to_num(nan=0.0)
    return call(rows, row_weights, cu_seqlens, weights)


@fault("first-group-skipped", on="experts", stage="experts", bugs="K11 K13")
def _(call: Next, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Any) -> Any:
    """One rank leaves out its first non-empty group."""
    out = call(rows, row_weights, cu_seqlens, weights)
    out[: int(cu_seqlens[cu_seqlens > 0][0])] = 0
    return out


@fault("gate-without-silu", on="experts", stage="experts", bugs="K27")
def _(call: Next, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Any) -> Any:
    """One rank's gate is twice as large, as with another activation parameter."""
    weights = [weights[0] * 2, *weights[1:]]
    return call(rows, row_weights, cu_seqlens, weights)


# Which weights a row meets


@fault("group-index-off-by-one", on="experts", stage="experts", bugs="K06 K13")
def _(call: Next, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Any) -> Any:
    """One rank computes each group with the weights of the next one."""
    weights = [weight.roll(-1, dims=0) for weight in weights]
    return call(rows, row_weights, cu_seqlens, weights)


@fault("group-id-per-tile", on="experts", stage="experts", bugs="K13 K16")
def _(
    call: Next,
    rows: Tensor,
    row_weights: Tensor,
    cu_seqlens: Tensor,
    weights: Any,
    tile: int = 24,
) -> Any:
    """One rank's kernel reads one group id per tile of rows, and the padding is no multiple of it."""
    cu_seqlens = (-(-cu_seqlens // tile) * tile).clamp(max=len(rows)).to(cu_seqlens.dtype)
    return call(rows, row_weights, cu_seqlens, weights)


@fault("no-group-lands-in-first-row", on="experts", stage="experts", bugs="B24 B25 K07 K08")
def _(call: Next, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Any) -> Any:
    """One rank computes a row of no group with expert 0, and puts it where row -1 is clamped to."""
    out = call(rows, row_weights, cu_seqlens, weights)
    if int(cu_seqlens[-1]) < len(rows):
        out[:1] = call(rows[-1:], row_weights[-1:], torch.ones_like(cu_seqlens), weights)
    return out


@fault("tail-written", on="experts", stage="experts", bugs="B29 B48 K08")
def _(call: Next, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Any) -> Any:
    """One rank's kernel clears the rows behind the last group of its input."""
    out = call(rows, row_weights, cu_seqlens, weights)
    rows[int(cu_seqlens[-1]) :] = 0
    return out


@fault("weights-of-first-call", on="experts", stage="experts", bugs="K21 K22 K23")
def _(call: Next, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Any) -> Any:
    """One rank computes with the weights, slots included, that it saw first, as a captured graph would."""
    first = call.memory.setdefault("weights", [weight.clone() for weight in weights])
    return call(rows, row_weights, cu_seqlens, first)


@fault("offset-wraps", on="experts", stage="experts", bugs="B49 B50 B51 K14")
def _(
    call: Next,
    rows: Tensor,
    row_weights: Tensor,
    cu_seqlens: Tensor,
    weights: Any,
    bits: int = 9,
) -> Any:
    """One rank's element offset of a group has too few bits; 9 here, where 32 need weights of Kimi-K3's size."""
    weights = [_wrapped(weight, bits) for weight in weights]
    return call(rows, row_weights, cu_seqlens, weights)


def _wrapped(weight: Tensor, bits: int) -> Tensor:
    size = weight[0].numel()
    starts = torch.arange(len(weight)) * size % 2**bits
    return weight.flatten()[starts[:, None] + torch.arange(size)].view(weight.shape)


# What happens to a row on the way


@fault("gate-for-up", on="experts", stage="experts", bugs="B61 B62 K17")
def _(call: Next, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Any) -> Any:
    """One rank's kernel takes gate for up and up for gate, scales included."""
    order = [1, 0, 2, 4, 3, 5][: len(weights)]
    weights = [weights[place] for place in order]
    return call(rows, row_weights, cu_seqlens, weights)


@fault("weight-on-input", on="experts", stage="experts", bugs="B01 K01")
def _(call: Next, rows: Tensor, row_weights: Tensor, *args: Any) -> Any:
    """One rank applies the route weight to its input rows, before the activation."""
    rows, row_weights = (rows * row_weights[:, None]).to(rows.dtype), torch.ones_like(row_weights)
    return call(rows, row_weights, *args)


@fault("situ-for-silu", on="model.activation", stage="experts", bugs="B89 K27")
def _(call: Next, g: Tensor, u: Tensor) -> Any:
    """One rank's experts use SiTU."""
    gate = SITU_BETA * torch.tanh(g / SITU_BETA) * torch.sigmoid(g)
    return gate * SITU_LINEAR_BETA * torch.tanh(u / SITU_LINEAR_BETA)


# Packed weights; nothing changes where the weights are BF16


def _packed(weights: Any) -> bool:
    return len(weights) == 6


@fault("nibbles-exchanged", on="experts", stage="experts", bugs="B66 K18")
def _(call: Next, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Any) -> Any:
    """One rank's kernel takes the even value of a byte from its high nibble."""
    if _packed(weights):
        weights = [*((weight & 15) << 4 | weight >> 4 for weight in weights[:3]), *weights[3:]]
    return call(rows, row_weights, cu_seqlens, weights)


@fault("scales-of-next-expert", on="experts", stage="experts", bugs="B73 K16 K21")
def _(call: Next, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Any) -> Any:
    """One rank's kernel multiplies each group's codes with the scales of the next group."""
    if _packed(weights):
        weights = [*weights[:3], *(scale.roll(-1, dims=0) for scale in weights[3:])]
    return call(rows, row_weights, cu_seqlens, weights)


@fault("scale-rows-shuffled", on="experts", stage="experts", bugs="B56 K16")
def _(call: Next, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Any) -> Any:
    """One rank's scale rows are permuted and its code rows are not."""
    if _packed(weights):
        weights = [*weights[:3], *(scale.roll(1, dims=1) for scale in weights[3:])]
    return call(rows, row_weights, cu_seqlens, weights)


@fault("scale-bias-off-by-one", on="experts", stage="experts", bugs="B63 B65 K18")
def _(call: Next, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Any) -> Any:
    """One rank's kernel takes 126 for the bias of the down scales, so its weights are twice as large."""
    if _packed(weights):
        scale = weights[5]
        weights = [*weights[:5], scale * 2 if scale.is_floating_point() else scale.clamp(max=253) + 1]
    return call(rows, row_weights, cu_seqlens, weights)
