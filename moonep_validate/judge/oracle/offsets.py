"""Which index arithmetic of the compute stage leaves 32 bits? The formulas, replayed in int32 and in int64.

At Kimi-K3's sizes a stack of expert weights has 9.9e9 elements, so ``group * rows * columns`` wraps: a kernel that
computes it in 32 bits reads another expert's weights, or memory of another tensor, and says nothing
(row offsets: sglang#4727, flashinfer#2642; weight stacks: axolotl#3865). Nothing is allocated here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moonep_validate.cases.case import Case
from moonep_validate.cases.layout import Layout
from moonep_validate.formats.stored import FORMATS

#: One more than the largest offset of 32 bits with a sign, as index arithmetic of kernels has it.
INT32 = 2**31


@dataclass(frozen=True)
class Offset:
    """A kernel's offset ``index * stride``, in elements.

    Attributes:
        what: the formula.
        count: how many indices there are.
        stride: elements from one index to the next.
    """

    what: str
    count: int
    stride: int

    @property
    def end(self) -> int:
        """One more than the largest offset, the size of the whole tensor."""
        return self.count * self.stride

    @property
    def first_wrong(self) -> int | None:
        """The first index whose offset is another one in int32, by replaying both; None if all fit."""
        index = np.arange(self.count)
        narrow = index.astype(np.int32) * np.int64(self.stride).astype(np.int32)
        wrong = np.flatnonzero(narrow.astype(np.int64) != index * self.stride)
        return int(wrong[0]) if len(wrong) else None


def offsets(case: Case) -> list[Offset]:
    """Every offset by which a kernel finds a row, an expert or a scale on one rank of a case.

    Args:
        case: its sizes; only they count, no data is made.
    """
    layout, H, I = Layout.of(case), case.H, case.I
    groups, rows = layout.num_groups, layout.num_rows
    found = [
        Offset("gate or up of a group: group * I * H", groups, I * H),
        Offset("fused gate and up of a group: group * 2 * I * H", groups, 2 * I * H),
        Offset("down of a group: group * H * I", groups, H * I),
        Offset("a row of the buffer: row * H", rows, H),
        Offset("a row of the buffers of all ranks: (rank * NvS + row) * H", case.R * rows, H),
        Offset("a row between the products: row * 2 * I", rows, 2 * I),
        Offset(
            "a slot in the pools of all ranks: (rank * slots + slot) * I * H", case.R * layout.num_slots, I * H
        ),
    ]
    form = FORMATS[case.format.name]
    if scale := form.scale:
        for what, piece in (("packed codes of a group, in bytes", form.codes), ("scales of a group", scale)):
            values = piece.rows * piece.columns
            found.append(Offset(f"{what}: group * I * H" + f" / {values}" * (values > 1), groups, I * H // values))
    return found


def wide(case: Case) -> list[Offset]:
    """The offsets of a case that need more than 32 bits."""
    return [offset for offset in offsets(case) if offset.end > INT32]
