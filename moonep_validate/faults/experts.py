"""Faults of the compute stage: wrong rows, wrong weights, wrong factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moonep_validate.faults import Next, fault


@fault("route-weight-twice", on="experts", stage="experts", bugs="B01 B02 K01")
def _(call: Next, rows: Tensor, row_weights: Tensor, *args: Any, rank: int = 1) -> Any:
    """One rank applies the route weight twice."""
    return call(rows, row_weights**2 if call.rank == rank else row_weights, *args)


@fault("source-row-for-slot", on="experts", stage="experts", bugs="B23 K06")
def _(
    call: Next, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Sequence[Tensor], rank: int = 1
) -> Any:
    """One rank computes its last non-empty group with the weights of the group before."""
    if call.rank == rank:
        lengths = torch.diff(cu_seqlens, prepend=cu_seqlens.new_zeros(1))
        last = int(torch.nonzero(lengths)[-1])
        weights = [weight.clone() for weight in weights]
        for weight in weights:
            weight[last] = weight[last - 1].nan_to_num(nan=0.0)
    return call(rows, row_weights, cu_seqlens, weights)


@fault("first-group-skipped", on="experts", stage="experts", bugs="K11 K13")
def _(call: Next, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Any, rank: int = 1) -> Any:
    """One rank leaves out its first non-empty group."""
    out = call(rows, row_weights, cu_seqlens, weights)
    if call.rank == rank:
        out[: int(cu_seqlens[cu_seqlens > 0][0])] = 0
    return out


@fault("gate-without-silu", on="experts", stage="experts", bugs="K27")
def _(call: Next, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Any, rank: int = 1) -> Any:
    """One rank's gate is twice as large, as with another activation parameter."""
    if call.rank == rank:
        weights = [weights[0] * 2, *weights[1:]]
    return call(rows, row_weights, cu_seqlens, weights)
