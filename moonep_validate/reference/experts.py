"""The experts of a BF16 engine: one loop over groups, rounding to BF16 after every matrix product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu


def grouped_experts(rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Apply each group's expert to its rows, times the route weight.

    Args:
        rows: ``[NvS, H]`` bf16.
        row_weights: ``[NvS]`` float32.
        cu_seqlens: ``[G]``, inclusive padded end of each group.
        weights: gate and up ``[G, I, H]``, down ``[G, H, I]``, bf16.

    Returns:
        ``[NvS, H]`` bf16; rows after the last group are NaN, since a caller may not read them.
    """
    out = torch.full_like(rows, float("nan"))
    begin = 0
    for group, end in enumerate(cu_seqlens.tolist()):
        if end > begin:
            gate, up, down = (weight[group].float() for weight in weights)
            x = rows[begin:end].float()
            activation = silu(_round(x @ gate.T)) * _round(x @ up.T)
            y = _round(_round(activation) @ down.T)
            out[begin:end] = (y * row_weights[begin:end, None]).bfloat16()
        begin = end
    return out


def _round(x: Tensor) -> Tensor:
    return x.bfloat16().float()
