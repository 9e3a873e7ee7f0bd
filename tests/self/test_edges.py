"""Edges of the planner: brute force over all routings where that is possible, the planner itself everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product

import numpy as np
import pytest

from moonep_validate.cases.case import Case
from moonep_validate.cases.layout import Ints, Layout
from moonep_validate.judge.oracle.edges import fullest, largest_end, slots_needed, ties, to_table, worst_padding
from moonep_validate.judge.oracle.plan import ExpectedPlan, allocate, make_plan, rank_quotas
from tests.self.naive_plan import naive_plan

# (R, E, K, S) with E**(R*S*K) at most 20,000 routings.
TINY = [(1, 4, 2, 3), (2, 2, 1, 7), (2, 4, 3, 1), (3, 3, 1, 3), (3, 6, 1, 1), (4, 8, 1, 1)]
# (R, E, K, S) with at most 54,000 count vectors: the planner's groups depend on the counts alone (tested below).
SMALL = [*TINY, (2, 4, 2, 6), (2, 6, 2, 5), (2, 8, 1, 5), (3, 3, 3, 4), (3, 6, 2, 2), (3, 9, 3, 1), (4, 4, 2, 3)]
LARGE = [
    *(Layout(generation, 4, 16, 4, 8, pad) for generation in "AB" for pad in (1, 3, 4, 16)),
    *(Layout("A", 8, 64, 8, 4, 4, slots) for slots in (1, 3, 9)),
    Layout("B", 8, 64, 8, 16, 16),
    Layout("B", 3, 12, 2, 10, 4),
    Layout("A", 5, 5, 3, 7, 8),
    Layout("B", 2, 16, 4, 64, 8),
    Layout("B", 64, 384, 8, 8, 128),
    Layout("B", 128, 256, 2, 3, 2),
    Layout("B", 1, 8, 2, 4, 4),
]
OBSERVABLE = {"largest_balances", "smallest_balances", "largest_experts", "largest_quotas"}


def _counts(layout: Layout) -> Iterator[Ints]:
    """All counts [E] with sum R*S*K."""
    last = layout.R * layout.capacity + layout.E - 1
    for bars in combinations(range(last), layout.E - 1):
        yield np.diff([-1, *bars, last]) - 1


@cache
def _all_allocs(R: int, E: int, K: int, S: int) -> Ints:
    """[vectors, E, R] for all counts; neither the generation nor the padding matters for who computes what."""
    layout = Layout("B", R, E, K, S, 1)
    return np.array([allocate(counts, rank_quotas(counts, layout), layout) for counts in _counts(layout)])


def _needed(alloc: Ints, layout: Layout) -> Ints:
    """Remote experts of each rank, [..., R]."""
    remote = layout.home(np.arange(layout.E))[:, None] != np.arange(layout.R)
    return np.asarray(((alloc > 0) & remote).sum(axis=-2))


def _padding(plan: ExpectedPlan) -> int:
    return int((plan.cu_seqlens[:, -1] - plan.layout.capacity).sum())


@pytest.mark.parametrize("generation", ["A", "B"])
@pytest.mark.parametrize("sizes", TINY)
def test_brute_force_over_all_routings(sizes: tuple[int, int, int, int], generation: str) -> None:
    """Routings with equal counts have equal groups (3,000 random ones are planned), so one per count is judged."""
    R, E, K, S = sizes
    layout = Layout(generation, R, E, K, S, 2, 1 if generation == "A" else None)
    routings = np.array(list(product(range(E), repeat=R * S * K)), np.int16)
    some = routings[np.random.default_rng(0).permutation(len(routings))[:3000]]
    seen: dict[bytes, list[int]] = {}
    for routing in some:
        plan = make_plan(routing.reshape(R, S, K), layout)
        groups = [*plan.cu_seqlens[:, -1].tolist(), *plan.remote_stats[:, 0].tolist()]
        counts = np.bincount(routing, minlength=E)
        assert seen.setdefault(counts.tobytes(), groups) == groups
    ends, needs, paddings = [], set(), []
    ordered = np.sort(routings, axis=1)
    for routing in np.unique(ordered, axis=0):
        plan = make_plan(routing.reshape(R, S, K), layout)
        ends.append(plan.cu_seqlens[:, -1].max())
        needs |= set(plan.remote_stats[:, 0].tolist())
        paddings.append(_padding(plan))
    assert largest_end(layout) == max(ends)
    assert {n for n in range(E + 1) if slots_needed(layout, n) is not None} == needs
    edge = worst_padding(layout)
    assert edge.value == max(paddings)


@pytest.mark.parametrize("pad", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("sizes", SMALL)
def test_brute_force_over_all_counts(sizes: tuple[int, int, int, int], pad: int) -> None:
    alloc = _all_allocs(*sizes)
    layout = Layout("B", *sizes, pad)
    blocks = -(-alloc // pad)
    assert largest_end(layout) == blocks.sum(axis=1).max() * pad
    edge, most = worst_padding(layout), (-alloc % pad).sum(axis=(1, 2)).max()
    assert edge.value == most if edge.proven else edge.value <= most


@pytest.mark.parametrize("sizes", SMALL)
def test_slots_are_possible_exactly_where_brute_force_finds_them(sizes: tuple[int, int, int, int]) -> None:
    layout = Layout("B", *sizes, 1)
    found = set(np.unique(_needed(_all_allocs(*sizes), layout)).tolist())
    assert {n for n in range(layout.E + 1) if slots_needed(layout, n) is not None} == found


@pytest.mark.parametrize("layout", [*LARGE, *(Layout("B", *sizes, 3) for sizes in SMALL)], ids=str)
def test_planner_confirms_every_value(layout: Layout) -> None:
    """Also with the naive planner, where that is fast."""
    plan = make_plan(fullest(layout), layout)
    assert plan.cu_seqlens.max() == largest_end(layout) <= layout.num_rows
    edge = worst_padding(layout)
    assert _padding(make_plan(edge.topk, layout)) == edge.value
    for count in range(layout.experts_per_rank + 2):
        topk = slots_needed(layout, count)
        if topk is not None:
            plan = make_plan(topk, layout)
            assert plan.remote_stats[:, 0].max() == count, count
    if layout.E <= 16:
        assert max(ends[-1] for ends in naive_plan(fullest(layout), layout)["cu_seqlens"]) == largest_end(layout)


def test_slots_of_generation_a_overflow_by_one() -> None:
    """B remote experts fill the slots, with B + 1 one stays in its home group and is read remotely."""
    layout = Layout("A", 8, 64, 8, 4, 4, 3)
    for count, in_home_group in ((3, 0), (4, 1)):
        topk = slots_needed(layout, count)
        assert topk is not None
        plan = make_plan(topk, layout)
        assert plan.remote_stats[1, 0] == count
        assert (plan.experts_to_copy[1] >= 0).sum() == 3
        needed = np.flatnonzero(plan.alloc[:, 1] * (layout.home(np.arange(64)) != 1))
        assert len(set(needed.tolist()) - set(plan.experts_to_copy[1].tolist())) == in_home_group


@pytest.mark.parametrize("layout", LARGE, ids=str)
def test_larger_random_search_finds_nothing_beyond(layout: Layout) -> None:
    """An attack on the proofs: skewed random counts stay inside every edge that is called proven."""
    random = np.random.default_rng(20260728)
    end, edge = largest_end(layout), worst_padding(layout)
    possible = {n for n in range(layout.E + 1) if slots_needed(layout, n) is not None}
    for _ in range(60):
        weights = random.lognormal(0, random.uniform(0, 4), layout.E)
        weights *= np.repeat(random.lognormal(0, 1, layout.R), layout.experts_per_rank)
        counts = random.multinomial(layout.R * layout.capacity, weights / weights.sum())
        alloc = allocate(counts, rank_quotas(counts, layout), layout)
        assert (-(-alloc // layout.pad)).sum(axis=0).max() * layout.pad <= end
        assert set(_needed(alloc, layout).tolist()) <= possible
        assert not edge.proven or (-alloc % layout.pad).sum() <= edge.value


def test_which_padding_is_proven() -> None:
    """What the docstring names, so the usual sizes; for C - P = 28 and pad = 4 the bound (56) is not met."""
    assert worst_padding(Layout("B", 8, 64, 8, 16, 16)).proven
    assert worst_padding(Layout("B", 64, 384, 8, 8, 128)).proven
    edge = worst_padding(Layout("B", 4, 16, 4, 8, 4))
    assert (edge.value, edge.proven) == (52, False)
    for R, P, S, pad in product((1, 2, 5), (2, 5), range(1, 30), (2, 5, 7, 16)):
        rest = (S - P) % pad
        if R == 1 or P >= S or (rest >= 1 and R * (rest - 1) < pad - 1):
            assert worst_padding(Layout("B", R, R * P, 1, S, pad)).proven, (R, P, S, pad)


@pytest.mark.parametrize("generation", ["A", "B"])
@pytest.mark.parametrize("sizes", [s for s in SMALL if s not in [(2, 6, 2, 5), (2, 8, 1, 5), (3, 9, 3, 1)]])
def test_ties_left_out_are_impossible(sizes: tuple[int, int, int, int], generation: str) -> None:
    layout = Layout(generation, *sizes, 2)
    met: set[str] = set()
    for counts in _counts(layout):
        met |= _plan_with_ties(counts, layout, "")[1]
    assert set(ties(layout)) == met


@pytest.mark.parametrize("layout", [*LARGE, *(Layout("A", *sizes, 2) for sizes in SMALL)], ids=str)
def test_ties_occur_and_show(layout: Layout) -> None:
    """Each tie occurs, and breaking it to the largest id shows, unless the docstring says that it cannot."""
    for name, topk in ties(layout).items():
        counts = np.bincount(topk.ravel(), minlength=layout.E)
        alloc, met = _plan_with_ties(counts, layout, "")
        assert alloc == make_plan(topk, layout).alloc.tolist()
        assert name in met
        unseen = {"smallest_balances"} if layout.R == 3 else set()
        unseen |= {"largest_quotas"} if layout.experts_per_rank == 1 else set()
        if name in OBSERVABLE - unseen:
            assert _plan_with_ties(counts, layout, name)[0] != alloc, name


def _plan_with_ties(counts: Ints, layout: Layout, flipped: str) -> tuple[list[list[int]], set[str]]:
    """Plan with plain loops: (alloc [E][R], ties met). The tie ``flipped`` goes to the largest index instead."""
    R, P, met = layout.R, layout.experts_per_rank, set()

    def largest(values: list[int], name: str) -> int:
        best = [i for i, value in enumerate(values) if value == max(values)]
        if len(best) > 1:
            met.add(name)
        return best[-1 if name == flipped else 0]

    rows = counts.tolist()
    balance = [sum(rows[h * P : (h + 1) * P]) - layout.capacity for h in range(R)]
    quotas = [[0] * R for _ in range(R)]
    while max(balance) > 0:
        donor = largest(balance, "largest_balances")
        receiver = largest([-b for b in balance], "smallest_balances")
        quotas[donor][receiver] = -balance[receiver]
        balance[donor] += balance[receiver]
        balance[receiver] = 0
    alloc = [[rows[e] if e // P == r else 0 for r in range(R)] for e in range(layout.E)]
    for donor in range(R):
        while max(quotas[donor]) > 0:
            receiver = largest(quotas[donor], "largest_quotas")
            own = [alloc[donor * P + i][donor] for i in range(P)]
            expert = donor * P + largest(own, "largest_experts")
            moved = min(alloc[expert][donor], quotas[donor][receiver])
            alloc[expert][donor] -= moved
            alloc[expert][receiver] += moved
            quotas[donor][receiver] -= moved
    for r in range(R):
        remote = [alloc[e][r] for e in range(layout.E) if e // P != r and alloc[e][r] > 0]
        if layout.generation == "A" and len(remote) > len(set(remote)):
            met.add("slot_rows")
    return alloc, met


def test_table_is_a_case_line() -> None:
    layout = Layout("B", 4, 8, 2, 3, 4)
    topk = fullest(layout)
    line = f"genB+R4+E8+K2+S3+pad4+{to_table(topk)}"
    assert str(Case.parse(line)) == line
    assert Case.parse(line).routing.args == tuple(map(str, topk.ravel().tolist()))


def test_ids_of_a_token_differ_where_counts_allow_it() -> None:
    topk = worst_padding(Layout("B", 8, 64, 4, 16, 16)).topk
    assert all(len(set(token)) == 4 for token in topk.reshape(-1, 4).tolist())
