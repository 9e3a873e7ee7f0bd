"""How are FP8 weights stored? A byte of E4M3 each, with a float32 scale per 128 x 128 block (formats/fp8.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonep_validate.formats import FormatError
from moonep_validate.formats.weight_format import Piece, WeightFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BLOCK = 128
_SIGN, _NAN = 0x80, 0x7F


def _encode(values: Tensor) -> tuple[Tensor, ...]:
    import torch

    from moonep_validate.formats import fp8

    codes, scale = fp8.quantise_weight(values)
    return codes.view(torch.uint8), scale


def _decode(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    from moonep_validate.formats import fp8

    assert scale is not None, "FP8 codes mean nothing without their scales"
    return fp8.dequantise_weight(codes, scale, dtype)


def _negate(codes: Tensor) -> None:
    codes.bitwise_xor_(_SIGN)


def _refuse(name: str, scale: Tensor) -> None:
    bad = ~(scale.isfinite() & (scale > 0))
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        raise FormatError(
            f"{name}{place} is scale {float(scale[tuple(place)])}, expected a finite number above zero; "
            f"{int(bad.sum())} of {bad.numel()} scales are none: the checkpoint is damaged"
        )


FORMAT = WeightFormat(
    name="fp8",
    summary="uint8 expert weights, E4M3 codes, with a float32 scale per 128 x 128 values",
    codes=Piece("uint8", nan=_NAN),
    scale=Piece("float32", rows=_BLOCK, columns=_BLOCK),
    block=_BLOCK,
    encode=_encode,
    decode=_decode,
    negate=_negate,
    refuse=_refuse,
)
