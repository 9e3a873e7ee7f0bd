"""Is the plan legal (L), and is it upstream's plan (X)?"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mode
from typing import Any

import numpy as np

from moonep_validate.cases.layout import Bools, Ints
from moonep_validate.judge.checks import Compared, Place, axes, differ
from moonep_validate.judge.facts import Absent, Missing, Step, tally
from moonep_validate.judge.oracle.plan import ExpectedPlan, make_plan
from moonep_validate.judge.registry import check


def _oracle(s: Step) -> ExpectedPlan:
    """Upstream's plan for the step's routing; computed once per step."""
    _legal(s)
    if s.oracle_plan is None:
        s.oracle_plan = make_plan(s.topk, s.layout)
    return s.oracle_plan


def _legal(s: Step) -> None:
    """Raise if upstream has no plan for the step's routing."""
    if ((s.topk < 0) | (s.topk >= s.case.E)).any():
        raise Missing(
            f"step {s.name!r} dispatched expert ids outside 0..{s.case.E - 1}, for which there is no plan"
        )


def _remote(s: Step) -> Bools:
    """Remote experts with rows on each rank: bool ``[E, R]``."""
    home = s.layout.home(np.arange(s.case.E))
    remote: Bools = (s.alloc > 0) & (home[:, None] != np.arange(s.case.R))
    return remote


@check("L1", "plan")
def destination_exists(s: Step) -> Iterator[Compared]:
    """Each destination is a row of an existing rank, inside its last group"""
    end = s.cu_seqlens[np.where(s.in_range, s.rank_of, 0), -1]
    bad = ~s.in_range | (s.row_of >= end)
    yield differ("destination row", end, s.row_of, _route(s), bad=bad)


@check("L2", "plan")
def rows_not_shared(s: Step) -> Iterator[Compared]:
    """No two routes share a row"""
    _, first, counts = np.unique(s.raw, return_index=True, return_counts=True)
    got = np.ones(s.raw.size, np.int64)
    got[first] = counts
    yield differ("routes of the row", np.ones(s.raw.shape, np.int64), got.reshape(s.raw.shape), _route(s))


@check("L3", "plan")
def equal_rows(s: Step) -> Iterator[Compared]:
    """Each rank computes exactly S*K rows"""
    got = tally(s.rank_of[s.in_range], s.case.R)
    yield differ("rows per rank", np.full(s.case.R, s.layout.capacity), got, axes("rank"))


@check("L4", "plan")
def right_expert(s: Step) -> Iterator[Compared]:
    """Each row lies in a group of its route's expert"""
    rank = np.where(s.in_range, s.rank_of, 0)
    got = np.where(s.in_range, s.row_expert[rank, s.row_of], -1)
    yield differ("expert of the row", s.topk, got, _route(s))


@check("L5", "plan")
def real_rows_first(s: Step) -> Iterator[Compared]:
    """The real rows of a group are its first rows"""
    rank = np.where(s.in_range, s.rank_of, 0)
    group = np.minimum(s.row_group[rank, s.row_of], s.cu_seqlens.shape[1] - 1)
    begin = np.where(group > 0, s.cu_seqlens[rank, group - 1], 0)
    place, count = s.row_of - begin, s.group_rows[rank, group]
    yield differ("place in the group, below its row count", count, place, _route(s), bad=place >= count)


