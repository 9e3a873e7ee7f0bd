"""Which small checkpoints does a loader get, and which bytes are due of each?

Three formats: BF16, FP8 in blocks of 128 x 128, MXFP4. Bytes of another expert, half, block or rank always differ.
Cuts of tensor and expert parallelism, scales in other dtypes, and checkpoints that must be refused are variants of
each path by which an engine loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from moonep_validate.formats import identity, layouts, loaded, mxfp4
from moonep_validate.formats.kimi_k3 import ROLES, Geometry
from moonep_validate.formats.layouts import Order
from moonep_validate.hashing import hashed

#: MXFP4: a Kimi-K3 of 1/16 of the widths, latent 224 and intermediate 192, so that engines that pad have to.
GEOMETRY = Geometry().scaled(16, num_experts=6, top_k=2, moe_layers=1)
LAYER = 1
EXPERTS = tuple(range(GEOMETRY.num_experts))
TOP_K = GEOMETRY.top_k
#: Format -> hidden and intermediate size of an expert.
SIZES = {
    "bf16": (128, 256),
    "fp8": (128, 256),
    "mxfp4": (GEOMETRY.latent, GEOMETRY.intermediate),
}
#: Elements of a row and a column that share a scale.
_BLOCKS = {"fp8": (128, 128), "mxfp4": (1, mxfp4.BLOCK)}
#: Where a parameter's tensors lie: fused gate and up, down, and their scales.
SLOTS = ("w13", "w13_scale", "w2", "w2_scale")

#: What must become of a variant.
ARRIVE, OR_REFUSED, REFUSED, AT_BLOCKS, TOLD = "arrive", "or refused", "refused", "at blocks", "told"

#: (expert, matrix) -> ``weight``, and ``scale`` where the format has one.
Source = Callable[[int, str], dict[str, Tensor]]


class Stored(NamedTuple):
    """One tensor of a checkpoint: ``weight`` or ``scale`` of an expert's w1 (gate), w3 (up) or w2 (down)."""

    expert: int
    matrix: str
    part: str
    tensor: Tensor


#: All tensors of a checkpoint, in order.
Checkpoint = list[Stored]


@dataclass(frozen=True)
class LoadPath:
    """One way of an engine to load.

    Attributes:
        format: of ``SIZES``.
        weight, scale: how the engine ends the names of its parameters: ``w13_`` and ``w2_`` come before.
        order: how it fuses gate and up.
        scales: dtypes of scales that checkpoints of this path are shipped with, beside the plain one.
        cuts: whether the engine cuts a shard itself, and does not get it cut.
        fused: whether a tensor of the checkpoint holds all experts (see ``stacked``).
    """

    format: str
    weight: str = "weight"
    scale: str = "weight_scale"
    order: Order = "w13"
    scales: tuple[str, ...] = ()
    cuts: bool = True
    fused: bool = False

    @property
    def names(self) -> dict[str, str]:
        """Slot -> parameter."""
        names = {"w13": f"w13_{self.weight}", "w2": f"w2_{self.weight}"}
        scales = {"w13_scale": f"w13_{self.scale}", "w2_scale": f"w2_{self.scale}"}
        return names | (scales if self.format in _BLOCKS else {})


