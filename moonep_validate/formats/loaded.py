"""Did the checkpoint's bytes arrive? Compare the parameters of an engine's MoE layer with what was due there.

An engine's loader fuses gate and up, cuts shards and may pad. ``due`` says what its four parameters must hold, for
the experts and the shard of one rank; ``compare`` says, byte by byte, what is there instead. Weights of
``identity.source`` let it name whose bytes arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moonep_validate.formats import FormatError, identity, layouts, mxfp4
from moonep_validate.formats.identity import Identity
from moonep_validate.formats.kimi_k3 import Geometry, Source
from moonep_validate.formats.layouts import Order, Packed


class Loaded(NamedTuple):
    """The parameters of the local experts, all uint8.

    Attributes:
        w13: ``[experts, 2I, H/2]`` codes of gate and up; ``w13_scale`` ``[experts, 2I, H/32]``.
        w2: ``[experts, H, I/2]`` codes of down; ``w2_scale`` ``[experts, H, I/32]``.
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor

    @property
    def fused(self) -> Packed:
        """Gate and up, fused."""
        return Packed(self.w13, self.w13_scale)

    @property
    def down(self) -> Packed:
        """Down."""
        return Packed(self.w2, self.w2_scale)


class Shard(NamedTuple):
    """Which part of a layer a rank holds.

    Attributes:
        experts: global ids, in the order of the local experts.
        rank, ranks: its place in the tensor-parallel group.
        order: how the engine fuses gate and up.
        rows_to, columns_to: multiples that the engine pads gate rows (I) and columns (H) to; 1 is none. Down is
            padded alike, with I and H exchanged.
    """

    experts: tuple[int, ...]
    rank: int = 0
    ranks: int = 1
    order: Order = "w13"
    rows_to: int = 1
    columns_to: int = 1


def due(source: Source, geometry: Geometry, layer: int, shard: Shard) -> Loaded:
    """What the parameters must hold, byte for byte.

    Raises:
        FormatError: for a shard that cannot be cut without splitting a block (docs/formats.md, Y8).
    """
    start, end = layouts.shard_bounds(geometry.intermediate, shard.ranks)[shard.rank]
    fused, down = [], []
    for expert in shard.experts:
        w1, w3, w2 = (Packed(*source(layer, expert, matrix)) for matrix in ("w1", "w3", "w2"))
        gate, up = (_grown(layouts.cut_rows(one, start, end), shard.rows_to, shard.columns_to) for one in (w1, w3))
        fused.append(Packed(*(layouts.fuse(g, u, shard.order) for g, u in zip(gate, up, strict=True))))
        down.append(_grown(layouts.cut_columns(w2, start, end), shard.columns_to, shard.rows_to))
    return Loaded(
        torch.stack([one.codes for one in fused]),
        torch.stack([one.scale for one in fused]),
        torch.stack([one.codes for one in down]),
        torch.stack([one.scale for one in down]),
    )


def _grown(weight: Packed, rows_to: int, columns_to: int) -> Packed:
    return layouts.pad(weight, max(rows_to, 1), max(columns_to, mxfp4.BLOCK))


def compare(got: Loaded, want: Loaded, geometry: Geometry, layer: int, shard: Shard, load: int = 0) -> list[str]:
    """Say what is wrong with loaded parameters; empty if every byte is as due.

    Args:
        got: of the engine, in its own order and padding.
        want: from ``due``.
        geometry, layer, shard: as given to ``due``.
        load: of the weights of ``identity.source``, so that the lines can say who arrived instead.

    Returns:
        One line per tensor and local expert that differs; who arrived, where the bytes say so.
    """
    lines = [
        line for name in Loaded._fields if (line := _shape_line(name, getattr(got, name), getattr(want, name)))
    ]
    if lines:
        return lines
    for place, expert in enumerate(shard.experts):
        differs = [
            name
            for name in Loaded._fields
            if not torch.equal(mxfp4.as_bytes(getattr(got, name)[place]), getattr(want, name)[place])
        ]
        if differs:
            lines.append(
                f"local expert {place} (expert {expert}): {', '.join(differs)} differ from the checkpoint"
            )
            other = _other_order(got, want, shard, place)
            lines += [f"  {line}" for line in other or _who(got, geometry, layer, shard, place, load)]
    return lines


def _other_order(got: Loaded, want: Loaded, shard: Shard, place: int) -> list[str]:
    """The gate/up order in which all of an expert is right; empty if there is none."""
    if not all(torch.equal(a[place], b[place]) for a, b in zip(got.down, want.down, strict=True)):
        return []
    halves = [layouts.split(tensor[place], shard.order) for tensor in want.fused]
    for order in layouts.ORDERS:
        try:
            fused = [layouts.fuse(gate, up, order) for gate, up in halves]
        except FormatError:  # rows that do not fill its runs
            continue
        if all(torch.equal(a[place], b) for a, b in zip(got.fused, fused, strict=True)):
            return [f"gate and up rows are in order {order}, expected {shard.order}"]
    return []


def _shape_line(name: str, got: Tensor, want: Tensor) -> str:
    if got.element_size() != 1:
        return f"{name} is {got.dtype}, expected bytes"
    if got.shape != want.shape:
        return f"{name} has shape {list(got.shape)}, expected {list(want.shape)}"
    return ""


def _who(got: Loaded, geometry: Geometry, layer: int, shard: Shard, place: int, load: int) -> Iterator[str]:
    """What the bytes of one local expert say about themselves, matrix by matrix; padding by the same words."""
    start, end = layouts.shard_bounds(geometry.intermediate, shard.ranks)[shard.rank]
    sizes = {
        "w1": (end - start, geometry.latent),
        "w3": (end - start, geometry.latent),
        "w2": (geometry.latent, end - start),
    }
    codes, scales = (layouts.split(tensor[place], shard.order) for tensor in got.fused)
    matrices = {
        "w1": Packed(codes[0], scales[0]),
        "w3": Packed(codes[1], scales[1]),
        "w2": Packed(got.w2[place], got.w2_scale[place]),
    }
    for matrix, weight in matrices.items():
        real = layouts.unpad(Packed(*(mxfp4.as_bytes(one) for one in weight)), *sizes[matrix])
        whole = identity.identity(*geometry.matrix(matrix), layer, shard.experts[place], matrix, load)
        expected = _cut_identity(whole, matrix, start, end)
        yield from (f"{matrix}: {line}" for line in identity.findings(real.codes, real.scale, expected))
        yield from (f"{matrix}: {line}" for line in layouts.padding_faults(weight, *sizes[matrix]))


def _cut_identity(who: Identity, matrix: str, start: int, end: int) -> Identity:
    rows, blocks = slice(start, end), slice(None)
    if matrix == "w2":
        rows, blocks = slice(None), slice(start // mxfp4.BLOCK, end // mxfp4.BLOCK)
    return Identity(**{name: field[rows, blocks] for name, field in vars(who).items()})
