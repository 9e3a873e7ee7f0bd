"""Is every expert row right, given the rows and weights that the experts were really given?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from moonep_validate.checks import Compared, check, differ
from moonep_validate.contract import Ints
from moonep_validate.facts import Step
from moonep_validate.oracle.activation import activation_of
from moonep_validate.oracle.bounds import within
from moonep_validate.oracle.dense import grouped_rows
from moonep_validate.problem import PROJECTIONS


@check("P1", "experts", needs="columns")
def expert_rows(s: Step) -> Iterator[Compared]:
    """Each row equals the float64 expert on its input"""
    for rank in range(s.case.R):  # present on every rank, or this check did not run
        s.one("experts", rank, "out")
    for rank in range(s.case.R):
        yield _rank_rows(s, rank)


def _rank_rows(s: Step, rank: int) -> Compared:
    exact = s.case.fill.name == "ints"
    given, row_weights, out = (s.one("experts", rank, name) for name in ("rows", "row_weights", "out"))
    rows, index, group = _places(s, rank)
    weights = [s.one("experts", rank, f"weight_{name}") for name in PROJECTIONS]
    activation = activation_of(s.case.model)
    want, variance = grouped_rows(given[index], group, weights, row_weights[index], exact, s.rounds, activation)
    got = out[index].double()

    def place(i: tuple[int, ...]) -> dict[str, int]:
        return {**s.row_place(rank, int(rows[i[0]])), "column": i[1]}

    return differ("expert output", want, got, place, bad=None if exact else ~within(want, got, variance))


def _places(s: Step, rank: int) -> tuple[Ints, Tensor, Tensor]:
    """Rows to judge, where they are in the recorded tensors, and the group of each in the recorded weights."""
    if s.has("experts", "sample"):  # see composed.py: some rows are kept whole, with the weights of their groups
        sample = s.one("experts", rank, "sample").numpy()
        real = torch.from_numpy(s.row_route[rank, sample] >= 0)
        return sample[real.numpy()], torch.nonzero(real)[:, 0], s.one("experts", rank, "sample_group")[real]
    rows = np.flatnonzero(s.row_route[rank] >= 0)
    return rows, torch.from_numpy(rows), torch.from_numpy(s.row_group[rank, rows])
