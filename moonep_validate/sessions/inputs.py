"""Which tensors may a script ask for? The data of its case, as one rank has it.

Scripts import no torch (see scenarios/registry.py), so what they would call with a case and a rank is bound here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.data import problem, transforms
from moonep_validate.data.problem import Batch, EachExpert
from moonep_validate.data.transforms import Places, Weights


@dataclass(frozen=True)
class Inputs:
    """Functions of data/problem.py and data/transforms.py for one case and rank; tensors are on the CPU."""

    case: Case
    rank: int

    def shifted(self, by: int = 1) -> Batch:
        """See ``problem.shifted``."""
        return problem.shifted(self.case, self.rank, by)

    def odd_ids(self) -> Batch:
        """See ``problem.odd_ids``."""
        return problem.odd_ids(self.case, self.rank)

    def random_bits(self) -> Batch:
        """See ``problem.random_bits``."""
        return problem.random_bits(self.case, self.rank)

    def injected_rows(self, count: int) -> Tensor:
        """See ``problem.injected_rows``."""
        return problem.injected_rows(self.case, self.rank, count)

    def packed_weights(self, load: int = 0) -> EachExpert:
        """See ``problem.packed_weights``; each load has other bytes."""
        return problem.packed_weights(self.case.but(seed=self.case.seed + load))

    def gradients(self, name: str, ones: bool) -> tuple[Tensor, Tensor]:
        """See ``problem.gradients``."""
        return problem.gradients(self.case, self.rank, name, ones)

    def in_place(self) -> Places:
        """See ``transforms.in_place``."""
        return transforms.in_place(self.case)

    def permuted(self) -> Places:
        """See ``transforms.permuted``."""
        return transforms.permuted(self.case)

    def rotated(self) -> Places:
        """See ``transforms.rotated``."""
        return transforms.rotated(self.case)

    def half(self, second: bool) -> Places:
        """See ``transforms.half``."""
        return transforms.half(self.case, second)

    def every_other(self) -> Places:
        """See ``transforms.every_other``."""
        return transforms.every_other(self.case)

    def taken(self, places: Places) -> Batch:
        """See ``transforms.taken``."""
        return transforms.taken(self.case, self.rank, places)

    def relabelled(self) -> Batch:
        """See ``transforms.relabelled``."""
        return transforms.relabelled(self.case, self.rank)

    def relabelled_weights(self) -> Weights:
        """See ``transforms.relabelled_weights``."""
        return transforms.relabelled_weights(self.case)

    def scaled_weights(self, factor: int) -> Weights:
        """See ``transforms.scaled_weights``."""
        return transforms.scaled_weights(self.case, factor)

    def others_changed(self, kept: Places) -> Batch:
        """See ``transforms.others_changed``."""
        return transforms.others_changed(self.case, self.rank, kept)

    def some_routes(self, odd: bool, elsewhere: bool = False) -> Batch:
        """See ``transforms.some_routes``."""
        return transforms.some_routes(self.case, self.rank, odd, elsewhere)

    def first_expert(self, twice: bool) -> Batch:
        """See ``transforms.first_expert``."""
        return transforms.first_expert(self.case, self.rank, twice)
