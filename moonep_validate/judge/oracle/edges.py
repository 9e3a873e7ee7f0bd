"""Where are the edges of the planner? Routings that reach them, and proofs that nothing lies beyond.

A plan's groups depend on the counts T[e] alone, and every non-negative T with sum R*S*K is the count of a legal
routing, since a token may name an expert twice. So an edge is searched over counts. ``C = S*K`` is the capacity
of a rank, ``P = E/R`` the experts that it owns. Three facts about planning carry all proofs:

Leftover. When donor d fills receiver r, all surpluses together are at least r's quota q, and at most R - 1 ranks
have one. So the largest, d's, is at least ceil(q / (R-1)), and d keeps C + surplus - q >= ``leftover(q)`` =
C - q + ceil(q / (R-1)) >= 1 rows. Whom d fills later has a smaller quota (the smallest balance never falls), so
this holds for what d keeps in the end as well.

Exhaustion. Each step of d's split exhausts an expert or a quota. So if r gets m experts of d, then in this order
with a_1 >= ... >= a_m rows, the first m - 1 are used up. At the last step d's rows lie in at most P - m + 1
experts, none larger than a_{m-1}: a_{m-1} * (P - m + 1) >= leftover(q) + a_m.

Construction. Any rows a that obey this are reached: rank 0 has the surplus ceil(q / (R-1)) and experts a_1 ..
a_{m-1}, then the rest as even as possible; rank 1 lacks q = sum(a); the others have surpluses that are no larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from math import comb

import numpy as np

from moonep_validate.cases.layout import Ints, Layout
from moonep_validate.judge.oracle.plan import allocate, rank_quotas

EXHAUSTIVE_LIMIT = 4000  # count vectors; planning one takes about 50 microseconds
WIDTHS_TRIED = 8  # ranks of a team, in the construction for padding
QUOTAS_TRIED = 20  # per number of remote experts, as above

Spread = Callable[[int, int], list[int]]  # (rows, experts of a rank) -> rows of each


@dataclass(frozen=True)
class Edge:
    """The best routing that is known.

    Attributes:
        topk: ``[R, S, K]``.
        value: what ``topk`` reaches.
        proven: whether no routing exceeds ``value``; otherwise it is a lower bound.
    """

    topk: Ints
    value: int
    proven: bool


def to_table(topk: Ints) -> str:
    """The routing as part of a case line: ``table:ID,ID,...`` in order of rank, token, k."""
    return "table:" + ",".join(map(str, np.asarray(topk).ravel().tolist()))


def largest_end(layout: Layout) -> int:
    """The largest ``cu_seqlens[-1]`` of a rank over all routings, in rows. Exact.

    n rows in at most g groups fill at most g' + (n - g') // pad blocks of ``pad`` rows, where g' = min(g, n): all
    groups but one hold a single row. That is the bound for the C - q rows of own experts. Remote rows must obey
    Exhaustion. There, a_m = 1 loses nothing for m >= 2: moving the other rows to a_1 keeps a valid split and never
    lowers the sum of blocks. Then each other group holds at least the same ``floor`` rows, and a further block
    costs it the rows up to the next multiple of ``pad`` the first time, ``pad`` rows later: greedy is optimal. So
    the maximum over q and m is exact. Slots do not matter: an expert without a slot has a group elsewhere.
    """
    return _best_receipt(layout)[0] * layout.pad


def fullest(layout: Layout) -> Ints:
    """A routing ``[R, S, K]`` that reaches ``largest_end``: on rank 1, or on all ranks if moving gains nothing."""
    _, quota, number = _best_receipt(layout)
    return _deal(_receipt(layout, _remote_rows(layout, quota, number)), layout)


def slots_needed(layout: Layout, count: int) -> Ints | None:
    """A routing ``[R, S, K]`` in which a rank needs exactly ``count`` remote experts, and no rank needs more.

    None if impossible: with one rank nothing is remote, a receiver has one donor with P experts, and by
    Exhaustion with a_m = 1 (the weakest demand) m experts need 1 + (m-1) * ceil((leftover(q) + 1) / (P-m+1)) <= q
    rows. This fails, e.g., for all P experts with R = 2, since the donor keeps C rows of its smallest expert.
    The smallest such q is taken, so that the rank keeps rows of its own.
    """
    if count == 0:
        return _deal(_receipt(layout, []), layout)
    if layout.R == 1 or not 0 < count <= layout.experts_per_rank:
        return None
    quota = np.arange(1, layout.capacity + 1)
    possible = np.flatnonzero(_spare_rows(layout, quota, count) >= 0)
    if not len(possible):
        return None
    return _deal(_receipt(layout, _remote_rows(layout, int(quota[possible[0]]), count)), layout)


def worst_padding(layout: Layout) -> Edge:
    """The most padding rows over all ranks: the sum of ``cu_seqlens[-1] - C``.

    Proven if all count vectors were tried, or if the value meets a bound: a step of planning adds a group, and
    removes one if it exhausts an expert, as all but the last step of a receiver do; there are at most R - 1
    receivers. So there are at most E + R - 1 groups, of which a rank that receives nothing holds at most P. The
    bound spreads these over the ranks as well as ``largest_end`` allows. Otherwise the value is the best of two
    constructions, 1 to 15 % below the bound in trials and not known to be exact: each rank lacks one row, of an
    expert of rank 0 that is never used up (this meets the bound for C <= P, R = 1 or, with s = (C - P) % pad,
    for s >= 1 and R * (s-1) < pad - 1); and teams of ranks in each of which one receives several remote experts.
    """
    bound = _padding_bound(layout)
    exhaustive = _num_vectors(layout) <= EXHAUSTIVE_LIMIT
    best, value = _loads(layout, [0] * layout.R, _singles), -1
    for counts in chain(_constructed(layout), _all_counts(layout) if exhaustive else ()):
        if (padding := _padding(counts, layout)) > value:
            best, value = counts, padding
        if value == bound:
            break
    return Edge(_deal(best, layout), value, exhaustive or value == bound)


def ties(layout: Layout) -> dict[str, Ints]:
    """Routings ``[R, S, K]`` that meet the tie-breaks of planning, by name; exactly the impossible are left out.

    ``largest_balances``: two donors. R = 3 needs C >= 2, since the third rank lacks the rows of both.
    ``smallest_balances``: two receivers; with R = 3 there is one donor, and the order does not show in the plan.
    ``largest_experts``: two experts of a donor, P >= 2.
    ``largest_quotas``: two receivers of one donor, R >= 3; with P = 1 the order does not show in the plan.
    ``slot_rows``: remote experts of a rank with equal rows, where slots are ordered by rows (generation A). By
    Exhaustion a_1 = a_2 = a needs a * (P-2) >= leftover(2a), best for the largest a; a third expert only adds to
    what is needed.
    """
    C, R, P = layout.capacity, layout.R, layout.experts_per_rank
    found: dict[str, Ints] = {}
    if R >= 4 or (R == 3 and C >= 2):
        found["largest_balances"] = _loads(layout, [1, 1, -2] if C >= 2 else [1, 1, -1, -1])
    if R >= 4:
        # 3 rows are the least with which only receivers tie: 0 fills 2, 1 fills 3, then 0 fills 1.
        found["smallest_balances"] = _loads(layout, [4, 2, -3, -3] if C >= 3 else [1, 1, -1, -1])
    elif R == 3:
        found["smallest_balances"] = _loads(layout, [2, -1, -1])
    if R >= 2 and P >= 2:
        quota = 2 - C % 2  # C + quota is even
        found["largest_experts"] = _loads(layout, [quota, -quota], _two)
    if R >= 3:
        found["largest_quotas"] = _loads(layout, [2, -1, -1], _two)
    half = C // 2
    if layout.generation == "A" and R >= 2 and half * (P - 2) >= _leftover(layout, np.array(2 * half)):
        found["slot_rows"] = _receipt(layout, [half, half])
    return {name: _deal(counts, layout) for name, counts in found.items()}


# --- counts that reach an edge ---


def _deal(counts: Ints, layout: Layout) -> Ints:
    """A routing ``[R, S, K]`` with these counts ``[E]``; ids in a token repeat only for counts over R*S."""
    routes = np.repeat(np.arange(layout.E), counts)
    return np.ascontiguousarray(routes.reshape(layout.K, -1).T).reshape(layout.R, layout.S, layout.K)


def _even(rows: int, parts: int) -> list[int]:
    """``rows`` in ``parts`` shares that differ by at most one, the larger ones first."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def _singles(rows: int, parts: int) -> list[int]:
    """``rows`` in as many shares as can be, one row in each but the first: the most padding."""
    used = min(rows, parts)
    return [rows - used + 1] * (used > 0) + [1] * (used - 1) + [0] * (parts - used)


