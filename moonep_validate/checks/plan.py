"""Is the plan legal, and is it upstream's plan?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moonep_validate.checks import Compared, axes, check, differ
from moonep_validate.facts import Step
from moonep_validate.oracle.plan import make_plan


@check("L3", "plan")
def balance(s: Step) -> Iterator[Compared]:
    """Each rank computes exactly S*K rows."""
    got = np.bincount(s.rank_of[s.in_range], minlength=s.case.R)
    yield differ("rows per rank", np.full(s.case.R, s.layout.capacity), got, axes("rank"))


@check("L4", "plan")
def right_expert(s: Step) -> Iterator[Compared]:
    """Each row lies in a group of its route's expert."""
    rank = np.where(s.in_range, s.rank_of, 0)
    got = np.where(s.in_range, s.row_expert[rank, s.row_of], -1)
    yield differ(
        "expert of the row", s.topk, got, lambda i: s.route_place(int(np.ravel_multi_index(i, s.topk.shape)))
    )


@check("X1", "plan", kind="drop_in")
def plan_equality(s: Step) -> Iterator[Compared]:
    """The plan is upstream's, tie-breaks included."""
    plan = make_plan(s.topk, s.layout)
    yield differ("rows of dst", plan.layout.num_rows, s.num_rows, axes())
    yield differ("dst", plan.dst.reshape(s.dst.shape), s.dst, axes("rank", "token", "k"))
    yield differ("cu_seqlens", plan.cu_seqlens, s.cu_seqlens, axes("rank", "group"))
    copies = s.ints("dispatch", "experts_to_copy")
    want = np.broadcast_to(plan.experts_to_copy, copies.shape)
    yield differ("experts_to_copy", want, copies, axes("rank", "of_rank", "slot"))
    zero_fill = s.ints("dispatch", "zero_fill_ranges")
    yield differ("zero_fill_ranges", plan.zero_fill_ranges, zero_fill, axes("rank", "group", "field"))
    yield differ("remote_stats", plan.remote_stats, s.ints("dispatch", "remote_stats"), axes("rank", "field"))
