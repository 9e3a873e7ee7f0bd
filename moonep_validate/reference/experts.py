"""The experts of a BF16 engine: one loop over groups, rounding to BF16 after every matrix product."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from moonep_validate.reference.used import USED


def swiglu(g: Tensor, u: Tensor) -> Tensor:
    """``silu(g) * u`` of float32 tensors of one shape."""
    return silu(g) * u


def grouped_experts(
    rows: Tensor,
    row_weights: Tensor,
    cu_seqlens: Tensor,
    weights: Sequence[Tensor],
    activation: Callable[[Tensor, Tensor], Tensor] = swiglu,
) -> Tensor:
    """Apply each group's expert to its rows, times the route weight.

    Args:
        rows: ``[NvS, H]`` bf16.
        row_weights: ``[NvS]`` float32.
        cu_seqlens: ``[G]``, inclusive padded end of each group.
        weights: gate and up ``[G, I, H]``, down ``[G, H, I]``, bf16.
        activation: of gate and up, in float32.

    Returns:
        ``[NvS, H]`` bf16; rows after the last group are NaN, since a caller may not read them.
    """
    USED["experts"] += 1
    out = torch.full_like(rows, float("nan"))
    begin = 0
    for group, end in enumerate(cu_seqlens.tolist()):
        if end > begin:
            y = gated_mlp(rows[begin:end].float(), [weight[group] for weight in weights], activation)
            out[begin:end] = (y * row_weights[begin:end, None]).bfloat16()
        begin = end
    return out


def gated_mlp(x: Tensor, weights: Sequence[Tensor], activation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Gate, up, activation and down, each rounded to BF16: float32 ``[n, H]`` of BF16 values.

    Args:
        x: ``[n, H]`` float32.
        weights: gate and up ``[I, H]``, down ``[H, I]``, bf16.
        activation: of gate and up, in float32.
    """
    # A BF16 engine stores what is between two products, and so rounds there; products themselves sum in float32.
    gate, up, down = (weight.float() for weight in weights)
    inner = activation(_round(x @ gate.T), _round(x @ up.T))
    return _round(_round(inner) @ down.T)


def _round(x: Tensor) -> Tensor:
    return x.bfloat16().float()
