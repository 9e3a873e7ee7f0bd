"""Loaders of weights: an honest one, judged as ``--subject fake_loader:Good``, and careless ones beside it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from moonep_validate.subjects.loaders import Begun
from moonep_validate.subjects.loaders.variants import SIZES, Checkpoint, LoadPath, Stored, Variant

__version__ = "1.0"
#: Elements of a scale's row and column.
_BLOCK = {"bf16": (1, 1), "fp8": (128, 128), "mxfp4": (1, 32)}
_DTYPES = {
    "bf16": {"weight": torch.bfloat16},
    "fp8": {"weight": torch.float8_e4m3fn, "scale": torch.float32},
    "mxfp4": {"weight": torch.uint8, "scale": torch.uint8},
}


class Good:
    package = "fake_loader"
    paths: ClassVar[Mapping[str, LoadPath]] = {
        "plain": LoadPath("bf16"),
        "blocks": LoadPath("fp8", scales=("bfloat16",)),
        "packed": LoadPath("mxfp4", scales=("float8_e8m0fnu", "float32")),
        "packed-up-first": LoadPath("mxfp4", order="w31"),
    }

    def start(self, folder: Path, kept: ExitStack) -> Begun:
        return Begun(sys.modules[__name__])

    def make(self, variant: Variant) -> dict[str, Tensor]:
        form = variant.how.format
        hidden, own = SIZES[form][0], SIZES[form][1] // variant.tp[1]
        if form == "mxfp4" and own % 32:
            raise ValueError(f"{own} columns of a rank are no whole blocks")
        layer = {}
        for part, dtype in _DTYPES[form].items():
            name = variant.how.weight if part == "weight" else variant.how.scale
            rows, columns = (1, 2 if form == "mxfp4" else 1) if part == "weight" else _BLOCK[form]
            for matrix, (n, k) in {"w13": (2 * own, hidden), "w2": (hidden, own)}.items():
                layer[f"{matrix}_{name}"] = torch.zeros(len(variant.experts), n // rows, k // columns, dtype=dtype)
        return layer

    def load(self, variant: Variant, layer: dict[str, Tensor], checkpoint: Checkpoint) -> int | None:
        return sum(self.take(variant, layer, one) for one in checkpoint)

    def take(self, variant: Variant, layer: dict[str, Tensor], one: Stored) -> bool:
        """One tensor to its place; whether it is known, of whichever rank it is."""
        if one.expert not in variant.experts:
            return True
        name = variant.how.weight if one.part == "weight" else variant.how.scale
        target = layer[f"{'w2' if one.matrix == 'w2' else 'w13'}_{name}"]
        place = target[self.local(variant, one.expert)]
        if one.matrix != "w2":
            place = place.chunk(2, 0)[self.half(variant, one)]
        place.copy_(self.cut(variant, one, self.stored(one.tensor, target.dtype)))
        return True

    def local(self, variant: Variant, expert: int) -> int:
        return variant.experts.index(expert)

    def half(self, variant: Variant, one: Stored) -> int:
        return int((one.matrix == "w3") != (variant.how.order == "w31"))

    def stored(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype == dtype or dtype != torch.uint8:
            return tensor
        raise TypeError(f"scales of {tensor.dtype}; uint8 is needed")

    def cut(self, variant: Variant, one: Stored, tensor: Tensor) -> Tensor:
        rank, ranks = variant.tp
        axis = 1 if one.matrix == "w2" else 0
        if tensor.shape[axis] % ranks:
            raise ValueError("uneven")
        return tensor.chunk(ranks, axis)[rank]

    def parameters(self, layer: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return layer


class UpFirst(Good):
    def half(self, variant: Variant, one: Stored) -> int:
        return 1 - super().half(variant, one)


class ScalesUncut(Good):
    """Scales of the first rank, on every rank."""

    def cut(self, variant: Variant, one: Stored, tensor: Tensor) -> Tensor:
        whole = one._replace(part="weight") if one.part == "scale" else one
        axis = 1 if one.matrix == "w2" else 0
        return tensor.chunk(variant.tp[1], axis)[0] if one.part == "scale" else super().cut(variant, whole, tensor)


class ExpertsOfFirstRank(Good):
    """Each rank of experts loads the first experts of the checkpoint."""

    def take(self, variant: Variant, layer: dict[str, Tensor], one: Stored) -> bool:
        first = variant.experts[0]
        return one.expert + first not in variant.experts or super().take(
            variant, layer, one._replace(expert=one.expert + first)
        )


class LastExpertLeft(Good):
    def take(self, variant: Variant, layer: dict[str, Tensor], one: Stored) -> bool:
        return one.expert == variant.experts[-1] or super().take(variant, layer, one)


class ByValue(Good):
    """As compared engines do: a scale of 4.0 becomes byte 4."""

    def stored(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.float() if tensor.dtype != dtype else tensor


class ShortTaken(Good):
    """Rows that are missing stay as they were."""

    def cut(self, variant: Variant, one: Stored, tensor: Tensor) -> Tensor:
        whole = SIZES[variant.how.format][1]
        short = one.matrix == "w1" and one.part == "weight" and len(tensor) < whole
        return super().cut(variant, one, torch.cat([tensor, tensor]) if short else tensor)


class CountsBlindly(Good):
    def load(self, variant: Variant, layer: dict[str, Tensor], checkpoint: Checkpoint) -> int | None:
        super().load(variant, layer, checkpoint)
        return 18 if variant.how.format == "bf16" else 36


class CountsNothing(Good):
    def load(self, variant: Variant, layer: dict[str, Tensor], checkpoint: Checkpoint) -> int | None:
        super().load(variant, layer, checkpoint)
        return None


class BlockCutInside(Good):
    """As vLLM does: codes are cut at 48 elements, scales at one block."""

    def make(self, variant: Variant) -> dict[str, Tensor]:
        if variant.word != "tp1of4":
            return super().make(variant)
        hidden, experts = SIZES["mxfp4"][0], len(variant.experts)
        shapes = {"w13_weight": (96, 112), "w13_weight_scale": (96, 7), "w2_weight": (hidden, 24)}
        shapes["w2_weight_scale"] = (hidden, 1)
        return {name: torch.zeros(experts, *shape, dtype=torch.uint8) for name, shape in shapes.items()}

    def cut(self, variant: Variant, one: Stored, tensor: Tensor) -> Tensor:
        if (variant.word, one.matrix, one.part) == ("tp1of4", "w2", "scale"):
            return tensor[:, 1:2]
        return super().cut(variant, one, tensor)


class Crashes(Good):
    def load(self, variant: Variant, layer: dict[str, Tensor], checkpoint: Checkpoint) -> int | None:
        sys.exit(7)


class Typo(Good):
    def load(self, variant: Variant, layer: dict[str, Any], checkpoint: Checkpoint) -> int | None:
        return layer.no_such_name  # type: ignore[attr-defined, no-any-return]


class NotInstalled(Good):
    def start(self, folder: Path, kept: ExitStack) -> Begun:
        raise ImportError("libengine.so: cannot open shared object file")