def _one(rows: int, parts: int) -> list[int]:
    """All ``rows`` in the first share."""
    return [rows] + [0] * (parts - 1)


def _two(rows: int, parts: int) -> list[int]:
    """``rows`` in the first two shares, the second larger by at most one, so that they take turns in giving."""
    return [rows] if parts == 1 else [rows // 2, rows - rows // 2] + [0] * (parts - 2)


def _loads(layout: Layout, balances: Sequence[int], spread: Spread = _even) -> Ints:
    """Counts ``[E]`` for the balances of the first ranks, the others have none; ``spread`` is inside a rank."""
    padded = [*balances, *[0] * (layout.R - len(balances))]
    return np.array([spread(layout.capacity + b, layout.experts_per_rank) for b in padded]).ravel()


def _receipt(layout: Layout, remote: list[int], others: Spread = _one) -> Ints:
    """Counts ``[E]`` with which rank 1 gets ``remote`` rows of experts of rank 0: see Construction.

    Args:
        remote: rows of each expert, obeying Exhaustion; empty if nothing is to move.
        others: how the ranks that fill rank 0 afterwards spread their rows. By default they have one expert only,
            so that no other rank needs more than one remote expert.
    """
    C, R, P = layout.capacity, layout.R, layout.experts_per_rank
    if not remote:
        return _loads(layout, [0] * R, _singles)
    quota, number = sum(remote), len(remote)
    surplus = -(-quota // (R - 1))
    rest = C + surplus - quota + remote[-1]
    first = max(remote[-1], -(-rest // (P - number + 1)))
    donor = [*remote[:-1], first, *(_even(rest - first, P - number) if number < P else [])]
    shares = _even(quota - surplus, R - 2) if R > 2 else []
    ranks = [donor, _singles(C - quota, P), *[others(C + share, P) for share in shares]]
    return np.array(ranks).ravel()


# --- what a receiver can hold ---


def _leftover(layout: Layout, quota: Ints) -> Ints:
    """The least rows that a donor keeps after it filled ``quota``."""
    return layout.capacity - quota - (-quota // (layout.R - 1))


def _floor(layout: Layout, quota: Ints, number: int) -> Ints:
    """The least rows of all but the last of ``number`` >= 2 remote experts, if the last has one row."""
    return -(-(_leftover(layout, quota) + 1) // (layout.experts_per_rank - number + 1))


def _spare_rows(layout: Layout, quota: Ints, number: int) -> Ints:
    """Rows of ``quota`` that ``number`` remote experts leave free to choose; negative where impossible."""
    if number == 1:
        return quota - 1
    return quota - 1 - (number - 1) * _floor(layout, quota, number)


def _remote_rows(layout: Layout, quota: int, number: int) -> list[int]:
    """``quota`` rows in ``number`` remote experts, with the most blocks of ``pad`` rows."""
    if number <= 1:
        return [quota] * number
    floor = int(_floor(layout, np.array(quota), number))
    step = -(-floor // layout.pad) * layout.pad + 1 - floor
    spare = int(_spare_rows(layout, np.array(quota), number))
    raised = min(number - 1, spare // step)
    return [
        floor + step * (raised > 0) + spare - raised * step,
        *[floor + step] * (raised - 1),
        *[floor] * (number - 1 - max(raised, 1)),
        1,
    ]


def _own_blocks(layout: Layout, rows: Ints) -> Ints:
    """The most blocks that ``rows`` rows of own experts can fill."""
    groups = np.minimum(rows, layout.experts_per_rank)
    return groups + (rows - groups) // layout.pad


def _remote_blocks(layout: Layout, quota: Ints, number: int) -> Ints:
    """The most blocks that ``quota`` >= 1 rows of ``number`` remote experts fill; very negative if impossible."""
    if number == 1:
        return -(-quota // layout.pad)
    floor = _floor(layout, quota, number)
    blocks = -(-floor // layout.pad)
    step = blocks * layout.pad + 1 - floor
    spare = _spare_rows(layout, quota, number)
    raised = np.minimum(number - 1, spare // step)
    more = np.where(raised == number - 1, (spare - raised * step) // layout.pad, 0)
    return np.where(spare >= 0, 1 + (number - 1) * blocks + raised + more, -(2**40))


def _best_receipt(layout: Layout) -> tuple[int, int, int]:
    """(blocks, quota, remote experts) of the fullest rank."""
    best = (int(_own_blocks(layout, np.array(layout.capacity))), 0, 0)
    if layout.R == 1:
        return best
    quota = np.arange(1, layout.capacity + 1)
    own = _own_blocks(layout, layout.capacity - quota)
    for number in range(1, layout.experts_per_rank + 1):
        blocks = own + _remote_blocks(layout, quota, number)
        if blocks.max() > best[0]:
            best = (int(blocks.max()), int(quota[blocks.argmax()]), number)
    return best


# --- padding of all ranks ---


def _padding(counts: Ints, layout: Layout) -> int:
    """Padding rows over all ranks; a (rank, expert) with rows is one group in both generations."""
    alloc = allocate(counts, rank_quotas(counts, layout), layout)
    return int((-alloc % layout.pad).sum())


def _padding_bound(layout: Layout) -> int:
    """See ``worst_padding``: E + R - 1 groups, spread over the ranks as well as the limits of one rank allow."""
    C, R, P = layout.capacity, layout.R, layout.experts_per_rank
    remote = max((m for m in range(1, P + 1) if R > 1 and _spare_rows(layout, np.array(C), m) >= 0), default=0)
    groups = np.arange(1, min(C, P + remote) + 1)
    blocks = np.minimum(groups + (C - groups) // layout.pad, largest_end(layout) // layout.pad)
    total = np.full(layout.E + R, -(2**40))  # the most blocks of the ranks so far, by the number of groups used
    total[groups[:P]] = blocks[:P]
    for _ in range(R - 1):
        spread = np.full_like(total, -(2**40))
        for group, block in zip(groups, blocks, strict=True):
            spread[group:] = np.maximum(spread[group:], total[:-group] + block)
        total = spread
    return int(total.max()) * layout.pad - R * C


def _constructed(layout: Layout) -> Iterator[Ints]:
    """Counts ``[E]`` that are good candidates: see ``worst_padding``."""
    C, R, P = layout.capacity, layout.R, layout.experts_per_rank
    yield _loads(layout, [0] * R, _singles)
    yield _loads(layout, [R - 1] + [-1] * (R - 1), _singles)
    for width in {*range(2, min(R, WIDTHS_TRIED) + 1), R} - {1}:
        part = replace(layout, R=width, E=width * P)
        idle = _loads(layout, [0] * R, _singles)[: (R % width) * P]
        for number in range(1, P + 1):
            quota = np.arange(1, C + 1)
            quota = quota[_spare_rows(part, quota, number) >= 0]
            for q in quota[:: max(1, len(quota) // QUOTAS_TRIED)]:
                counts = _receipt(part, _remote_rows(part, int(q), number), _singles)
                yield np.concatenate([np.tile(counts, R // width), idle])


def _num_vectors(layout: Layout) -> int:
    """An upper bound of the number of vectors of ``_all_counts``, cheap to find."""
    return comb(layout.R * layout.capacity + layout.E - 1, layout.E - 1)


def _all_counts(layout: Layout) -> Iterator[Ints]:
    """All counts ``[E]`` that fall inside a rank: the order of its experts changes no group's size."""
    P = layout.experts_per_rank
    for loads in _compositions(layout.R * layout.capacity, layout.R):
        for ranks in product(*(list(_partitions(load, P, load)) for load in loads)):
            yield np.array(ranks, np.int64).ravel()


def _compositions(rows: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (rows,)
        return
    for first in range(rows + 1):
        for rest in _compositions(rows - first, parts - 1):
            yield (first, *rest)


def _partitions(rows: int, parts: int, largest: int) -> Iterator[tuple[int, ...]]:
    if parts == 0:
        if rows == 0:
            yield ()
        return
    for first in range(min(rows, largest), -1, -1):
        for rest in _partitions(rows - first, parts - 1, first):
            yield (first, *rest)
