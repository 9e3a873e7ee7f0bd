"""What goes wrong with packed weights, and on which data does it show? Seeded faults of bytes.

A fault takes the parameters of a layer and returns faulty ones. Each shows on weights that say who they are
(``identity.source``). Each also names data and a comparison in common use that miss it, since that is how its bugs
lived: equal scales, equal experts, a norm, a cosine, an absolute tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moonep_validate.formats import layouts, mxfp4
from moonep_validate.formats.loaded import Loaded
from moonep_validate.hashing import below, hashed

#: Faulty parameters of clean ones and a seed; the clean ones stay as they are.
Apply = Callable[[Loaded, int], Loaded]
_Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ByteFault:
    """A fault of packed weights.

    Attributes:
        id: how it is called.
        invariant: what it breaks, an id of docs/formats.md.
        bugs: what it stands for: kinds and bugs of docs/bugs.md, separated by spaces.
        summary: one line.
        missed_on: data that hides it: ``own`` (ours: then it is the comparison that is blind), ``equal scales``,
            ``equal experts``, ``small values``.
        missed_by: the comparison that misses it there.
        apply: see ``Apply``.
    """

    id: str
    invariant: str
    bugs: str
    summary: str
    missed_on: str
    missed_by: str
    apply: Apply


#: All faults of bytes, by id.
BYTE_FAULTS: dict[str, ByteFault] = {}


def _fault(id: str, invariant: str, bugs: str, summary: str, missed: tuple[str, str]) -> Callable[[Apply], Apply]:
    """Register a fault."""

    def register(apply: Apply) -> Apply:
        BYTE_FAULTS[id] = ByteFault(id, invariant, bugs, summary, *missed, apply)
        return apply

    return register


@_fault("nibbles-swapped", "Y2", "K18 B66", "the odd element is read from the low nibble", ("own", "statistics"))
def _nibbles(x: Loaded, seed: int) -> Loaded:
    return _codes(x, layouts.swap_nibbles)


@_fault("ggml-nibbles", "Y2", "K18 B66", "GGML's halves of a block are read as pairs", ("own", "statistics"))
def _ggml(x: Loaded, seed: int) -> Loaded:
    return _codes(x, layouts.to_ggml)


@_fault("gate-up-swapped", "Y4", "K17 B62", "w13 is loaded as [w3; w1]", ("own", "statistics"))
def _swapped(x: Loaded, seed: int) -> Loaded:
    return _ordered(x, "w31")


@_fault("gate-up-interleaved", "Y4", "K17 B61 B62", "gate and up rows alternate", ("own", "statistics"))
def _interleaved(x: Loaded, seed: int) -> Loaded:
    return _ordered(x, "interleaved")


@_fault(
    "scale-rows-shuffled", "Y5", "K16 B56", "scale rows move, their weight rows do not", ("equal scales", "values")
)
def _shuffled(x: Loaded, seed: int) -> Loaded:
    return _scales(x, lambda scale: scale.roll(1 + _pick(seed, scale.shape[1] - 1), 1))


@_fault(
    "scales-not-moved", "Y5", "K21 B73 B74", "experts are moved, their scales stay", ("equal experts", "values")
)
def _not_moved(x: Loaded, seed: int) -> Loaded:
    return _codes(x, lambda codes: codes.roll(1 + _pick(seed, len(codes) - 1), 0))


@_fault(
    "scales-never-tiled", "Y5", "K16 B56 B57 B59", "row-major scales are read as tiles", ("equal scales", "values")
)
def _never_tiled(x: Loaded, seed: int) -> Loaded:
    return _tiles(x, lambda grown: layouts.from_blocked(grown.reshape(-1), *grown.shape))


@_fault("scales-tiled-twice", "Y5", "K16 B57 B59 B80", "tiles are made of tiles", ("equal scales", "values"))
def _tiled_twice(x: Loaded, seed: int) -> Loaded:
    return _tiles(x, lambda grown: layouts.to_blocked(grown).view(grown.shape))


@_fault(
    "scales-transposed", "Y3", "K16 K19 B68 B80", "scale bytes are those of [K/32, N]", ("equal scales", "values")
)
def _transposed(x: Loaded, seed: int) -> Loaded:
    return _scales(x, lambda scale: scale.mT.contiguous().view(scale.shape))


@_fault("blocks-along-rows", "Y3", "K16 B58", "32 rows share a scale, not 32 columns", ("equal scales", "values"))
def _along_rows(x: Loaded, seed: int) -> Loaded:
    return _scales(x, lambda scale: scale[:, torch.arange(scale.shape[1]) // mxfp4.BLOCK])


@_fault(
    "scale-word-order", "Y5", "K16 B60", "the bytes of an int32 of scales are reversed", ("equal scales", "values")
)
def _words(x: Loaded, seed: int) -> Loaded:
    def change(scale: Tensor) -> Tensor:
        words = layouts.pack_ue8m0(scale).contiguous().view(torch.uint8).unflatten(-1, (-1, layouts.WORD))
        bytes: Tensor = words.flip(-1).flatten(-2)[..., : scale.shape[-1]]
        return bytes.contiguous()

    return _scales(x, change)


@_fault("scale-bias", "Y1", "K18 B63 B65", "the exponent bias is not 127", ("own", "cosine"))
def _bias(x: Loaded, seed: int) -> Loaded:
    step = (1, -1, -2)[seed % 3]  # 126; 128; an offset of -2 that was applied twice
    return _scales(x, lambda scale: (scale.int() + step).clamp(0, 254).to(torch.uint8))


@_fault("padding-not-zero", "Y6", "K08 K20 B27 B70 B72", "padding holds garbage codes", ("own", "values inside"))
def _padding(x: Loaded, seed: int) -> Loaded:
    """The last 32 rows of down, under a harmless scale, as memory that was never written."""
    codes, scale = x.w2.clone(), x.w2_scale.clone()
    place = torch.arange(codes[:, -mxfp4.BLOCK :].numel())
    codes[:, -mxfp4.BLOCK :] = (
        (hashed("padding", seed, place) & 0xFF).to(torch.uint8).view(len(codes), mxfp4.BLOCK, -1)
    )
    scale[:, -mxfp4.BLOCK :] = mxfp4.BIAS
    return x._replace(w2=codes, w2_scale=scale)


@_fault("cut-inside-block", "Y8", "K20 B70 B71", "a shard begins inside a block", ("own", "scales"))
def _cut(x: Loaded, seed: int) -> Loaded:
    """Codes from an element inside a block on, scales from its start."""
    return x._replace(w2=x.w2.roll(-1 - _pick(seed, mxfp4.BLOCK // 2 - 1), 2))


@_fault("scale-nan", "Y7", "K18 B27 B28", "a scale byte is 0xFF", ("own", "codes"))
def _nan(x: Loaded, seed: int) -> Loaded:
    return _one_scale(x, seed, mxfp4.NAN_SCALE)


@_fault("scale-zero", "Y13", "K18 B65 B97", "a scale byte is 0: its block vanishes", ("small values", "tolerance"))
def _zero(x: Loaded, seed: int) -> Loaded:
    return _one_scale(x, seed, 0)


@_fault("expert-not-loaded", "Y13", "K19 B67 B69", "an expert has the value of fresh memory", ("own", "shapes"))
def _not_loaded(x: Loaded, seed: int) -> Loaded:
    codes, scale = x.w13.clone(), x.w13_scale.clone()
    expert = _pick(seed, len(codes))
    codes[expert], scale[expert] = 0x22, mxfp4.BIAS
    return x._replace(w13=codes, w13_scale=scale)


def _codes(x: Loaded, change: _Change) -> Loaded:
    return x._replace(w13=change(x.w13), w2=change(x.w2))


def _scales(x: Loaded, change: _Change) -> Loaded:
    return x._replace(w13_scale=change(x.w13_scale), w2_scale=change(x.w2_scale))


def _ordered(x: Loaded, order: layouts.Order) -> Loaded:
    codes, scale = (layouts.fuse(*layouts.split(tensor), order) for tensor in x.fused)
    return x._replace(w13=codes, w13_scale=scale)


def _tiles(x: Loaded, change: _Change) -> Loaded:
    """A change of scales that were grown to whole 128x4 tiles, expert by expert."""

    def one(scale: Tensor) -> Tensor:
        rows, columns = (-(-size // tile) * tile for size, tile in zip(scale.shape, layouts.TILE, strict=True))
        grown = torch.nn.functional.pad(scale, (0, columns - scale.shape[1], 0, rows - scale.shape[0]))
        return change(grown)[: scale.shape[0], : scale.shape[1]]

    return _scales(x, lambda scale: torch.stack([one(expert) for expert in scale]))


def _one_scale(x: Loaded, seed: int, byte: int) -> Loaded:
    """One byte of down, not in the last 32 rows, which may be padding."""
    scale = x.w2_scale.clone()
    inside = scale[:, : -mxfp4.BLOCK]
    place = np.unravel_index(_pick(seed, inside.numel()), inside.shape)
    inside[tuple(map(int, place))] = byte
    return x._replace(w2_scale=scale)


def _pick(seed: int, limit: int) -> int:
    return int(below(hashed("place", seed, 0), limit))
