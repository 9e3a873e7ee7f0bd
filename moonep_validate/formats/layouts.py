"""Where does each byte go? The layouts of packed weights as pure functions, each with its inverse.

Checkpoints keep gate, up and down apart, in row order, with row-major scales. Kernels want other orders of rows,
nibbles and scales. Sources: docs/formats.md.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from moonep_validate.formats import FormatError, mxfp4
from moonep_validate.formats.mxfp4 import BLOCK

#: Orders of the fused gate and up rows: ``w13`` gate rows, then up rows (vLLM, SGLang); ``w31`` up rows first
#: (FlashInfer CUTLASS); ``interleaved`` g0 u0 g1 u1 (gpt-oss); ``interleaved_up_first`` u0 g0 u1 g1 (FlashInfer
#: TRT-LLM, before its row shuffle); ``runs_of_8`` g0..7 u0..7 g8..15 (DeepGEMM's mega MoE).
Order = Literal["w13", "w31", "interleaved", "interleaved_up_first", "runs_of_8"]
ORDERS: tuple[Order, ...] = get_args(Order)
_RUN: dict[str, int] = {"interleaved": 1, "interleaved_up_first": 1, "runs_of_8": 8}
_UP_FIRST = ("w31", "interleaved_up_first")

#: Scale bytes per int32, and int32 per 16 bytes, the alignment of a TMA copy.
WORD = 4
#: Rows and columns of the Blackwell scale tile.
TILE = (128, 4)


class Packed(NamedTuple):
    """Codes uint8 ``[..., N, K/2]`` and scale bytes uint8 ``[..., N, K/32]`` of the same values."""

    codes: Tensor
    scale: Tensor


def swap_nibbles(codes: Tensor) -> Tensor:
    """The other element first; its own inverse. No library known stores this: it is the classic mistake."""
    return codes >> 4 | codes << 4


def to_ggml(codes: Tensor) -> Tensor:
    """GGML's nibble order: in a block, low nibbles hold elements 0..15 and high nibbles 16..31."""
    halves = mxfp4.unpack(codes).unflatten(-1, (-1, 2, BLOCK // 2))
    bytes: Tensor = halves[..., 0, :] | halves[..., 1, :] << 4
    return bytes.flatten(-2)


def from_ggml(codes: Tensor) -> Tensor:
    """The inverse of ``to_ggml``."""
    bytes = codes.unflatten(-1, (-1, BLOCK // 2))
    return mxfp4.pack(torch.cat([bytes & 15, bytes >> 4], dim=-1).flatten(-2))


def fuse(gate: Tensor, up: Tensor, order: Order = "w13") -> Tensor:
    """Fuse gate and up rows.

    Args:
        gate, up: ``[..., I, columns]`` of codes, scales or values.
        order: see ``ORDERS``.

    Returns:
        ``[..., 2I, columns]``.

    Raises:
        FormatError: for an order that is not known, or rows that do not fill its runs.
    """
    run = _run_of(order, gate.shape[-2])
    first, second = (up, gate) if order in _UP_FIRST else (gate, up)
    runs = [half.unflatten(-2, (-1, run)) for half in (first, second)]
    return torch.stack(runs, dim=-3).flatten(-4, -2)


def split(fused: Tensor, order: Order = "w13") -> tuple[Tensor, Tensor]:
    """Gate and up rows ``[..., I, columns]`` of fused ones; the inverse of ``fuse``."""
    if fused.shape[-2] % 2:
        raise FormatError(f"{fused.shape[-2]} fused rows are no gate and up halves")
    runs = fused.unflatten(-2, (-1, 2, _run_of(order, fused.shape[-2] // 2)))
    first, second = runs[..., 0, :, :].flatten(-3, -2), runs[..., 1, :, :].flatten(-3, -2)
    return (second, first) if order in _UP_FIRST else (first, second)


def _run_of(order: str, rows: int) -> int:
    if order not in ORDERS:
        raise FormatError(f"gate/up order {order!r} is not known; known: {', '.join(ORDERS)}")
    run = _RUN.get(order, max(rows, 1))
    if rows % run:
        raise FormatError(f"order {order} needs gate rows in runs of {run}, got {rows} rows")
    return run


def pack_ue8m0(scale: Tensor) -> Tensor:
    """DeepGEMM's scale layout: four K groups an int32, N innermost, columns aligned to 16 bytes.

    Args:
        scale: uint8 ``[..., N, G]``.

    Returns:
        int32 ``[..., N, ceil(G/4)]`` with stride 1 along N and a multiple of 4 along the last axis; byte j of a
        word (little endian) is group ``4i + j``. Groups and rows beyond the end are byte 0.
    """
    rows, groups = scale.shape[-2:]
    bytes = _grow(scale, -(-rows // WORD) * WORD, -(-groups // WORD) * WORD)
    words = bytes.contiguous().view(torch.int32)
    return words.mT.contiguous().mT[..., :rows, :]


def unpack_ue8m0(words: Tensor, groups: int) -> Tensor:
    """The inverse of ``pack_ue8m0``: uint8 ``[..., N, groups]``."""
    return words.contiguous().view(torch.uint8)[..., :groups].contiguous()


def to_blocked(scale: Tensor) -> Tensor:
    """The 128x4 scale tiles of Blackwell tensor cores (cuBLAS, "1D block scaling factors layout").

    Args:
        scale: uint8 ``[N, G]``; grown to multiples of 128 and 4 with byte 0.

    Returns:
        uint8, flat. Byte (r, c) of a grown matrix of C columns is at ``((r//128) * (C/4) + c//4) * 512 +
        (r%32)*16 + ((r%128)//32)*4 + c%4``.
    """
    rows, columns = (-(-size // tile) * tile for size, tile in zip(scale.shape, TILE, strict=True))
    tiles = _grow(scale, rows, columns).view(rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def from_blocked(flat: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of ``to_blocked``: uint8 ``[rows, columns]``.

    Raises:
        FormatError: if there are not as many bytes as the grown matrix has.
    """
    high, wide = (-(-size // tile) * tile for size, tile in zip((rows, columns), TILE, strict=True))
    if flat.numel() != high * wide:
        raise FormatError(f"{flat.numel()} bytes in 128x4 tiles; [{rows}, {columns}] takes {high * wide}")
    tiles = flat.reshape(high // 128, wide // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(high, wide)[:rows, :columns]


def pad(weight: Packed, rows_to: int, columns_to: int) -> Packed:
    """Grow a matrix to multiples of a kernel's tile with values that are exactly zero: code 0, scale byte 0.

    Args:
        weight: ``[..., N, K]``.
        rows_to, columns_to: multiples that N and K must reach, e.g. 64, 128 or 256; K in elements.

    Raises:
        FormatError: for a K multiple that would cut a block.
    """
    if columns_to % BLOCK:
        raise FormatError(f"K cannot be padded to a multiple of {columns_to}: blocks have {BLOCK} elements")
    rows, columns = weight.codes.shape[-2], weight.codes.shape[-1] * 2
    rows, columns = (-(-size // to) * to for size, to in ((rows, rows_to), (columns, columns_to)))
    return Packed(_grow(weight.codes, rows, columns // 2), _grow(weight.scale, rows, columns // BLOCK))


def unpad(weight: Packed, rows: int, columns: int) -> Packed:
    """The inverse of ``pad``: the first ``rows`` rows and ``columns`` elements."""
    return Packed(weight.codes[..., :rows, : columns // 2], weight.scale[..., :rows, : columns // BLOCK])


def padding_faults(weight: Packed, rows: int, columns: int) -> list[str]:
    """What is not zero beyond ``[rows, columns]``: pads are multiplied like any value (docs/formats.md, Y6)."""
    codes, scale = weight.codes.clone(), mxfp4.as_bytes(weight.scale).clone()
    codes[..., :rows, : columns // 2] = 0
    scale[..., :rows, : columns // BLOCK] = 0
    codes_bad, scale_bad = (codes & 0x77) != 0, scale == mxfp4.NAN_SCALE
    lines = []
    for bad, what in (
        (codes_bad, "code bytes of the padding are not zero"),
        (scale_bad, "pad scales are 0xFF (NaN)"),
    ):
        if bool(bad.any()):
            place = ", ".join(str(i) for i in bad.nonzero()[0].tolist())
            lines.append(f"{int(bad.sum())} {what}, first at [{place}]")
    return lines


def shard_bounds(size: int, ranks: int, stored: int | None = None) -> list[tuple[int, int]]:
    """Where tensor parallelism cuts the intermediate size: rows of gate and up, columns of down.

    Args:
        size: the model's intermediate size.
        ranks: shards.
        stored: size of the tensor at hand, if it was padded.

    Returns:
        ``(start, end)`` per rank.

    Raises:
        FormatError: for a cut that falls inside a block of the down projection, or on a padded size.
    """
    if stored is not None and stored != size:
        raise FormatError(
            f"the tensor is padded from {size} to {stored}: cut at the model's size, then pad each shard; "
            f"else rank {ranks - 1} gets padding in place of rows"
        )
    if ranks < 1 or size % ranks:
        raise FormatError(f"intermediate size {size} does not divide among {ranks} ranks")
    width = size // ranks
    if width % BLOCK and ranks > 1:
        raise FormatError(
            f"intermediate size {size} over {ranks} ranks is {width} each, no multiple of the block of {BLOCK}: "
            f"two ranks would share a scale of the down projection"
        )
    return [(rank * width, (rank + 1) * width) for rank in range(ranks)]


def cut_rows(weight: Packed, start: int, end: int) -> Packed:
    """A shard of gate or up: rows ``start`` to ``end``."""
    return Packed(weight.codes[..., start:end, :], weight.scale[..., start:end, :])


def cut_columns(weight: Packed, start: int, end: int) -> Packed:
    """A shard of down: elements ``start`` to ``end`` of K, which are whole blocks.

    Raises:
        FormatError: for an end inside a block.
    """
    if start % BLOCK or end % BLOCK:
        raise FormatError(f"columns {start} to {end} cut a block of {BLOCK} elements, which share a scale")
    return Packed(weight.codes[..., start // 2 : end // 2], weight.scale[..., start // BLOCK : end // BLOCK])


def join_rows(shards: list[Packed]) -> Packed:
    """The inverse of ``cut_rows`` over all ranks."""
    return Packed(torch.cat([one.codes for one in shards], -2), torch.cat([one.scale for one in shards], -2))


def join_columns(shards: list[Packed]) -> Packed:
    """The inverse of ``cut_columns`` over all ranks."""
    return Packed(torch.cat([one.codes for one in shards], -1), torch.cat([one.scale for one in shards], -1))


def _grow(bytes: Tensor, rows: int, columns: int) -> Tensor:
    """Zero bytes after the last row and column."""
    high, wide = bytes.shape[-2:]
    return torch.nn.functional.pad(bytes, (0, columns - wide, 0, rows - high))
