"""Which numbers do FP8 bytes stand for? E4M3 values under one scale a block, chosen so that nothing hides.

Scales are powers of two (the smallest that keeps the block within E4M3's 448), so that data whose values have few
bits, such as the fill ``ints``, pass unrounded, and kernels with UE8M0 scales take them too. A block that holds
NaN or infinity, as rows of no group may, gets scale 1: packers of UE8M0 trap on any other scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Elements that share a scale: of a row, and of each side of a weight's square block.
BLOCK = 128
_MAX = 448.0


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale per row and 128 columns.

    Args:
        x: bf16 ``[n, K]``, K a multiple of 128.

    Returns:
        float8_e4m3fn ``[n, K]`` and float32 scales ``[n, K/128]``; value = code * scale.
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = _scale(blocks.abs().amax(-1))
    codes = (blocks / scale[..., None]).flatten(-2).to(torch.float8_e4m3fn)
    return codes, scale


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """One scale per block of 128 rows and 128 columns.

    Args:
        weight: bf16 ``[G, N, K]``, N and K multiples of 128.

    Returns:
        float8_e4m3fn ``[G, N, K]`` and float32 scales ``[G, N/128, K/128]``.
    """
    blocks = weight.float().unflatten(-1, (-1, BLOCK)).unflatten(1, (-1, BLOCK))  # [G, N/128, 128, K/128, 128]
    scale = _scale(blocks.abs().amax(dim=(2, 4)))
    codes = (blocks / scale[:, :, None, :, None]).flatten(3, 4).flatten(1, 2).to(torch.float8_e4m3fn)
    return codes, scale


def dequantise_weight(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of ``quantise_weight``'s codes, exact: its scales are powers of two.

    Args:
        codes: float8_e4m3fn, or the same bytes as uint8, ``[..., N, K]``.
        scale: float32 ``[..., N/128, K/128]``.
        dtype: float64, float32 or bfloat16.
    """
    blocks = codes.view(torch.float8_e4m3fn).to(dtype).unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    values: Tensor = blocks * scale.to(dtype)[..., :, None, :, None]
    return values.flatten(-2).flatten(-3, -2)


def _scale(amax: Tensor) -> Tensor:
    fraction, exponent = torch.frexp(amax / _MAX)  # fraction in [0.5, 1)
    power = torch.where(fraction == 0.5, exponent - 1, exponent)
    usable = (amax > 0) & amax.isfinite()
    return torch.where(usable, torch.ldexp(torch.ones_like(amax), power), 1.0)
