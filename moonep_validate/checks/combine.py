"""Is every token the sum of its own expert rows, in upstream's order and rounding?"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moonep_validate.checks import Compared, axes, check, differ, differ_bits
from moonep_validate.facts import Step
from moonep_validate.oracle.combine import combined


@check("C1", "combine", kind="drop_in")
def combine_sum(s: Step) -> Iterator[Compared]:
    """Each token is the sum of its rows, rounded as upstream."""
    rows = s.tap("combine", "rows")
    want = combined(rows, s.rank_of, s.row_of)
    yield differ("combined hidden", want, s.tap("combine", "hidden"), axes("rank", "token", "column"))


@check("C2", "combine")
def combine_weights(s: Step) -> Iterator[Compared]:
    """Each route weight comes back to its token and k."""
    given, got = s.tap("combine", "row_weights"), s.tap("combine", "topk_weights")
    want = given[torch.from_numpy(s.rank_of), torch.from_numpy(s.row_of)]
    yield differ_bits("gathered route weight", want, got, axes("rank", "token", "k"))
