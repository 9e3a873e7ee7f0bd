"""The planning algorithm as literally as it can be written: loops over routes, experts, ranks and rows.

It is the oracle of the oracle: slow, obvious, and sharing nothing with the vectorised planner but the sizes.
"""

from __future__ import annotations

from typing import Any

from moonep_validate.cases.layout import Layout


def naive_plan(topk: Any, layout: Layout) -> dict[str, Any]:
    """Plan ``topk`` [rank][token][k]; returns nested lists named like the fields of ``Plan``."""
    R, E, K, S, pad = layout.R, layout.E, layout.K, layout.S, layout.pad
    per_rank = E // R
    slots = per_rank if layout.slots is None else layout.slots
    routes = [[int(e) for token in topk[r] for e in token] for r in range(R)]
    rows_before_padding = S * K + (pad - 1) * 2 * per_rank
    nvs = rows_before_padding
    while layout.generation == "B" and nvs % pad:
        nvs += 1

    total = [0] * E
    for r in range(R):
        for e in routes[r]:
            total[e] += 1
    quotas = _quotas(total, R, per_rank, S * K)
    alloc = _alloc(total, quotas, R, per_rank)

    copies, remote_stats = _slots(alloc, layout, slots)
    start: list[list[int]] = []
    cu_seqlens, zero_fill = [], []
    for d in range(R):
        home = list(range(E)) if layout.generation == "A" else list(range(d * per_rank, (d + 1) * per_rank))
        groups = [(-1 if e in copies[d] else e) for e in home] + copies[d]
        counts = [alloc[e][d] if e >= 0 else 0 for e in groups]
        begins, ends, zeros = _groups(counts, pad)
        start.append([0] * E)
        for e, count, begin in zip(groups, counts, begins, strict=True):
            if count:
                start[d][e] = begin
        cu_seqlens.append(ends)
        zero_fill.append(zeros)

    dst = _destinations(routes, alloc, start, nvs, K)
    return {
        "num_rows": nvs,
        "quotas": quotas,
        "alloc": alloc,
        "experts_to_copy": copies,
        "cu_seqlens": cu_seqlens,
        "zero_fill_ranges": zero_fill,
        "remote_stats": remote_stats,
        "dst": dst,
    }


def _slots(alloc: list[list[int]], layout: Layout, slots: int) -> tuple[list[list[int]], list[list[int]]]:
    R, per_rank = layout.R, layout.E // layout.R
    copies, remote_stats = [], [[0, 0] for _ in range(R)]
    for d in range(R):
        remote = [e for e in range(layout.E) if alloc[e][d] > 0 and e // per_rank != d]
        remote_stats[d][0] = len(remote)
        if layout.generation == "A":
            remote.sort(key=lambda e: (alloc[e][d], e), reverse=True)
        chosen = remote[:slots]
        for e in chosen:
            remote_stats[e // per_rank][1] += 1
        copies.append(chosen + [-1] * (slots - len(chosen)))
    return copies, remote_stats


def _groups(counts: list[int], pad: int) -> tuple[list[int], list[int], list[list[int]]]:
    begins, ends, zeros, end = [], [], [], 0
    for count in counts:
        begins.append(end)
        filled = end + count
        end = filled
        while count and (end - begins[-1]) % pad:
            end += 1
        ends.append(end)
        zeros.append([filled, end - filled] if end > filled else [0, 0])
    return begins, ends, zeros


def _quotas(total: list[int], R: int, per_rank: int, capacity: int) -> list[list[int]]:
    balance = [sum(total[h * per_rank : (h + 1) * per_rank]) - capacity for h in range(R)]
    quotas = [[0] * R for _ in range(R)]
    while True:
        donor = max(range(R), key=lambda h: (balance[h], -h))
        receiver = min(range(R), key=lambda u: (balance[u], u))
        if balance[donor] <= 0:
            return quotas
        quotas[donor][receiver] = -balance[receiver]
        balance[donor] += balance[receiver]
        balance[receiver] = 0


def _alloc(total: list[int], quotas: list[list[int]], R: int, per_rank: int) -> list[list[int]]:
    alloc = [[0] * R for _ in total]
    for e, count in enumerate(total):
        alloc[e][e // per_rank] = count
    for h in range(R):
        own = range(h * per_rank, (h + 1) * per_rank)
        left = {e: total[e] for e in own}
        quota = list(quotas[h])
        while max(quota) > 0:
            d = max(range(R), key=lambda r: (quota[r], -r))
            e = max(own, key=lambda x: (left[x], -x))
            moved = min(left[e], quota[d])
            alloc[e][d] += moved
            alloc[e][h] -= moved
            left[e] -= moved
            quota[d] -= moved
    return alloc


def _destinations(
    routes: list[list[int]], alloc: list[list[int]], start: list[list[int]], nvs: int, K: int
) -> list[list[int]]:
    taken = [0] * len(alloc)
    dst = []
    for entries in routes:
        line: list[int] = []
        for i, e in enumerate(entries):
            position = taken[e]
            taken[e] += 1
            d = 0
            while position >= alloc[e][d]:
                position -= alloc[e][d]
                d += 1
            raw = d * nvs + start[d][e] + position
            earlier = [-x - 1 if x < 0 else x for x in line[i - i % K :]]
            line.append(-raw - 1 if any(x // nvs == d for x in earlier) else raw)
        dst.append(line)
    return dst
