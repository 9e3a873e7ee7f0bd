"""What differs between the two API generations? Pure facts: slots, groups, rows (docs/contract.md, Generations).

Planning (who computes which token) is the same in both; only the layout of groups and slots differs, and
this module is the only place of the judge that looks at the generation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonep_validate.cases.case import Case
from moonep_validate.cases.limits import buffer_rows, check_geometry

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Layout:
    """The geometry of one Buffer.

    Attributes:
        generation: ``"A"`` or ``"B"``.
        R, E, K, S: see case.py.
        pad: ``token_padding``; each non-empty group starts and ends on a multiple of it.
        slots: redundant slots per rank (the contract's B); None means ``E/R``.

    Raises:
        CaseError: if no MoonEP build accepts the geometry.
    """

    generation: str
    R: int
    E: int
    K: int
    S: int
    pad: int
    slots: int | None = None

    def __post_init__(self) -> None:
        check_geometry(self.generation, self.R, self.E, self.K, self.S, self.pad, self.slots)

    @classmethod
    def of(cls, case: Case) -> Layout:
        """The layout that a case asks for."""
        return cls(case.generation, case.R, case.E, case.K, case.S, case.pad, case.slots)

    @property
    def experts_per_rank(self) -> int:
        """``E/R``."""
        return self.E // self.R

    @property
    def num_slots(self) -> int:
        """Slots per rank with the default applied."""
        return self.experts_per_rank if self.slots is None else self.slots

    @property
    def capacity(self) -> int:
        """Rows that each rank computes: ``S*K`` (law L3)."""
        return self.S * self.K

    @property
    def num_home_groups(self) -> int:
        """Groups before the slot groups: all experts (A) or the rank's own (B)."""
        return self.E if self.generation == "A" else self.experts_per_rank

    @property
    def num_groups(self) -> int:
        """Length of ``cu_seqlens``."""
        return self.num_home_groups + self.num_slots

    @property
    def num_rows(self) -> int:
        """``NvS``, the rows of a rank's buffer."""
        return buffer_rows(self.generation, self.R, self.E, self.K, self.S, self.pad)

    def home(self, expert: Ints) -> Ints:
        """The rank that owns each expert."""
        return expert // self.experts_per_rank

    def group_experts(self, experts_to_copy: Ints) -> Ints:
        """The expert of each group: ``[R, num_groups]``, -1 for an unused slot.

        Args:
            experts_to_copy: ``[R, num_slots]``, -1 for an unused slot.
        """
        first = np.zeros(self.R, int) if self.generation == "A" else np.arange(self.R) * self.experts_per_rank
        return np.concatenate([first[:, None] + np.arange(self.num_home_groups), experts_to_copy], axis=1)

    def slot_order(self, alloc: Ints) -> Ints:
        """``experts_to_copy`` for an allocation (rule X3).

        B: ascending expert id. A: row count, then expert id, both descending, cut to ``num_slots``.

        Args:
            alloc: ``[E, R]``, rows of each expert on each rank.

        Returns:
            ``[R, num_slots]``, -1 for an unused slot.
        """
        experts = np.arange(self.E)
        rank = np.arange(self.R)[:, None]
        rows = np.where(self.home(experts) == rank, 0, alloc.T)
        key = experts if self.generation == "B" else -(rows * self.E + experts)
        key = np.where(rows > 0, key, np.iinfo(np.int64).max)
        order = np.argsort(key, axis=1, kind="stable")[:, : self.num_slots]
        used = np.where(np.take_along_axis(rows, order, axis=1) > 0, order, -1)
        spare = np.full((self.R, self.num_slots - used.shape[1]), -1)
        return np.concatenate([used, spare], axis=1)


def local_first_rows(case: Case, rank: int) -> Ints:
    """The rows of each rank's experts on a rank of generation A whose own chunk comes first (W6): ``[R, E/R]``."""
    chunk = (np.arange(case.R, dtype=np.int64) - rank) % case.R
    return chunk[:, None] * case.experts_per_rank + np.arange(case.experts_per_rank, dtype=np.int64)
