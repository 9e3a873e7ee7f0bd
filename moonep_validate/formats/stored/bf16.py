"""How are weights stored that are not packed? As they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonep_validate.formats.weight_format import Piece, WeightFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def _encode(values: Tensor) -> tuple[Tensor, ...]:
    return (values,)


def _decode(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return codes.to(dtype)


def _negate(codes: Tensor) -> None:
    codes.neg_()


FORMAT = WeightFormat(
    name="bf16",
    summary="BF16 expert weights",
    codes=Piece("bfloat16"),
    encode=_encode,
    decode=_decode,
    negate=_negate,
)
