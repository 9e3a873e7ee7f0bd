"""Is every token the sum of its own expert rows?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from moonep_validate.judge.checks import Compared, axes, differ, differ_bits, unchanged_inputs
from moonep_validate.judge.facts import Absent, Step
from moonep_validate.judge.oracle.bounds import combine_bound
from moonep_validate.judge.oracle.combine import combined, prologue
from moonep_validate.judge.registry import check


@check("C1", "combine", kind="drop_in", needs="columns")
def combine_sum(s: Step) -> Iterator[Compared]:
    """Each token is the sum of its rows, rounded where upstream rounds"""
    want = combined(s.tap("combine", "rows"), s.rank_of, s.row_of)
    yield differ("combined hidden", want, s.tap("combine", "hidden"), axes("rank", "token", "column"))


@check("C2", "combine")
def combine_weights(s: Step) -> Iterator[Compared]:
    """Each route weight comes back to its token and k"""
    if not s.has("combine", "row_weights"):
        raise Absent("combine was not asked to bring route weights back")
    given, got = s.tap("combine", "row_weights"), s.tap("combine", "topk_weights")
    want = given[torch.from_numpy(s.rank_of), torch.from_numpy(s.row_of)]
    yield differ_bits("gathered route weight", want, got, axes("rank", "token", "k"))


@check("C3", "combine", needs="columns", bounded=True)
def combine_bounded(s: Step) -> Iterator[Compared]:
    """Each token is the sum of its rows, within one rounding per rank"""
    if s.info("combine", "repeat", 0):
        raise Absent("combine ran on these rows before")
    rows = s.tap("combine", "rows")
    terms = rows[torch.from_numpy(s.rank_of), torch.from_numpy(s.row_of)].double()
    want = terms.sum(dim=2)
    got = s.tap("combine", "hidden").double()
    error = (got - want).abs().nan_to_num(nan=torch.inf)
    bad = (error > combine_bound(terms, torch.from_numpy(s.rank_of))) & ~(want.isnan() & got.isnan())
    yield differ("combined hidden", want, got, axes("rank", "token", "column"), bad=bad)


@check("C4", "combine", kind="drop_in", needs="columns")
def in_place_prologue(s: Step) -> Iterator[Compared]:
    """A zero-copy combine leaves each rank's sums in the primary rows"""
    if not s.info("combine", "zero_copy", False):
        raise Absent("combine worked on a copy")
    want = prologue(s.tap("combine", "rows"), s.rank_of, s.row_of)
    got = s.tap("combine", "after_rows")
    rank, row = np.nonzero(s.row_route >= 0)
    index = torch.from_numpy(rank), torch.from_numpy(row)

    def place(i: tuple[int, ...]) -> dict[str, int]:
        return {**s.row_place(int(rank[i[0]]), int(row[i[0]])), "column": i[1]}

    yield differ("row after combine", want[index], got[index], place)


@check("U3", "combine")
def combine_inputs(s: Step) -> Iterator[Compared]:
    """Combine leaves its inputs as they are, every field of the plan too; only a zero-copy one changes its rows"""
    yield from unchanged_inputs(s, "combine")
