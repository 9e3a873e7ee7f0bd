"""How does one rank plan its own tokens, as a library would? (docs/contract.md, Planning)

The allocation (steps 2 and 3) is shared with the oracle, since it is one definition; everything a rank derives
from it for its own tokens is written again here, route by route from the rank's side, so that the judge does
not compare the oracle with itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonep_validate.contract import Layout
from moonep_validate.oracle.plan import allocate, rank_quotas


@dataclass(frozen=True)
class LocalPlan:
    """One rank's share of the plan, int32 tensors; fields as in docs/contract.md, Plan fields."""

    dst: Tensor
    raw: Tensor
    cu_seqlens: Tensor
    experts_to_copy: Tensor
    zero_fill_ranges: Tensor
    remote_stats: Tensor


def plan_rank(topk_ids: Tensor, counts: Tensor, rank: int, layout: Layout) -> LocalPlan:
    """Plan the routes of one rank.

    Args:
        topk_ids: ``[S, K]`` of this rank.
        counts: ``[R, E]``, routes of every rank to every expert.
        rank: this rank.
        layout: the geometry.
    """
    total = counts.sum(dim=0).numpy()
    alloc = torch.from_numpy(allocate(total, rank_quotas(total, layout), layout))
    copies = torch.from_numpy(layout.slot_order(alloc.numpy()))
    groups = torch.from_numpy(layout.group_experts(copies.numpy()))
    start = torch.zeros(layout.E, layout.R, dtype=torch.int64)
    for d in range(layout.R):
        cu_seqlens, zero_fill, first_row = _lay_out_rank(
            alloc[:, d], groups[d].tolist(), copies[d].tolist(), layout
        )
        start[:, d] = first_row
        if d == rank:
            mine = cu_seqlens, zero_fill
    raw = _destinations(topk_ids.flatten().long(), counts, alloc, start, rank, layout)
    remote = (alloc[:, rank] > 0) & (torch.arange(layout.E) // layout.experts_per_rank != rank)
    owned = copies[copies >= 0] // layout.experts_per_rank == rank
    return LocalPlan(
        dst=_encode(raw, layout).int(),
        raw=raw,
        cu_seqlens=mine[0].int(),
        experts_to_copy=copies.int(),
        zero_fill_ranges=mine[1].int(),
        remote_stats=torch.stack([remote.sum(), owned.sum()]).int(),
    )


def _lay_out_rank(
    rows: Tensor, experts: Sequence[int], copies: Sequence[int], layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """(cu_seqlens, zero_fill_ranges, first row of each expert) of one rank."""
    cu_seqlens = torch.zeros(len(experts), dtype=torch.int64)
    zero_fill = torch.zeros(len(experts), 2, dtype=torch.int64)
    first_row = torch.zeros(layout.E, dtype=torch.int64)
    end = 0
    for group, expert in enumerate(experts):
        moved_to_slot = group < layout.num_home_groups and expert in copies
        count = 0 if expert < 0 or moved_to_slot else int(rows[expert])
        if count:
            first_row[expert] = end
            padding = -count % layout.pad
            if padding:
                zero_fill[group] = torch.tensor([end + count, padding])
            end += count + padding
        cu_seqlens[group] = end
    return cu_seqlens, zero_fill, first_row


def _destinations(
    routes: Tensor, counts: Tensor, alloc: Tensor, start: Tensor, rank: int, layout: Layout
) -> Tensor:
    """Raw destination of each route: position in the expert's global sequence, dealt to ranks in order."""
    order = routes.argsort(stable=True)
    earlier = torch.zeros(layout.E, dtype=torch.int64)
    mine = routes.bincount(minlength=layout.E)
    earlier[1:] = mine.cumsum(0)[:-1]
    position = torch.empty_like(routes)
    position[order] = torch.arange(len(routes)) - earlier[routes[order]]
    position += counts[:rank].sum(dim=0)[routes]
    ends = alloc.cumsum(dim=1)[routes]
    destination = (ends <= position[:, None]).sum(dim=1)
    before = ends.gather(1, destination[:, None])[:, 0] - alloc[routes, destination]
    return destination * layout.num_rows + start[routes, destination] + position - before


def _encode(raw: Tensor, layout: Layout) -> Tensor:
    """``-raw - 1`` for each route whose token already has a row on the same rank."""
    place = (raw // layout.num_rows).view(-1, layout.K)
    same = place[:, :, None] == place[:, None, :]
    duplicate = same.tril(diagonal=-1).any(dim=2).flatten()
    return torch.where(duplicate, -raw - 1, raw)
