"""Who should compute what? The planning algorithm of MoonEP, vectorised over routes (docs/contract.md, Planning).

Only the two short greedy loops over ranks and experts are Python loops; everything per route is numpy. The
same code serves both generations: the layout differs, the planning does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moonep_validate.cases.layout import Int32s, Ints, Layout


@dataclass(frozen=True)
class ExpectedPlan:
    """The plan of all ranks; the outer index is the rank unless said otherwise.

    Attributes:
        layout: the geometry.
        quotas: ``[R, R]``, rows that home rank (first) hands to another rank (second).
        alloc: ``[E, R]``, rows of each expert on each rank.
        experts_to_copy: ``[R, num_slots]``, -1 for an unused slot.
        cu_seqlens: ``[R, num_groups]``, inclusive padded end of each group.
        zero_fill_ranges: ``[R, num_groups, 2]``, first padding row and count, (0, 0) if none.
        remote_stats: ``[R, 2]``, remote experts with rows here, and slots anywhere that copy one of mine.
        raw: ``[R, S*K]``, destination rank * NvS + row; ``[R, 0]``, as ``dst``, in a plan of loads alone.
        dst: ``[R, S*K]``, raw for the first k of a token on a rank, ``-raw - 1`` for later ones.
    """

    layout: Layout
    quotas: Ints
    alloc: Ints
    experts_to_copy: Ints
    cu_seqlens: Ints
    zero_fill_ranges: Ints
    remote_stats: Ints
    raw: Int32s
    dst: Int32s


def make_plan(topk_ids: Ints, layout: Layout) -> ExpectedPlan:
    """Plan a routing.

    Args:
        topk_ids: ``[R, S*K]`` or ``[R, S, K]``, expert ids in ``[0, E)``.
        layout: the geometry.

    Raises:
        ValueError: if the shape or an id is out of range (preconditions P-a and P-b).
    """
    routes = _checked(topk_ids, layout)
    return _plan(np.bincount(routes.ravel(), minlength=layout.E).astype(np.int64), layout, routes)


def plan_of_loads(loads: Ints, layout: Layout) -> ExpectedPlan:
    """Everything of a plan that the load of each expert decides: all but where each single route goes.

    Args:
        loads: ``[E]``, routes to each expert over all ranks.
        layout: the geometry.

    Raises:
        ValueError: if there are not E of them, one is negative, or they are not R*S*K in all.
    """
    if loads.shape != (layout.E,) or loads.min() < 0:
        raise ValueError(f"loads has shape {loads.shape}, E={layout.E} numbers from 0 on are needed")
    routes, total = layout.R * layout.capacity, int(loads.sum())
    if total != routes:
        raise ValueError(
            f"the loads add up to {total}, R*S*K = {routes} are needed: each rank dispatches exactly S tokens; "
            "pad shorter ranks to S and count the padding tokens' routes too"
        )
    return _plan(loads, layout, None)


def _plan(counts: Ints, layout: Layout, routes: Ints | None) -> ExpectedPlan:
    quotas = rank_quotas(counts, layout)
    alloc = allocate(counts, quotas, layout)
    experts_to_copy = layout.slot_order(alloc)
    start, cu_seqlens, zero_fill = _lay_out(alloc, experts_to_copy, layout)
    none = np.empty((layout.R, 0), np.int32)
    raw = none if routes is None else _destinations(routes, alloc, start, layout)
    return ExpectedPlan(
        layout=layout,
        quotas=quotas,
        alloc=alloc,
        experts_to_copy=experts_to_copy,
        cu_seqlens=cu_seqlens,
        zero_fill_ranges=zero_fill,
        remote_stats=_remote_stats(alloc, experts_to_copy, layout),
        raw=raw,
        dst=mark_duplicates(raw, layout.K, layout.num_rows),
    )


def rank_quotas(counts: Ints, layout: Layout) -> Ints:
    """Step 2: the largest surplus fills the smallest rank completely, until no rank has a surplus.

    Args:
        counts: ``[E]``, routes to each expert over all ranks.

    Returns:
        ``[R, R]``. Ties go to the smallest rank; at most R - 1 rounds, since a filled rank is never chosen
        again.
    """
    balance = counts.reshape(layout.R, -1).sum(axis=1) - layout.capacity
    quotas = np.zeros((layout.R, layout.R), np.int64)
    # argmax and argmin take the first of equals: that is upstream's tie-break, and X1 promises it.
    while True:
        donor, receiver = balance.argmax(), balance.argmin()
        if balance[donor] <= 0:
            return quotas
        quotas[donor, receiver] = -balance[receiver]
        balance[donor] += balance[receiver]
        balance[receiver] = 0


def allocate(counts: Ints, quotas: Ints, layout: Layout) -> Ints:
    """Step 3: each donor gives rows of its largest remaining expert to its largest remaining quota.

    Returns:
        ``[E, R]``, rows of each expert on each rank; ties go to the smallest id.
    """
    per_rank = layout.experts_per_rank
    alloc = np.zeros((layout.E, layout.R), np.int64)
    alloc[np.arange(layout.E), layout.home(np.arange(layout.E))] = counts
    for donor in np.flatnonzero(quotas.any(axis=1)):
        own = alloc[donor * per_rank : (donor + 1) * per_rank]
        quota = quotas[donor].copy()
        while quota[receiver := quota.argmax()] > 0:
            expert = own[:, donor].argmax()
            rows = min(own[expert, donor], quota[receiver])
            own[expert, donor] -= rows
            own[expert, receiver] += rows
            quota[receiver] -= rows
    return alloc


def mark_duplicates(raw: Int32s, top_k: int, num_rows: int) -> Int32s:
    """Step 7: encode every later k of a token on the same rank as ``-raw - 1``.

    Args:
        raw: ``[R, S*K]``.
    """
    destination = (raw // raw.dtype.type(num_rows)).reshape(-1, top_k).T.copy()
    duplicate = np.zeros(destination.shape, bool)
    width = next((bits for bits in (8, 16, 32) if len(raw) <= bits), 64)
    for first in range(0, len(raw), width):  # the ranks that a token has met, one bit each
        bit = _bits(destination - first, width)
        met = np.zeros_like(bit[0])
        for k in range(top_k):
            duplicate[k] |= (met & bit[k]) != 0
            met |= bit[k]
    flip = -duplicate.T.reshape(raw.shape).astype(raw.dtype)
    dst: Int32s = raw ^ flip  # all bits flipped is -raw - 1
    return dst


def _bits(place: Int32s, width: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """``1 << place`` in unsigned integers of ``width`` bits; 0 for places outside them."""
    kind = np.dtype(f"uint{width}").type
    bit: npt.NDArray[np.unsignedinteger[Any]] = np.left_shift(kind(1), place.astype(kind))
    inside = (place >= 0) & (place < width)
    return bit if inside.all() else np.where(inside, bit, kind(0))


def _checked(topk_ids: Ints, layout: Layout) -> Ints:
    routes = np.asarray(topk_ids, np.int64).reshape(len(topk_ids), -1)
    if routes.shape != (layout.R, layout.capacity):
        raise ValueError(
            f"topk has shape {np.shape(topk_ids)}, R={layout.R} rows of S*K={layout.capacity} are needed"
        )
    if routes.min() < 0 or routes.max() >= layout.E:
        rank, route = np.argwhere((routes < 0) | (routes >= layout.E))[0]
        raise ValueError(
            f"expert id {routes[rank, route]} at rank {rank}, token {route // layout.K}, k {route % layout.K} "
            f"is outside 0..{layout.E - 1}; MoonEP has no sentinel id"
        )
    return routes


def _lay_out(alloc: Ints, experts_to_copy: Ints, layout: Layout) -> tuple[Ints, Ints, Ints]:
    """Steps 4 and 5: (first row of each expert ``[R, E]``, cu_seqlens, zero_fill_ranges)."""
    rank = np.arange(layout.R)[:, None]
    experts = layout.group_experts(experts_to_copy)
    rows = np.where(experts >= 0, alloc[experts, rank], 0)
    # An expert that has a slot here leaves its home group empty (generation A lists it twice).
    in_slot = np.zeros((layout.R, layout.E + 1), bool)
    np.put_along_axis(in_slot, experts_to_copy, True, axis=1)  # -1 lands in the spare last column
    home_groups = experts[:, : layout.num_home_groups]
    rows[:, : layout.num_home_groups][np.take_along_axis(in_slot, home_groups, axis=1)] = 0

    cu_seqlens = np.cumsum(-(-rows // layout.pad) * layout.pad, axis=1)
    begin = cu_seqlens - (-(-rows // layout.pad) * layout.pad)
    padding = cu_seqlens - begin - rows
    zero_fill = np.stack([np.where(padding > 0, begin + rows, 0), padding], axis=2)
    start = np.zeros((layout.R, layout.E), np.int64)
    used = rows > 0
    start[np.broadcast_to(rank, used.shape)[used], experts[used]] = begin[used]
    return start, cu_seqlens, zero_fill


def _destinations(routes: Ints, alloc: Ints, start: Ints, layout: Layout) -> Int32s:
    """Step 6. Sorted by (expert, rank, s, k), the routes of an expert are dealt to ranks in rank order."""
    small = np.uint16 if layout.E <= 2**16 else np.int64  # numpy sorts 16-bit keys in linear time
    order = np.argsort(routes.ravel().astype(small), kind="stable")
    pieces = alloc.ravel()
    first = np.cumsum(pieces) - pieces
    base = (np.arange(layout.R) * layout.num_rows + start.T).ravel() - first
    rows = np.repeat(base.astype(np.int32), pieces)  # R * NvS fits 31 bits (Limits)
    rows += np.arange(routes.size, dtype=np.int32)
    raw = np.empty_like(rows)
    raw[order] = rows
    return raw.reshape(routes.shape)


def _remote_stats(alloc: Ints, experts_to_copy: Ints, layout: Layout) -> Ints:
    remote = (alloc > 0) & (layout.home(np.arange(layout.E))[:, None] != np.arange(layout.R))
    copied = layout.home(experts_to_copy[experts_to_copy >= 0])
    return np.stack([remote.sum(axis=0), np.bincount(copied, minlength=layout.R)], axis=1)