@dataclass(frozen=True)
class Variant:
    """One checkpoint on one rank.

    Attributes:
        path, how: the path by which it is loaded.
        word: what is special: ``tp0of2``, ``ep1of2``, ``scale:float32``, ``short``, ``missing``.
        wanted: what must become of it.
        check: the invariant of docs/formats.md that it shows.
        tp, ep: rank and ranks of tensor and of expert parallelism.
    """

    path: str
    how: LoadPath
    word: str
    wanted: str = ARRIVE
    check: str = "Y13"
    tp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] = (0, 1)

    @property
    def name(self) -> str:
        """As it is printed and chosen."""
        return f"{self.path}+{self.word}"

    @property
    def experts(self) -> tuple[int, ...]:
        """Global ids of the experts of this rank, placed in order."""
        rank, ranks = self.ep
        return EXPERTS[rank * len(EXPERTS) // ranks : (rank + 1) * len(EXPERTS) // ranks]

    @property
    def controlled(self) -> bool:
        """Whether seeded faults must show on it."""
        return self.wanted == ARRIVE


def variants_of(path: str, how: LoadPath) -> Iterator[Variant]:
    """All variants of a path."""
    for rank, ranks in ((0, 1), (0, 2), (1, 2), *(((2, 3),) if how.format == "mxfp4" else ())):
        yield Variant(path, how, f"tp{rank}of{ranks}", tp=(rank, ranks))
    for rank in range(2):
        yield Variant(path, how, f"ep{rank}of2", ep=(rank, 2))
    for dtype in how.scales:
        yield Variant(path, how, f"scale:{dtype}", OR_REFUSED, "Y11")
    if how.format == "mxfp4":
        yield Variant(path, how, "scale:1.5", REFUSED, "Y11")
        if how.cuts:  # 192 over 4 ranks is one and a half blocks each
            yield Variant(path, how, "tp1of4", AT_BLOCKS, "Y8", tp=(1, 4))
    if not how.fused:
        yield Variant(path, how, "short", REFUSED, "Y11")
        yield Variant(path, how, "missing", TOLD)


def source_of(format: str) -> Source:
    """The right bytes of a format."""
    return {"bf16": _bf16, "fp8": _fp8, "mxfp4": _mxfp4}[format]


@cache
def _mxfp4(expert: int, matrix: str) -> dict[str, Tensor]:
    codes, scale = identity.source(GEOMETRY)(LAYER, expert, matrix)
    return {"weight": codes, "scale": scale}


@cache
def _bf16(expert: int, matrix: str) -> dict[str, Tensor]:
    return {"weight": _numbers("bf16", expert, matrix, 1, 1).remainder(2**14).to(torch.int16).view(torch.bfloat16)}


@cache
def _fp8(expert: int, matrix: str) -> dict[str, Tensor]:
    """Codes below 0x7F, which is NaN; scales are powers of two, exact in every dtype, and differ in neighbours."""
    codes = _numbers("fp8", expert, matrix, 1, 1).remainder(0x7E).to(torch.uint8).view(torch.float8_e4m3fn)
    rows, columns = _numbers("fp8 scale", expert, matrix, *_BLOCKS["fp8"]).shape
    place = 4 * expert + list(ROLES).index(matrix) + 3 * torch.arange(rows * columns).reshape(rows, columns)
    return {"weight": codes, "scale": torch.exp2((place % 40 - 20).float())}


def _numbers(what: str, expert: int, matrix: str, rows_of: int, columns_of: int) -> Tensor:
    """A hash of each place of a matrix: int64 ``[rows, columns]``."""
    hidden, intermediate = SIZES[what.split()[0]]
    rows, columns = (hidden, intermediate) if matrix == "w2" else (intermediate, hidden)
    shape = rows // rows_of, columns // columns_of
    return hashed(what, expert, list(ROLES).index(matrix), torch.arange(shape[0] * shape[1])).reshape(shape)


# What a checkpoint of a variant holds.


def checkpoint(variant: Variant, fault: str = "") -> Checkpoint:
    """The tensors that the loader is offered; with a fault, those that a wrong loader would make of them."""
    source = source_of(variant.how.format)
    if fault:
        source = FAULTS[fault](source, variant)
    tensors = [
        Stored(expert, matrix, part, _spelled(variant, part, tensor))
        for expert in EXPERTS
        for matrix in ROLES
        for part, tensor in source(expert, matrix).items()
    ]
    return [_changed(variant, one) for one in tensors if not _left_out(variant, one)]


def _spelled(variant: Variant, part: str, tensor: Tensor) -> Tensor:
    word = variant.word.removeprefix("scale:")
    if part != "scale" or word == variant.word:
        return tensor.clone()  # what a loader does to it must not reach what is due
    if word == "1.5":
        return 1.5 * mxfp4.scale_values(tensor)
    dtype: torch.dtype = getattr(torch, word)
    if variant.how.format != "mxfp4":
        return tensor.to(dtype)
    return tensor.view(dtype) if word == "float8_e8m0fnu" else mxfp4.scale_values(tensor, dtype)


def _left_out(variant: Variant, one: Stored) -> bool:
    return variant.word == "missing" and (one.expert, one.matrix, one.part) == (1, "w3", "weight")


def _changed(variant: Variant, one: Stored) -> Stored:
    """Half of the rows of one expert's gate, where the variant asks for it."""
    short = variant.word == "short" and (one.expert, one.matrix, one.part) == (1, "w1", "weight")
    return one._replace(tensor=one.tensor[: len(one.tensor) // 2]) if short else one


def stacked(tensors: Checkpoint, order: Order, tp: tuple[int, int] = (0, 1)) -> dict[str, Tensor]:
    """A checkpoint of all experts at once, as gpt-oss ships them: slot -> ``[E, rows, columns]``, of one rank.

    Raises:
        LookupError: if a tensor is missing.
    """
    found = {(one.expert, one.matrix, one.part): one.tensor for one in tensors}
    parts = {one.part for one in tensors}

    def source(expert: int, matrix: str) -> dict[str, Tensor]:
        return {part: found[expert, matrix, part] for part in ("weight", "scale") if part in parts}

    return due(source, EXPERTS, order, tp)


# What must have arrived.


def due(source: Source, experts: tuple[int, ...], order: Order, tp: tuple[int, int] = (0, 1)) -> dict[str, Tensor]:
    """What the slots must hold on a rank: gate and up cut by rows, down by columns, then fused and stacked."""
    rank, ranks = tp
    out: dict[str, list[Tensor]] = {}
    for expert in experts:
        gate, up, down = (source(expert, matrix) for matrix in ("w1", "w3", "w2"))
        for part in gate:
            slot = "" if part == "weight" else "_scale"
            first, second = (half[part].chunk(ranks, 0)[rank] for half in (gate, up))
            out.setdefault(f"w13{slot}", []).append(layouts.fuse(first, second, order))
            out.setdefault(f"w2{slot}", []).append(down[part].chunk(ranks, 1)[rank])
    return {slot: torch.stack(parts) for slot, parts in out.items()}


def differences(variant: Variant, got: Mapping[str, Tensor]) -> list[str]:
    """Say what is wrong with loaded parameters; empty if every byte is as due.

    Args:
        variant: that was loaded.
        got: slot -> parameter.
    """
    if variant.wanted == AT_BLOCKS:
        return _at_blocks(variant, got)
    if variant.how.format == "mxfp4":
        return _packed(variant, got)
    want = due(source_of(variant.how.format), variant.experts, variant.how.order, variant.tp)
    if lines := [line for slot, tensor in want.items() if (line := _other_form(slot, got[slot], tensor))]:
        return lines
    return [
        f"local expert {place} (expert {expert}): {slot} differs from the checkpoint"
        + _whose(variant, slot, got[slot][place])
        for place, expert in enumerate(variant.experts)
        for slot, tensor in want.items()
        if not _same(got[slot][place], tensor[place])
    ]


def _at_blocks(variant: Variant, got: Mapping[str, Tensor]) -> list[str]:
    """Of four ranks, three get two blocks of down's columns each, and the last none."""
    want = due(_mxfp4, variant.experts, variant.how.order, (variant.tp[0], variant.tp[1] - 1))
    wrong = [slot for slot in ("w2", "w2_scale") if not torch.equal(got[slot], want[slot])]
    size, ranks = SIZES["mxfp4"][1], variant.tp[1]
    said = f"{size} columns over {ranks} ranks are {size // ranks} each, and a scale is of {mxfp4.BLOCK}"
    return [f"{said}: {' and '.join(wrong)} are not those of a cut at whole blocks"] if wrong else []


def _packed(variant: Variant, got: Mapping[str, Tensor]) -> list[str]:
    """Of MXFP4: an engine may pad to multiples of its own sizes."""
    shard = loaded.Shard(variant.experts, *variant.tp, variant.how.order)
    have = loaded.Loaded(*(got[slot] for slot in SLOTS))
    plain = loaded.due(_of_layer, GEOMETRY, LAYER, shard)
    if have.w13.ndim == 3 and have.w13.shape != plain.w13.shape:
        shard = shard._replace(rows_to=have.w13.shape[1] // 2, columns_to=have.w13.shape[2] * 2)
    return loaded.compare(have, loaded.due(_of_layer, GEOMETRY, LAYER, shard), GEOMETRY, LAYER, shard)


def _of_layer(layer: int, expert: int, matrix: str) -> tuple[Tensor, Tensor]:
    """As ``identity.source`` gives it."""
    parts = _mxfp4(expert, matrix)
    return parts["weight"], parts["scale"]


def _other_form(slot: str, got: Tensor, want: Tensor) -> str:
    """A scale that is kept in another dtype is compared by its values."""
    if got.shape != want.shape:
        return f"{slot} has shape {list(got.shape)}, expected {list(want.shape)}"
    if got.element_size() != want.element_size() and not slot.endswith("_scale"):
        return f"{slot} is {got.dtype}, expected {want.dtype}"
    return ""


def _same(got: Tensor, want: Tensor) -> bool:
    if got.element_size() != want.element_size():
        return torch.equal(got.double(), want.double())
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def _whose(variant: Variant, slot: str, got: Tensor) -> str:
    """Whose bytes an expert has instead, if they are those of one other."""
    source, tp = source_of(variant.how.format), variant.tp
    for expert in EXPERTS:
        for order in ("w13", "w31"):
            if _same(got, due(source, (expert,), order, tp)[slot][0]):
                return f"; it holds expert {expert}'s" + (", up rows first" if order == "w31" else "")
    return ""


# What a wrong loader would do: a checkpoint that, loaded rightly, gives the same parameters.


def _swapped(source: Source, variant: Variant) -> Source:
    return lambda expert, matrix: source(expert, {"w1": "w3", "w3": "w1"}.get(matrix, matrix))


def _next_expert(source: Source, variant: Variant) -> Source:
    return lambda expert, matrix: source((expert + 1) % len(EXPERTS), matrix)


def _other_block(source: Source, variant: Variant) -> Source:
    """Scales move by one block; in the longer direction, since one of the two may have one block only."""

    def moved(expert: int, matrix: str) -> dict[str, Tensor]:
        parts = source(expert, matrix)
        axis = 0 if parts["scale"].shape[0] > parts["scale"].shape[1] else 1
        return parts | {"scale": parts["scale"].roll(1, axis)}

    return moved


def _cut_late(source: Source, variant: Variant) -> Source:
    """A shard begins one block late."""
    intermediate = SIZES[variant.how.format][1]
    step = 128 if variant.how.format == "fp8" else mxfp4.BLOCK

    def moved(expert: int, matrix: str) -> dict[str, Tensor]:
        axis = 1 if matrix == "w2" else 0
        return {
            part: tensor.roll(-step * tensor.shape[axis] // intermediate, axis)
            for part, tensor in source(expert, matrix).items()
        }

    return moved


#: Faults of a loader, by name.
FAULTS: dict[str, Callable[[Source, Variant], Source]] = {
    "gate-up-swapped": _swapped,
    "scale-of-another-block": _other_block,
    "expert-off-by-one": _next_expert,
    "cut-one-block-late": _cut_late,
}


def faults_of(variant: Variant) -> list[str]:
    """Those that the format of a variant can have."""
    return [name for name in FAULTS if variant.how.format in _BLOCKS or name != "scale-of-another-block"]
