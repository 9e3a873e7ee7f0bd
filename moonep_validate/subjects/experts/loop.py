"""The experts without any kernel: one loop over groups, as a BF16 engine rounds, and in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moonep_validate import __version__
from moonep_validate.reference.experts import grouped_experts
from moonep_validate.subjects.experts.implementation import Activation, Experts
from moonep_validate.trace.trace import Part


def reference(device: str) -> Experts:
    """Float32 products of BF16 values, rounded to BF16 after each matrix; any device."""
    part = Part("reference", "moonep_validate.reference.experts", __version__, policy="upstream")
    return Experts(grouped_experts, part, device)


def float64(device: str) -> Experts:
    """Float64 throughout, rounded to BF16 once, at the end; any device."""
    return Experts(_in_float64, Part("reference", "moonep_validate.subjects.experts.loop", __version__), device)


def _in_float64(
    rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Sequence[Tensor], activation: Activation
) -> Tensor:
    """See ``Compute``; rows after the last group are NaN, since a caller may not read them."""
    out, begin = torch.full_like(rows, float("nan")), 0
    for group, end in enumerate(cu_seqlens.tolist()):
        gate, up, down = (weight[group].double() for weight in weights)
        x = rows[begin:end].double()
        y = activation(x @ gate.T, x @ up.T) @ down.T
        out[begin:end] = (y * row_weights[begin:end, None]).to(rows.dtype)
        begin = end
    return out
