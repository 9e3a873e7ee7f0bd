"""A legal planner that is not upstream's: other donors, experts, ranks, rows and slots, generation B.

Why it is legal. Write b[h] for the routes to experts of rank h, minus S*K.

Quotas (``spare_donors``): while some b is above 0, a rank with b < 0 is filled *completely* by one rank with
b > 0, whichever. The receiver's b is 0 from then on, so it neither receives nor gives again: one donor per rank
(L15), at most R - 1 rounds, and at the end every b is 0 (L3). A donor can pay: while its b is above 0, all that it
gave so far is less than its first b; the next gift is at most S*K, since no b is ever below -S*K (it starts at or
above -S*K, and falls below 0 only by one gift of at most S*K from above 0); so all its gifts are less than its
first b plus S*K, which is its load.

Experts: a receiver's remote experts all belong to its one donor, whichever of them are given first, so there are
at most E/R: each has a slot (L9), and there are at most 2*E/R groups (L10). If all b are 0, nothing moves (L16).

Quotas (``many_donors``): the fewest rows are moved, surplus by surplus to deficit by deficit. A donor gives its
surplus only, so it can pay. A rank may receive from several donors, so L15, a promise of upstream's policy, does
not hold; whether each rank has a slot for all its remote experts is looked up, else ``spare_donors`` decides.

Dealing, order of rows inside a group and order of slots are free: the laws fix none of them (L4, L5, L8, L12 ask
for the right group, a prefix, a table without holes and lists by k).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from moonep_validate.cases.layout import Bools, Int32s, Ints, Layout
from moonep_validate.judge.oracle.plan import ExpectedPlan, mark_duplicates, rank_quotas
from moonep_validate.judge.stages import STAGES
from moonep_validate.reference import moonep_b
from moonep_validate.reference.transport import MoonEPCommPlan
from moonep_validate.sessions.rig import Rig
from moonep_validate.subjects import Subject
from moonep_validate.subjects.buffer.composed import ComposedSession
from moonep_validate.trace.trace import Part

Quotas = Callable[[Ints, Layout], Ints]


@dataclass(frozen=True)
class Policy:
    """What may differ from upstream; the defaults are upstream's choices.

    Attributes:
        quotas: ``[E]`` loads -> ``[R, R]`` rows that a home rank hands to another rank.
        small_experts: a donor gives its smallest experts first, to the largest receiver id first.
        last_ranks: the routes of an expert are dealt to ranks from the last to the first.
        backward_rows: inside a group, later routes come first.
        slots_down: experts in slots by descending id.
    """

    quotas: Quotas = rank_quotas
    small_experts: bool = False
    last_ranks: bool = False
    backward_rows: bool = False
    slots_down: bool = False


def spare_donors(counts: Ints, layout: Layout) -> Ints:
    """The donor with the smallest surplus that suffices, else the largest one; ties go to the largest rank."""
    balance = counts.reshape(layout.R, -1).sum(axis=1) - layout.capacity
    quotas = np.zeros((layout.R, layout.R), np.int64)
    ranks = range(layout.R)
    while balance.max() > 0:
        receiver = min(ranks, key=lambda r: (balance[r], -r))
        missing = -balance[receiver]
        able = [r for r in ranks if balance[r] >= missing]
        donor = min(able, key=lambda r: (balance[r], -r)) if able else max(ranks, key=lambda r: (balance[r], r))
        quotas[donor, receiver] = missing
        balance[donor] -= missing
        balance[receiver] = 0
    return quotas


def many_donors(counts: Ints, layout: Layout) -> Ints:
    """The fewest rows: each surplus in turn goes to the next deficits."""
    balance = counts.reshape(layout.R, -1).sum(axis=1) - layout.capacity
    quotas = np.zeros((layout.R, layout.R), np.int64)
    while balance.max() > 0:
        donor, receiver = int((balance > 0).argmax()), int((balance < 0).argmax())
        rows = min(balance[donor], -balance[receiver])
        quotas[donor, receiver] += rows
        balance[donor] -= rows
        balance[receiver] += rows
    return quotas


def stay_at_home(counts: Ints, layout: Layout) -> Ints:
    """Illegal: no rank gives anything."""
    return np.zeros((layout.R, layout.R), np.int64)


def one_row_short(counts: Ints, layout: Layout) -> Ints:
    """Illegal: one donor keeps a row, and computes S*K + 1."""
    quotas = spare_donors(counts, layout)
    quotas[tuple(np.argwhere(quotas > 0)[0])] -= 1
    return quotas


OTHER = Policy(spare_donors, small_experts=True, last_ranks=True, backward_rows=True, slots_down=True)
FEWEST_MOVES = Policy(many_donors, small_experts=True)


def other_plan(topk: Ints, layout: Layout, policy: Policy = OTHER) -> ExpectedPlan:
    """Plan ``[R, S, K]`` expert ids by a policy, with plain loops."""
    assert layout.generation == "B", "slots that run out are generation A's business"
    routes = np.asarray(topk, np.int64).reshape(layout.R, -1)
    counts = np.bincount(routes.ravel(), minlength=layout.E)
    quotas = policy.quotas(counts, layout)
    alloc = _allocate(counts, quotas, policy.small_experts, layout)
    if (_remote(alloc, layout).sum(axis=0) > layout.num_slots).any():  # many_donors only
        quotas = spare_donors(counts, layout)
        alloc = _allocate(counts, quotas, policy.small_experts, layout)
    copies = _slots(alloc, policy, layout)
    start, cu_seqlens, zero_fill = _groups(alloc, copies, layout)
    raw = _destinations(routes, alloc, start, policy, layout)
    copied = np.bincount(copies[copies >= 0] // layout.experts_per_rank, minlength=layout.R)
    stats = np.stack([_remote(alloc, layout).sum(axis=0), copied], axis=1)
    dst = mark_duplicates(raw, layout.K, layout.num_rows)
    return ExpectedPlan(layout, quotas, alloc, copies, cu_seqlens, zero_fill, stats, raw, dst)


def _remote(alloc: Ints, layout: Layout) -> Bools:
    home = np.arange(layout.E)[:, None] // layout.experts_per_rank
    remote: Bools = (alloc > 0) & (home != np.arange(layout.R))
    return remote


def _allocate(counts: Ints, quotas: Ints, small: bool, layout: Layout) -> Ints:
    """Rows of each expert on each rank, ``[E, R]``."""
    alloc = np.zeros((layout.E, layout.R), np.int64)
    for donor in range(layout.R):
        own = range(donor * layout.experts_per_rank, (donor + 1) * layout.experts_per_rank)
        alloc[own, donor] = counts[own]
        left = quotas[donor].copy()
        while left.any():
            receiver = int(np.flatnonzero(left)[-1] if small else left.argmax())
            given = [e for e in own if alloc[e, donor]]
            key = (lambda e: (alloc[e, donor], -e)) if small else (lambda e: (-alloc[e, donor], e))  # noqa: B023
            expert = min(given, key=key)
            rows = min(alloc[expert, donor], left[receiver])
            alloc[expert, donor] -= rows
            alloc[expert, receiver] += rows
            left[receiver] -= rows
    return alloc


def _slots(alloc: Ints, policy: Policy, layout: Layout) -> Ints:
    copies = np.full((layout.R, layout.num_slots), -1)
    for rank, remote in enumerate(_remote(alloc, layout).T):
        experts = np.flatnonzero(remote)
        copies[rank, : len(experts)] = experts[::-1] if policy.slots_down else experts
    return copies


def _groups(alloc: Ints, copies: Ints, layout: Layout) -> tuple[Ints, Ints, Ints]:
    """(first row of each expert ``[R, E]``, cu_seqlens, zero_fill_ranges)."""
    start = np.zeros((layout.R, layout.E), np.int64)
    cu_seqlens = np.zeros((layout.R, layout.num_groups), np.int64)
    zero_fill = np.zeros((layout.R, layout.num_groups, 2), np.int64)
    for rank, experts in enumerate(layout.group_experts(copies).tolist()):
        end = 0
        for group, expert in enumerate(experts):
            rows = int(alloc[expert, rank]) if expert >= 0 else 0
            padding = -rows % layout.pad
            if rows:
                start[rank, expert] = end
            if padding:
                zero_fill[rank, group] = end + rows, padding
            end += rows + padding
            cu_seqlens[rank, group] = end
    return start, cu_seqlens, zero_fill


def _destinations(routes: Ints, alloc: Ints, start: Ints, policy: Policy, layout: Layout) -> Int32s:
    """Deal the routes of each expert to ranks."""
    raw = np.zeros(routes.size, np.int32)
    ranks = range(layout.R)[::-1] if policy.last_ranks else range(layout.R)
    for expert in range(layout.E):
        rows = [
            rank * layout.num_rows + start[rank, expert] + (count - 1 - row if policy.backward_rows else row)
            for rank in ranks
            for count in [alloc[expert, rank]]
            for row in range(count)
        ]
        raw[np.flatnonzero(routes.ravel() == expert)] = rows
    return raw.reshape(routes.shape)


class _OtherBuffer(moonep_b.Buffer):
    """The reference's transport with another planner."""

    relaxed = True
    policy: ClassVar[Policy]

    def _make_plan(self, topk: Tensor) -> tuple[MoonEPCommPlan, Tensor]:
        layout = self.layout
        everybody = torch.stack(self.group.exchange("expert ids", topk)).numpy()
        plan = other_plan(everybody, layout, self.policy)
        mine = {
            name: torch.from_numpy(getattr(plan, name)[self.rank]).int()
            for name in ("dst", "zero_fill_ranges", "remote_stats", "cu_seqlens")
        }
        cu_seqlens = mine.pop("cu_seqlens")
        groups, rows, counts = self._duplicates(torch.from_numpy(plan.raw[self.rank]).long())
        lists = {"dup_groups": groups, "dup_loffs": rows, "dup_counts": counts}
        copies = torch.from_numpy(plan.experts_to_copy).int()
        sizes = {"N": layout.capacity, "R": layout.R, "E": layout.E, "NvS": layout.num_rows, "K": layout.K}
        return MoonEPCommPlan(experts_to_copy=copies, **mine, **lists, **sizes), cu_seqlens  # type: ignore[arg-type]


def other_subject(chosen: Policy, promises: str = "legal") -> Subject:
    """The reference with another planner; ``promises`` is the policy that its parts claim to keep."""

    class Buffer(_OtherBuffer):
        policy = chosen

    part = Part("stand-in", "tests.self.other_planner", "1", policy=promises)
    return Subject(
        name="other_planner",
        supports=lambda case: None if case.generation == "B" else "plans generation B only",
        open=lambda rig: _open(rig, Buffer),
        parts=dict.fromkeys(STAGES, part),
        generations=("B",),
        proves="a legal planner with another policy is accepted",
        leaves_open="everything else",
    )


def _open(rig: Rig, buffer: type[_OtherBuffer]) -> ComposedSession:
    return ComposedSession(rig, buffer, rig.comm)
