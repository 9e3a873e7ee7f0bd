"""Small scope, exhaustively: every routing of small geometries keeps every law.

R <= 3 ranks, E <= 6 experts, S*K <= 4 routes a rank, both generations, 1 to E/R + 1 slots in A (one rank alone: 1),
paddings 1 to 3. A geometry (R, E, S, K) has E**(R*S*K) routings, and that number decides what is possible:

====================  ==================================================================================
up to 256             56 geometries, 3,886 routings, each with every variant (generation, slots, padding):
                      30,981 plans
up to 1,296           10 geometries, 9,813 routings, each with one of the variants in turn
up to 65,536          11 geometries, 430,790 routings, in turn as well: minutes, ``pytest -m slow``
more: beyond reach    R2 E6 S*K=4 (1.7 million), R3 E3 S*K=4 (531,441), R3 E6 S*K=3 (10 million) and S*K=4
                      (2.2 billion)
every load vector     of the 13 sizes (R, E, S*K) above 256, by one routing each: 11,146. Quotas, allocation,
                      slots and groups depend on the loads alone, so that L3, L6 to L10, L13, L15 and L16 are
                      exhausted there (with one variant each); L11 and L12 (duplicates) are not
====================  ==================================================================================

What needs size: tied donors first occur at R3 E3 S*K=2, two used slots of a rank at R2 E6 S*K=3.

Three judges: the laws once more, over thousands of stacked plans, and the naive loop (both on all routings); the
real checks on what the reference's ranks plan and list by themselves, L12 and X among them (every 47th, in turn every
97th). The whole pipeline, with the dense reference as judge, runs on every 207th (in turn: every 500th of a variant).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from moonep_validate.cases.case import Case, Spec
from moonep_validate.cases.layout import Bools, Ints, Layout
from moonep_validate.judge.checks import CHECKS, run_check
from moonep_validate.judge.facts import Step
from moonep_validate.judge.oracle.plan import ExpectedPlan, make_plan
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.run import run_case
from moonep_validate.reference.planner import plan_rank
from moonep_validate.reference.transport import Transport
from moonep_validate.trace.trace import Call, Part, Trace
from tests.self.naive_plan import naive_plan

SMALL, MEDIUM, LARGE = 256, 1296, 65_536
PADS = (1, 2, 3)
BLOCK = 2048  # plans that are judged at once
PIPELINE_CASES = 150
PLAN_CHECKS = [check for check in CHECKS.values() if check.stage == "plan"]

Shape = tuple[int, int, int, int]


# ---- what is covered ------------------------------------------------------------------------------------------


def shapes(least: int, most: float) -> list[Shape]:
    """(R, E, S, K) of the scope with ``least`` < number of routings <= ``most``."""
    return [
        (R, E, S, routes // S)
        for R in (1, 2, 3)
        for E in range(R, 7, R)
        for routes in (1, 2, 3, 4)
        for S in range(1, routes + 1)
        if routes % S == 0 and least < E ** (R * routes) <= most
    ]


def variants(shape: Shape) -> list[Layout]:
    """Every generation, slot count and padding of a shape."""
    R, E, S, K = shape
    counts = range(1, E // R + 2) if R > 1 else [1]  # one rank has nobody to copy from
    slots = [("B", None), *(("A", count) for count in counts)]
    return [Layout(generation, R, E, K, S, pad, count) for pad in PADS for generation, count in slots]


def number_of_routings(layout: Layout) -> int:
    return int(layout.E ** (layout.R * layout.capacity))


def routings(layout: Layout, numbers: Ints) -> Ints:
    """The routings with these numbers, ``[N, R, S, K]``: the digits of each number in base E."""
    digits = np.stack(np.unravel_index(numbers, (layout.E,) * (layout.R * layout.capacity)), axis=1)
    return digits.reshape(-1, layout.R, layout.S, layout.K)


def every_variant(most: int = SMALL) -> Iterator[tuple[Layout, Ints]]:
    """(layout, numbers of routings): all routings with all variants."""
    for shape in shapes(0, most):
        for layout in variants(shape):
            yield layout, np.arange(number_of_routings(layout))


def variants_in_turn(shape: Shape) -> Iterator[tuple[Layout, Ints]]:
    """(layout, numbers of routings): all routings of a shape, each with one of the variants."""
    layouts = variants(shape)
    # A prime step, so that the variant follows no digit of the routing's number.
    turn = np.arange(number_of_routings(layouts[0])) // 7 % len(layouts)
    return ((layout, np.flatnonzero(turn == place)) for place, layout in enumerate(layouts))


def every_load(shape: Shape) -> Ints:
    """Every number of routes per expert, ``[N, E]``: bars between R*S*K stars."""
    R, E, S, K = shape
    total = R * S * K
    bars = np.array(list(combinations(range(total + E - 1), E - 1)), int).reshape(-1, E - 1)
    ends = np.concatenate([np.full((len(bars), 1), -1), bars, np.full((len(bars), 1), total + E - 1)], axis=1)
    return np.diff(ends, axis=1) - 1


# ---- the laws over many plans at once -------------------------------------------------------------------------


@dataclass(frozen=True)
class Plans:
    """Many plans of one layout: fields as in ``ExpectedPlan`` with a leading axis ``[N]``, routes are ``[N, R, S, K]``."""

    layout: Layout
    topk: Ints
    raw: Ints
    dst: Ints
    alloc: Ints
    experts_to_copy: Ints
    cu_seqlens: Ints
    zero_fill_ranges: Ints
    remote_stats: Ints

    @classmethod
    def of(cls, layout: Layout, topk: Ints, plans: list[ExpectedPlan]) -> Plans:
        def stacked(name: str) -> Ints:
            return np.stack([getattr(plan, name) for plan in plans]).astype(np.int64)

        routes = {name: stacked(name).reshape(topk.shape) for name in ("raw", "dst")}
        others = ("alloc", "experts_to_copy", "cu_seqlens", "zero_fill_ranges", "remote_stats")
        return cls(layout, topk, **routes, **{name: stacked(name) for name in others})

    @cached_property
    def each(self) -> Ints:
        """The number of the plan, to index with beside ranks: ``[N, 1, 1, 1]``."""
        return np.arange(len(self.raw))[:, None, None, None]

    @cached_property
    def rank(self) -> Ints:
        return np.clip(self.raw // self.layout.num_rows, 0, self.layout.R - 1)

    @cached_property
    def row(self) -> Ints:
        return self.raw - self.rank * self.layout.num_rows

    @cached_property
    def group(self) -> Ints:
        """Group of each route's row, G behind the last: ``[N, R, S, K]``."""
        count: Ints = (self.cu_seqlens[self.each, self.rank] <= self.row[..., None]).sum(axis=-1)
        return count

    @cached_property
    def begin(self) -> Ints:
        """First row of each group: ``[N, R, G]``."""
        return np.concatenate([np.zeros_like(self.cu_seqlens[..., :1]), self.cu_seqlens[..., :-1]], axis=-1)

    @cached_property
    def group_rows(self) -> Ints:
        """Routes in each group: ``[N, R, G]``."""
        shape = (*self.cu_seqlens.shape[:2], self.layout.num_groups + 1)
        flat = np.ravel_multi_index((np.broadcast_to(self.each, self.rank.shape), self.rank, self.group), shape)
        return np.bincount(flat.ravel(), minlength=int(np.prod(shape))).reshape(shape)[..., :-1]

    @cached_property
    def group_expert(self) -> Ints:
        """Expert of each group and -1 behind the last: ``[N, R, G + 1]``."""
        none = np.full((*self.cu_seqlens.shape[:2], 1), -1)
        first = 0 if self.layout.generation == "A" else np.arange(self.layout.R) * self.layout.experts_per_rank
        home = np.add.outer(first * np.ones(self.layout.R, int), np.arange(self.layout.num_home_groups))
        home = np.broadcast_to(home, (len(self.raw), *home.shape))
        return np.concatenate([home, self.experts_to_copy, none], axis=-1)

    @cached_property
    def computed(self) -> Ints:
        """Routes of each expert on each rank, by the destinations: ``[N, E, R]``."""
        shape = (len(self.raw), self.layout.E, self.layout.R)
        flat = np.ravel_multi_index((np.broadcast_to(self.each, self.rank.shape), self.topk, self.rank), shape)
        return np.bincount(flat.ravel(), minlength=int(np.prod(shape))).reshape(shape)

    @cached_property
    def remote(self) -> Bools:
        """Experts with rows away from home: ``[N, E, R]``."""
        home = np.arange(self.layout.E)[:, None] // self.layout.experts_per_rank
        away: Bools = (self.computed > 0) & (home != np.arange(self.layout.R))
        return away