@check("L6", "plan")
def padded_groups(s: Step) -> Iterator[Compared]:
    """Each group has its rows rounded up to the padding, all within NvS"""
    want = np.cumsum(-(-s.group_rows // s.case.pad) * s.case.pad, axis=1)
    yield differ("end of the group", want, s.cu_seqlens, axes("rank", "group"))
    last = s.cu_seqlens[:, -1]
    yield differ("last row, at most NvS", np.full(s.case.R, s.num_rows), last, axes("rank"), bad=last > s.num_rows)


@check("L7", "plan")
def padding_ranges(s: Step) -> Iterator[Compared]:
    """zero_fill_ranges are exactly the padding rows"""
    begin = np.concatenate([np.zeros((s.case.R, 1), int), s.cu_seqlens[:, :-1]], axis=1)
    count = s.cu_seqlens - begin - s.group_rows
    got = s.ints("dispatch", "zero_fill_ranges")
    yield differ("padding rows of the group", count, got[..., 1], axes("rank", "group"))
    first = np.where(count > 0, begin + s.group_rows, got[..., 0])
    yield differ("first padding row of the group", first, got[..., 0], axes("rank", "group"))


@check("L8", "plan")
def slot_table(s: Step) -> Iterator[Compared]:
    """experts_to_copy agrees on all ranks, without own experts, repeats or holes"""
    table = s.ints("dispatch", "experts_to_copy")
    most = mode([one.tobytes() for one in table])
    agreed = next(one for one in table if one.tobytes() == most)
    yield differ(
        "experts_to_copy against most ranks",
        np.broadcast_to(agreed, table.shape),
        table,
        axes("rank", "of_rank", "slot"),
    )
    slots = s.copies
    place = axes("rank", "slot")
    yield differ("expert id in a slot, in -1..E-1", s.case.E, slots, place, bad=(slots < -1) | (slots >= s.case.E))
    own = (slots >= 0) & (s.layout.home(slots) == np.arange(s.case.R)[:, None])
    yield differ("expert in a slot, not the rank's own", "remote", slots, place, bad=own)
    repeated = (
        (slots[:, :, None] == slots[:, None, :])
        & np.tri(slots.shape[1], k=-1, dtype=bool)
        & (slots >= 0)[:, :, None]
    )
    yield differ("expert in a slot, not repeated", "new", slots, place, bad=repeated.any(axis=2))
    hole = np.zeros_like(slots, bool)
    hole[:, 1:] = (slots[:, 1:] >= 0) & (slots[:, :-1] < 0)
    yield differ("slot after an unused one", -1, slots, place, bad=hole)


@check("L9", "plan")
def slots_suffice(s: Step) -> Iterator[Compared]:
    """Each remote expert has a slot; with too few slots all of them are used"""
    used = ((s.group_rows[:, s.layout.num_home_groups :] > 0) & (s.copies >= 0)).sum(axis=1)
    want = np.minimum(_remote(s).sum(axis=0), s.layout.num_slots)
    yield differ("slots with rows", want, used, axes("rank"))


@check("L10", "plan")
def few_groups(s: Step) -> Iterator[Compared]:
    """At most 2*E/R groups of a rank hold rows"""
    limit, got = 2 * s.layout.experts_per_rank, (s.group_rows > 0).sum(axis=1)
    yield differ("groups with rows, at most", np.full(s.case.R, limit), got, axes("rank"), bad=got > limit)


@check("L11", "plan")
def one_primary(s: Step) -> Iterator[Compared]:
    """Exactly the first k of a token on a rank is primary"""
    yield differ("route marked as duplicate", s.is_duplicate, s.dst < 0, _route(s))


@check("L12", "plan")
def dedup_lists(s: Step) -> Iterator[Compared]:
    """The dedup lists name each duplicate once, in order of k"""
    primary, order = _expected_duplicates(s)
    for rank in range(s.case.R):
        groups, rows, counts = (
            s.one("dispatch", rank, n).numpy().astype(np.int64) for n in ("dup_groups", "dup_loffs", "dup_counts")
        )
        want = (len(np.unique(primary[rank][primary[rank] >= 0])), int((primary[rank] >= 0).sum()))
        yield differ("dup_counts", want, counts, lambda i: {"rank": rank, "field": i[0]})  # noqa: B023
        if tuple(counts) != want:
            continue
        got_primary, got_order = _read_duplicates(groups[: want[0]], rows[: want[1]], s.num_rows)
        place = lambda i: s.row_place(rank, i[0])  # noqa: B023, E731
        yield differ("primary row of the duplicate", primary[rank], got_primary, place)
        yield differ("place of the duplicate in its list", order[rank], got_order, place)


@check("L13", "plan")
def remote_stats(s: Step) -> Iterator[Compared]:
    """remote_stats counts a rank's remote experts, and the slots of other ranks that copy its own"""
    got = s.ints("dispatch", "remote_stats")
    yield differ("remote experts", _remote(s).sum(axis=0), got[:, 0], axes("rank"))
    owners = tally(s.layout.home(s.copies[s.copies >= 0]), s.case.R)
    yield differ("slots that copy my experts", owners, got[:, 1], axes("rank"))


@check("L14", "plan")
def rows_conserved(s: Step) -> Iterator[Compared]:
    """Each expert gets as many rows as it has routes"""
    got = tally(s.row_expert[s.row_route >= 0], s.case.E)
    yield differ("rows of the expert", tally(s.topk, s.case.E), got, axes("expert"))


@check("L15", "plan", kind="drop_in")
def one_donor(s: Step) -> Iterator[Compared]:
    """Each rank receives rows from one donor at most"""
    home = s.layout.home(np.arange(s.case.E))
    donors = np.stack([_remote(s)[home == h].any(axis=0) for h in range(s.case.R)]).sum(axis=0)
    yield differ("donors, at most", np.ones(s.case.R, int), donors, axes("rank"), bad=donors > 1)


@check("L16", "plan", kind="drop_in")
def no_needless_move(s: Step) -> Iterator[Compared]:
    """Nothing moves if all home loads are equal"""
    _legal(s)
    home = s.layout.home(s.topk)
    if (tally(home, s.case.R) != s.layout.capacity).any():
        raise Absent("the home loads differ")
    yield differ("rank of the route", home, s.rank_of, _route(s))


@check("L17", "plan")
def plan_sizes(s: Step) -> Iterator[Compared]:
    """The sizes that a plan names are those of its dispatch"""
    named = s.all_info("dispatch", "sizes")
    if not named or not any(named):
        raise Absent("this build's plan names no sizes")
    due = {"N": s.layout.S * s.layout.K, "R": s.layout.R, "E": s.layout.E, "K": s.layout.K, "NvS": s.num_rows}
    due |= {"B": s.layout.num_slots} if s.layout.generation == "A" else {}
    pairs = [(rank, name, sizes[name]) for rank, sizes in enumerate(named) for name in due if name in sizes]
    want, got = [due[name] for _, name, _ in pairs], [size for *_, size in pairs]
    where: list[dict[str, Any]] = [{"rank": rank, "field": name} for rank, name, _ in pairs]
    yield differ("size in the plan", want, got, lambda i: where[i[0]])


@check("X1", "plan", kind="drop_in")
def upstream_allocation(s: Step) -> Iterator[Compared]:
    """Each rank computes as many rows of each expert as upstream plans, tie-breaks included"""
    yield differ("rows of the expert on the rank", _oracle(s).alloc, s.alloc, axes("expert", "rank"))


@check("X2", "plan", kind="drop_in")
def upstream_rows(s: Step) -> Iterator[Compared]:
    """Each route has the rank and row that upstream gives it"""
    plan = _oracle(s)
    raw = plan.raw.astype(np.int64).reshape(s.raw.shape)
    yield differ("rank of the route", raw // plan.layout.num_rows, s.rank_of, _route(s))
    yield differ("row of the route", raw % plan.layout.num_rows, s.row_of, _route(s))


@check("X3", "plan", kind="drop_in")
def upstream_slots(s: Step) -> Iterator[Compared]:
    """Slots hold the experts that upstream puts there, in upstream's order"""
    yield differ("expert in the slot", _oracle(s).experts_to_copy, s.copies, axes("rank", "slot"))


def _route(s: Step) -> Place:
    """Index of a route -> where it comes from and goes to."""
    return lambda i: s.route_place(int(np.ravel_multi_index(i, s.topk.shape)))


def _expected_duplicates(s: Step) -> tuple[Ints, Ints]:
    """(primary row, place in its list) of each duplicate row: ``[R, NvS]``, -1 for other rows."""
    same = s.rank_of[..., :, None] == s.rank_of[..., None, :]
    first_k = same.argmax(axis=-1)
    place = np.tril(same, -1).sum(axis=-1) - 1
    primary_row = np.take_along_axis(s.row_of, first_k, axis=-1)
    primary, order = (np.full((s.case.R, s.num_rows), -1) for _ in range(2))
    which = s.is_duplicate & s.in_range
    primary[s.rank_of[which], s.row_of[which]] = primary_row[which]
    order[s.rank_of[which], s.row_of[which]] = place[which]
    return primary, order


def _read_duplicates(groups: Ints, rows: Ints, num_rows: int) -> tuple[Ints, Ints]:
    """The same two tables from one rank's lists."""
    primary, order = np.full(num_rows, -1), np.full(num_rows, -1)
    counts = np.clip(groups[:, 2], 0, len(rows))
    inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    listed = (
        rows[np.clip(np.repeat(groups[:, 1], counts) + inside, 0, max(len(rows) - 1, 0))] if len(rows) else rows
    )
    listed = np.clip(listed, 0, num_rows - 1)
    primary[listed], order[listed] = np.repeat(groups[:, 0], counts), inside
    return primary, order
