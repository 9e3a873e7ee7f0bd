"""How do MoonEP's groups become the row ids that DeepGEMM reads? And what if they do not fit its tiles?

MoonEP gives ``cu_seqlens``, the padded end of each group. DeepGEMM's m-grouped contiguous kernels take one group
id per row and read one per tile of M rows, that of its first row: a group that starts inside a tile is computed
with the weights of the group before it, and nothing says so. So a group must start and end on the alignment of the
library, or its rows must be moved to where they do. A row of id -1 belongs to no group; what is computed there
depends on the kernel (zeros, ``x @ W0``, or nothing is written), so it may not be read.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor


class PermuteError(ValueError):
    """Groups that do not fit the tiles of a library; the message names the group, its rows and the alignment."""


@dataclass(frozen=True)
class Tiles:
    """Rows laid out for a library that reads one group id per tile.

    Attributes:
        ids: int32 ``[M]``, group of each row, -1 where it belongs to none; M is a multiple of the alignment.
        source: int64 ``[M]``, the row of the buffer that lies there, -1 for none; None where row m is row m, and
            nothing is moved.
        num_rows: NvS, the rows of the buffer.
    """

    ids: Tensor
    source: Tensor | None
    num_rows: int

    def gather(self, rows: Tensor) -> Tensor:
        """Rows of the buffer ``[NvS, ...]`` to their places ``[M, ...]``; zeros where none lies."""
        if self.source is None:
            return rows[: len(self.ids)]
        there = self.source >= 0  # -1 would take the last row, and put something else back there
        gathered = rows.new_zeros(len(self.ids), *rows.shape[1:])
        gathered[there] = rows[self.source[there]]
        return gathered

    def scatter(self, tiles: Tensor) -> Tensor:
        """Rows in their places ``[M, ...]`` back to the buffer ``[NvS, ...]``; NaN after the last group."""
        out = tiles.new_full((self.num_rows, *tiles.shape[1:]), float("nan"))
        if self.source is None:
            inside = self.ids >= 0
            out[: len(self.ids)][inside] = tiles[inside]
        else:
            there = self.source >= 0
            out[self.source[there]] = tiles[there]
        return out


def row_groups(cu_seqlens: Tensor, num_rows: int) -> Tensor:
    """The group of each row: int32 ``[num_rows]``, -1 after the last group.

    Args:
        cu_seqlens: int32 ``[G]``, inclusive padded end of each group.
        num_rows: NvS.
    """
    rows = torch.arange(num_rows, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    group = torch.searchsorted(cu_seqlens, rows, right=True).to(torch.int32)
    return torch.where(group < len(cu_seqlens), group, -1)


def misaligned(cu_seqlens: Tensor, alignment: int) -> str | None:
    """Which group first leaves the tiles, as a sentence, or None; waits for the device."""
    wrong = torch.nonzero(cu_seqlens % alignment)[:, 0]
    if not len(wrong):
        return None
    group = int(wrong[0])
    begin = int(cu_seqlens[group - 1]) if group else 0
    return (
        f"group {group} spans rows {begin} to {int(cu_seqlens[group])}, and one group id is read per tile of "
        f"{alignment} rows: its neighbours' rows would be computed with the wrong weights"
    )


def tile(cu_seqlens: Tensor, num_rows: int, alignment: int, repack: bool = True) -> Tiles:
    """Lay groups out in whole tiles; rows are moved only where they have to be.

    Args:
        cu_seqlens: int32 ``[G]``, inclusive padded end of each group.
        num_rows: NvS.
        alignment: rows of a tile, as the library says at this moment; it is global to the process.
        repack: whether rows may be moved.

    Raises:
        PermuteError: if a group does not fit and rows may not be moved, or if the groups are no groups.
    """
    _check(cu_seqlens, num_rows, alignment)
    wrong = misaligned(cu_seqlens, alignment)
    if wrong and not repack:
        raise PermuteError(f"{wrong}; use a token padding that is a multiple of {alignment}, or repack")
    if not wrong:
        return Tiles(row_groups(cu_seqlens, num_rows // alignment * alignment), None, num_rows)
    return _repacked(cu_seqlens, num_rows, alignment)


def _check(cu_seqlens: Tensor, num_rows: int, alignment: int) -> None:
    if alignment < 1:
        raise PermuteError(f"the library says an alignment of {alignment} rows; 1 or more is needed")
    ends = [0, *cu_seqlens.tolist()]
    if any(end < begin for begin, end in itertools.pairwise(ends)) or ends[-1] > num_rows:
        raise PermuteError(f"cu_seqlens {ends[1:][:8]}... must rise, and end at most at the {num_rows} rows")


def _repacked(cu_seqlens: Tensor, num_rows: int, alignment: int) -> Tiles:
    """Each group starts at the next whole tile; vectorised over rows."""
    ends = cu_seqlens.long()
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    lengths = -((begins - ends) // alignment) * alignment
    new_ends = lengths.cumsum(0)
    place = torch.arange(int(new_ends[-1]), device=ends.device)
    group = torch.searchsorted(new_ends, place, right=True)
    row = begins[group] + place - (new_ends - lengths)[group]
    return Tiles(group.to(torch.int32), torch.where(row < ends[group], row, -1), num_rows)