def _inside(p: Plans) -> Bools:
    inside: Bools = (p.raw >= 0) & (p.row < p.cu_seqlens[p.each, p.rank, -1])
    return inside


def _prefix(p: Plans) -> Bools:
    place = p.each, p.rank, np.minimum(p.group, p.layout.num_groups - 1)
    kept: Bools = p.row - p.begin[place] < p.group_rows[place]
    return kept


def _padded(p: Plans) -> Bools:
    ends = np.cumsum(-(-p.group_rows // p.layout.pad) * p.layout.pad, axis=-1)
    kept: Bools = (ends == p.cu_seqlens) & (p.cu_seqlens <= p.layout.num_rows)
    return kept


def _zero_filled(p: Plans) -> Bools:
    first, count = p.zero_fill_ranges[..., 0], p.zero_fill_ranges[..., 1]
    ends = p.begin + p.group_rows
    kept: Bools = (count == p.cu_seqlens - ends) & ((count == 0) | (first == ends))
    return kept


def _legal_table(p: Plans) -> Bools:
    slots, rank = p.experts_to_copy, np.arange(p.layout.R)[:, None]
    used = slots >= 0
    known = (slots >= -1) & (slots < p.layout.E) & (slots // p.layout.experts_per_rank != rank)
    hole = np.zeros_like(used)
    hole[..., 1:] = used[..., 1:] & ~used[..., :-1]
    same = (slots[..., :, None] == slots[..., None, :]).sum(axis=-1) > 1
    kept: Bools = (known | ~used) & ~hole & ~(same & used) & (slots >= -1)
    return kept


def _slots_with_rows(p: Plans) -> Bools:
    home = p.layout.num_home_groups
    used = ((p.group_rows[..., home:] > 0) & (p.experts_to_copy >= 0)).sum(axis=-1)
    kept: Bools = used == np.minimum(p.remote.sum(axis=1), p.layout.num_slots)
    return kept


def _marked(p: Plans) -> Bools:
    same = p.rank[..., :, None] == p.rank[..., None, :]
    later = np.tril(same, -1).any(axis=-1)
    kept: Bools = p.dst == np.where(later, -p.raw - 1, p.raw)
    return kept


def _counted(p: Plans) -> Bools:
    home = p.experts_to_copy // p.layout.experts_per_rank
    copied = [((home == rank) & (p.experts_to_copy >= 0)).sum(axis=(1, 2)) for rank in range(p.layout.R)]
    kept: Bools = p.remote_stats == np.stack([p.remote.sum(axis=1), np.stack(copied, axis=1)], axis=-1)
    return kept


def _one_donor(p: Plans) -> Bools:
    by_home = p.remote.reshape(len(p.raw), p.layout.R, p.layout.experts_per_rank, p.layout.R)
    kept: Bools = by_home.any(axis=2).sum(axis=1) <= 1
    return kept


def _stays(p: Plans) -> Bools:
    home = p.topk // p.layout.experts_per_rank
    loads = np.stack([(home == rank).sum(axis=(1, 2, 3)) for rank in range(p.layout.R)], axis=1)
    equal = (loads == p.layout.capacity).all(axis=1)
    kept: Bools = (home == p.rank) | ~equal[:, None, None, None]
    return kept


def _conserved(p: Plans) -> Bools:
    routes = np.stack([(p.topk == e).sum(axis=(1, 2, 3)) for e in range(p.layout.E)], axis=1)
    rows = np.stack(
        [((p.group_expert[..., :-1] == e) * p.group_rows).sum(axis=(1, 2)) for e in range(p.layout.E)], axis=1
    )
    kept: Bools = routes == rows
    return kept


#: Law -> whether it is kept, ``[N, ...]``. ``alloc``: the plan says of itself what its destinations do.
LAWS: dict[str, Callable[[Plans], Any]] = {
    "L1": _inside,
    "L2": lambda p: np.diff(np.sort(p.raw.reshape(len(p.raw), -1)), axis=1) > 0,
    "L3": lambda p: p.computed.sum(axis=1) == p.layout.capacity,
    "L4": lambda p: p.group_expert[p.each, p.rank, p.group] == p.topk,
    "L5": _prefix,
    "L6": _padded,
    "L7": _zero_filled,
    "L8": _legal_table,
    "L9": _slots_with_rows,
    "L10": lambda p: (p.group_rows > 0).sum(axis=-1) <= 2 * p.layout.experts_per_rank,
    "L11": _marked,
    "L13": _counted,
    "L14": _conserved,
    "L15": _one_donor,
    "L16": _stays,
    "alloc": lambda p: p.alloc == p.computed,
}


def broken_laws(plans: Plans) -> dict[str, int]:
    """Law -> number of the first plan that breaks it."""
    kept = {law: function(plans).reshape(len(plans.raw), -1).all(axis=1) for law, function in LAWS.items()}
    return {law: int(good.argmin()) for law, good in kept.items() if not good.all()}


def _put(name: str, index: Any, value: Any) -> Callable[[Plans], Plans]:
    def spoil(plans: Plans) -> Plans:
        changed = getattr(plans, name).copy()
        changed[index] = value
        return replace(plans, **{name: changed})

    return spoil


def _swap(plans: Plans) -> Plans:
    """Two routes of different ranks exchange their rows."""
    raw = plans.raw.copy()
    raw[0, 0, 0, 0], raw[0, 1, 0, 0] = plans.raw[0, 1, 0, 0], plans.raw[0, 0, 0, 0]
    return replace(plans, raw=raw)


#: One rank overloaded: rank 0 keeps rows 0, 1 (expert 0) and 3, 4 (expert 1), rank 1 has four in its first slot.
_HOT = (Layout("B", 2, 4, 2, 2, 3), [[[0, 0], [0, 1]], [[0, 1], [0, 0]]])
_THREE = (Layout("B", 3, 3, 1, 2, 1), [[[0], [0]], [[0], [0]], [[0], [0]]])
_EVEN = (Layout("A", 2, 4, 2, 3, 1), [[[0, 1]] * 3, [[2, 3]] * 3])

#: Law -> a routing, and a change of its plan that breaks the law.
SPOILED: dict[str, tuple[tuple[Layout, Any], Callable[[Plans], Plans]]] = {
    "L1": (_HOT, _put("raw", (0, 0, 0, 0), 11)),
    "L2": (_HOT, _put("raw", (0, 0, 0, 1), 0)),
    "L3": (_HOT, _put("raw", (0, 0, 0, 0), 12 + 4)),
    "L4": (_HOT, _put("topk", (0, 0, 0, 0), 1)),
    "L5": (_HOT, _put("raw", (0, 0, 0, 1), 2)),
    "L6": (_HOT, _put("cu_seqlens", (0, 1, 3), 7)),
    "L7": (_HOT, _put("zero_fill_ranges", (0, 0, 0, 0), 1)),
    "L8": (_HOT, _put("experts_to_copy", (0, 0, 0), 1)),
    "L9": (_HOT, _put("experts_to_copy", (0, 1, 0), -1)),
    "L10": (_EVEN, _put("cu_seqlens", 0, np.arange(1, 7))),
    "L11": (_HOT, _put("dst", (0, 0, 0, 1), 1)),
    "L13": (_HOT, _put("remote_stats", (0, 0, 1), 2)),
    "L14": (_HOT, _put("topk", (0, 0, 0, 0), 3)),
    "L15": (_THREE, _put("topk", (0, 2, 1, 0), 1)),
    "L16": (_EVEN, _swap),
    "alloc": (_HOT, _put("alloc", (0, 0, 0), 3)),
}


@pytest.mark.parametrize("law", LAWS)
def test_stacked_laws_can_fail(law: str) -> None:
    (layout, routes), spoil = SPOILED[law]
    topk = np.array(routes)[None]
    plans = Plans.of(layout, topk, [make_plan(topk[0], layout)])
    assert broken_laws(plans) == {}
    assert law in broken_laws(spoil(plans))


def test_every_plan_law_is_judged_in_bulk_or_on_the_share() -> None:
    """O1, L12 and L17 need what the ranks hand out, and X the reference's own rows: these run on the share."""
    assert {check.id for check in PLAN_CHECKS} - set(LAWS) == {"O1", "L12", "L17", "X1", "X2", "X3"}


# ---- the real checks on the plan that the reference's ranks make -----------------------------------------------


def planned_step(topk: Ints, layout: Layout) -> Step:
    """The trace of a dispatch that only planned: each rank's own plan and dedup lists, rows of zeros."""
    ids = torch.from_numpy(np.ascontiguousarray(topk)).int()
    counts = torch.stack([rank_ids.flatten().bincount(minlength=layout.E) for rank_ids in ids])
    local = [plan_rank(ids[rank], counts, rank, layout) for rank in range(layout.R)]
    group = SimpleNamespace(exchange=lambda name, value: [plan.raw for plan in local])
    calls = []
    for rank, plan in enumerate(local):
        # The lists are the reference Buffer's own; its method needs a layout, a rank and an exchange only.
        stub = cast(Any, SimpleNamespace(layout=layout, rank=rank, group=group))
        groups, rows, dup_counts = Transport._duplicates(stub, plan.raw)
        call = Call("base", "dispatch", done=True)
        tensors = {
            "topk_ids": ids[rank],
            "rows": torch.zeros(layout.num_rows, 8, dtype=torch.bfloat16),
            "row_weights": torch.zeros(layout.num_rows),
            "dup_groups": groups,
            "dup_loffs": rows,
            "dup_counts": dup_counts,
            **{name: tensor for name, tensor in vars(plan).items() if name != "raw"},
        }
        call.put_as_is(**tensors)  # their form too: a tensor without one cannot be judged
        calls.append([call])
    part = Part("reference", "moonep_validate.reference", "0", policy="upstream")
    return Step(Trace(case_of(topk, layout), "planner", calls, {"plan": part}), "base")


def case_of(topk: Ints, layout: Layout) -> Case:
    """The case of one routing, with the smallest experts there are."""
    table = Spec("table", tuple(map(str, topk.ravel().tolist())))
    sizes: dict[str, Any] = {name: getattr(layout, name) for name in ("R", "E", "K", "S", "pad", "slots")}
    return Case(layout.generation, H=8, I=8, routing=table, **sizes)


#: Checks that may have nothing to judge here, and what they say then: a planner alone hands out no sizes.
IDLE = {"L16": "the home loads differ", "L17": "this build's plan names no sizes"}


def assert_checks_pass(topk: Ints, layout: Layout) -> None:
    step = planned_step(topk, layout)
    for check in PLAN_CHECKS:
        result = run_check(check, step, step.trace)
        idle = result.status == "not_applicable" and result.reason == IDLE.get(check.id)
        assert result.status == "passed" or idle, f"{step.trace.case}: {result}"


def assert_naive_agrees(topk: Ints, layout: Layout, plan: ExpectedPlan) -> None:
    expected = naive_plan(topk.tolist(), layout)
    assert expected.pop("num_rows") == layout.num_rows
    for field, value in expected.items():
        assert getattr(plan, field).tolist() == value, f"{case_of(topk, layout)}: {field}"


# ---- the tests ------------------------------------------------------------------------------------------------


@dataclass
class Judge:
    """Judges and counts routings: all by stacked laws and the naive loop, every ``checks``-th by the checks."""

    checks: int

    def __post_init__(self) -> None:
        self.count: Counter[str] = Counter()

    def judge(self, layout: Layout, topk: Ints) -> None:
        for first in range(0, len(topk), BLOCK):
            self._block(layout, topk[first : first + BLOCK])

    def _block(self, layout: Layout, topk: Ints) -> None:
        plans = [make_plan(routes, layout) for routes in topk]
        broken = broken_laws(Plans.of(layout, topk, plans))
        assert not broken, {law: str(case_of(topk[number], layout)) for law, number in broken.items()}
        for routes, plan in zip(topk, plans, strict=True):
            assert_naive_agrees(routes, layout, plan)
            if self.count["plans"] % self.checks == 0:
                assert_checks_pass(routes, layout)
                self.count["checks"] += 1
            self.count["plans"] += 1


def _say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        print(f"\n{text}")


def _named(shape: Shape) -> str:
    return "R{}-E{}-S{}-K{}".format(*shape)


def test_scope_is_as_stated() -> None:
    assert [
        (len(found), sum(E ** (R * S * K) for R, E, S, K in found))
        for found in (shapes(0, SMALL), shapes(SMALL, MEDIUM), shapes(MEDIUM, LARGE))
    ] == [(56, 3886), (10, 9813), (11, 430_790)]
    beyond = {(R, E, S * K): E ** (R * S * K) for R, E, S, K in shapes(LARGE, np.inf)}
    assert beyond == {(2, 6, 4): 1_679_616, (3, 3, 4): 531_441, (3, 6, 3): 10_077_696, (3, 6, 4): 2_176_782_336}


def test_every_routing_of_small_geometries(
    capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> None:
    """E**(R*S*K) <= 256: every routing, every generation, slot count and padding."""
    judge = Judge(checks=47)
    for layout, numbers in every_variant():
        judge.judge(layout, routings(layout, numbers))
    sizes = [(R, E, S, K, E ** (R * S * K)) for R, E, S, K in shapes(0, SMALL)]
    record_property("covered", {**judge.count, "geometries (R, E, S, K, routings)": sizes})
    _say(capsys, f"{len(sizes)} geometries, {sum(size[-1] for size in sizes)} routings, {dict(judge.count)}")
    assert judge.count["plans"] == 30_981


def test_every_load_of_larger_geometries(capsys: pytest.CaptureFixture[str]) -> None:
    """The rest of the scope up to 2.2 billion routings: one routing of each load vector, variants in turn."""
    judge = Judge(checks=47)
    random = np.random.default_rng(20260728)
    by_size: dict[tuple[int, int, int], list[Layout]] = {}
    for shape in shapes(SMALL, np.inf):
        by_size.setdefault((shape[0], shape[1], shape[2] * shape[3]), []).extend(variants(shape))
    for layouts in by_size.values():
        first = layouts[0]
        loads = every_load((first.R, first.E, first.S, first.K))
        topk = np.stack([random.permutation(np.repeat(np.arange(first.E), load)) for load in loads])
        for place, layout in enumerate(layouts):
            mine = topk[place :: len(layouts)]
            judge.judge(layout, mine.reshape(-1, layout.R, layout.S, layout.K))
    _say(capsys, f"{len(by_size)} sizes (R, E, S*K) beyond {SMALL} routings, load vectors {dict(judge.count)}")
    assert (len(by_size), judge.count["plans"]) == (13, 11_146)


@pytest.mark.parametrize("shape", shapes(SMALL, MEDIUM), ids=_named)
def test_every_routing_of_medium_geometries(shape: Shape, capsys: pytest.CaptureFixture[str]) -> None:
    """256 < E**(R*S*K) <= 1,296: every routing, in turn with one of the variants."""
    _judge_in_turn(shape, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("shape", shapes(MEDIUM, LARGE), ids=_named)
def test_every_routing_of_large_geometries(
    shape: Shape, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """1,296 < E**(R*S*K) <= 65,536: the same."""
    if "slow" not in request.config.option.markexpr:
        pytest.skip("a plain pytest must not take minutes; run it with -m slow")
    _judge_in_turn(shape, capsys)


def _judge_in_turn(shape: Shape, capsys: pytest.CaptureFixture[str]) -> None:
    judge = Judge(checks=97)
    for layout, numbers in variants_in_turn(shape):
        judge.judge(layout, routings(layout, numbers))
        judge.count.update(_run(case_of(topk, layout)) for topk in routings(layout, numbers[::500]))
    R, E, S, K = shape
    _say(capsys, f"R{R} E{E} S{S} K{K}: {dict(judge.count)}")
    assert judge.count["plans"] == E ** (R * S * K)


def test_whole_pipeline_agrees_with_dense_reference_on_a_share(capsys: pytest.CaptureFixture[str]) -> None:
    """Every n-th of the routings with all variants, through dispatch, prefetch, experts and combine."""
    total = sum(len(numbers) for _, numbers in every_variant())
    step, seen, count = -(-total // PIPELINE_CASES), 0, Counter[str]()
    for layout, numbers in every_variant():
        for number in numbers[-seen % step :: step]:
            case = case_of(routings(layout, np.array([number]))[0], layout)
            count[_run(case)] += 1
            count["generation " + case.generation] += 1
        seen += len(numbers)
    _say(capsys, f"whole pipeline on every {step}th of {total}: {dict(count)}")
    assert count["generation A"] + count["generation B"] == len(range(0, total, step))
    assert min(count["generation A"], count["generation B"]) > PIPELINE_CASES // 5


def _run(case: Case) -> str:
    """The status of a case that agrees with the dense reference; tiny payloads of two ranks may be equal."""
    _, verdict = run_case(Job(), case)
    assert [r.status for r in verdict.results if r.check == "M1" and r.step == "base"] == ["passed"]
    assert all("hold the same payload" in reason for reason in verdict.vacuous), verdict.diagnosis
    assert verdict.status == ("vacuous" if verdict.vacuous else "passed"), verdict.diagnosis
    assert {r.status for r in verdict.results if r.gates} <= {"passed", "not_applicable"}, verdict.diagnosis
    return verdict.status
