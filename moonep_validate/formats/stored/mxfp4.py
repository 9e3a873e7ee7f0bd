"""How are MXFP4 weights stored? Two E2M1 codes a byte, with an E8M0 byte per 32 columns (docs/formats.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonep_validate.formats.weight_format import Piece, WeightFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BLOCK, _NAN = 32, 0xFF
#: The sign bits of both codes of a byte.
_SIGNS = 0x88


def _encode(values: Tensor) -> tuple[Tensor, ...]:
    from moonep_validate.formats import mxfp4

    return mxfp4.encode(values)


def _decode(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    from moonep_validate.formats import mxfp4

    assert scale is not None, "MXFP4 codes mean nothing without their scales"
    return mxfp4.decode(codes, scale, dtype)


def _negate(codes: Tensor) -> None:
    codes.bitwise_xor_(_SIGNS)


def _refuse(name: str, scale: Tensor) -> None:
    from moonep_validate.formats import mxfp4

    mxfp4.refuse_nan_scales(name, scale)


def _exchanged(codes: Tensor) -> Tensor:
    return codes << 4 | codes >> 4


FORMAT = WeightFormat(
    name="mxfp4",
    summary="uint8 expert weights, two E2M1 codes a byte, with an E8M0 byte per 32 values",
    codes=Piece("uint8", columns=2),
    scale=Piece("uint8", columns=_BLOCK, nan=_NAN),
    block=_BLOCK,
    encode=_encode,
    decode=_decode,
    negate=_negate,
    refuse=_refuse,
    misreadings={"with the nibbles of each byte exchanged": _exchanged},
)
