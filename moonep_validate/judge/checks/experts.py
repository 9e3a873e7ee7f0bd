"""Is every expert row right, given the rows and weights that the experts were really given?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from moonep_validate.cases.layout import Bools, Ints
from moonep_validate.judge.checks import Compared, differ_beyond, unchanged_inputs
from moonep_validate.judge.checks.identity import said_of
from moonep_validate.judge.facts import Absent, Step
from moonep_validate.judge.oracle.dense import grouped_rows
from moonep_validate.judge.registry import check

#: Wrong rows of one group that a remark on the first of them must fit.
_REMARKED = 8


@check("P1", "experts", needs="columns", bounded=True)
def expert_rows(s: Step) -> Iterator[Compared]:
    """Each row is what its expert makes of the row's input, computed in float64"""
    for rank in range(s.case.R):  # present on every rank, or this check did not run
        s.one("experts", rank, "out")
    for rank in range(s.case.R):
        yield _rank_rows(s, rank)


def _rank_rows(s: Step, rank: int) -> Compared:
    given, row_weights, out = (s.one("experts", rank, name) for name in ("rows", "row_weights", "out"))
    rows, index, group = _places(s, rank)
    weights = stored_weights(s, rank)
    values = s.format.values(weights, torch.float32)
    want, variance = grouped_rows(given[index], group, values, row_weights[index], s.arithmetic)
    got = out[index].double()

    def place(i: tuple[int, ...]) -> dict[str, int]:
        return {**_row_place(s, rank, int(rows[i[0]]), int(group[i[0]])), "column": i[1]}

    compared = differ_beyond("expert output", want, got, variance, s.arithmetic, place)
    if not compared.findings or want.shape != got.shape:
        return compared
    wrong = torch.nonzero(s.arithmetic.wrong(want, got, variance).any(1))[:, 0]
    first = int(wrong[0])
    alike = wrong[group[wrong] == group[first]][:_REMARKED]
    known = s.has_call("dispatch", rank) and not s.has("experts", "sample")  # else groups have other numbers
    names = s.group_expert[rank] if known else np.full(len(values[0]), -1)
    bad = given[index[alike]], row_weights[index[alike]], got[alike]
    said = said_of(bad, int(group[first]), weights, names, s.arithmetic, s.format)
    other_weights = not said or " of group" in said
    return compared.noting((_read_elsewhere(s, group, wrong) if other_weights else "") or said)


def _read_elsewhere(s: Step, group: Tensor, wrong: Tensor) -> str:
    """A remark where an engine's rows are right in home groups and wrong in every slot that prefetch filled."""
    slots = set(group[group >= s.layout.num_home_groups].tolist())
    if not s.by_engine or not slots or set(group[wrong].tolist()) != slots or len(slots) == len(group.unique()):
        return ""
    return (
        f"; all home groups are right and the rows of all {len(slots)} used slots are wrong: the slot that the "
        "experts read is not the slot that prefetch filled"
    )


def _places(s: Step, rank: int) -> tuple[Ints, Tensor, Tensor]:
    """Rows to judge, where they are in the recorded tensors, and the group of each in the recorded weights."""
    if s.has("experts", "sample"):  # see composed.py: some rows are kept whole, with the weights of their groups
        sample = s.one("experts", rank, "sample").numpy()
        real = torch.from_numpy(_occupied(s, rank)[sample])
        return sample[real.numpy()], torch.nonzero(real)[:, 0], s.one("experts", rank, "sample_group")[real]
    rows = np.flatnonzero(_occupied(s, rank))
    if s.has_call("dispatch", rank):
        group = s.row_group[rank, rows]
    else:
        group = np.searchsorted(s.one("experts", rank, "cu_seqlens").numpy(), rows, side="right")
    return rows, torch.from_numpy(rows), torch.from_numpy(group)


def _occupied(s: Step, rank: int) -> Bools:
    """Which rows count: bool ``[NvS]``; where no dispatch says it, the call of the experts does."""
    if s.has_call("dispatch", rank):
        occupied: Bools = s.row_route[rank] >= 0
        return occupied
    return s.one("experts", rank, "valid").numpy()


def _row_place(s: Step, rank: int, row: int, group: int) -> dict[str, int]:
    if s.has_call("dispatch", rank):
        return s.row_place(rank, row)
    return {"rank": rank, "row": row, "group": group}


def stored_weights(s: Step, rank: int) -> list[Tensor]:
    """gate, up and down as the experts were given them, then their scales if they are packed."""
    return [s.one("experts", rank, f"weight_{name}") for name in s.stored_names("experts", "weight_")]


@check("P2", "experts", needs="full")
def experts_inputs(s: Step) -> Iterator[Compared]:
    """The experts leave rows, route weights, groups and weights as they are, padding and tail included"""
    _ours(s)
    yield from unchanged_inputs(s, "experts")


def _ours(s: Step) -> None:
    """Engines compute in a call of their own; what it does to its inputs is theirs."""
    if "changed" not in s.call("experts", 0).info and not s.call("experts", 0).error:
        raise Absent("the experts of this step are called by an engine")
