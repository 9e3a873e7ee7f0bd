"""How does one rank plan its own tokens, as a library would? (docs/contract.md, Planning)

The allocation (steps 2 and 3) is shared with the oracle, since it is one definition; everything a rank derives
from it for its own tokens is written again here, route by route from the rank's side, so that the judge does
not compare the oracle with itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from moonep_validate.cases.layout import Layout
from moonep_validate.judge.oracle.plan import allocate, rank_quotas
from moonep_validate.reference.used import USED


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
    USED["buffer"] += 1
    alloc, copies, start, ends, zero_fill = _shared(tuple(counts.sum(dim=0).tolist()), layout)
    raw = _destinations(topk_ids.flatten().long(), counts, alloc, start, rank, layout)
    remote = (alloc[:, rank] > 0) & (torch.arange(layout.E) // layout.experts_per_rank != rank)
    owned = copies[copies >= 0] // layout.experts_per_rank == rank
    return LocalPlan(
        dst=_encode(raw, layout).int(),
        raw=raw,
        cu_seqlens=ends[rank].int(),
        experts_to_copy=copies.int(),
        zero_fill_ranges=zero_fill[rank].int(),
        remote_stats=torch.stack([remote.sum(), owned.sum()]).int(),
    )


@lru_cache(maxsize=4)
def _shared(total: tuple[int, ...], layout: Layout) -> tuple[Tensor, ...]:
    """What every rank derives alike from the routes per expert: alloc, experts_to_copy, all ranks' layout.

    Ranks that are threads of one process derive it once.
    """
    counts = np.array(total)
    alloc = torch.from_numpy(allocate(counts, rank_quotas(counts, layout), layout))
    copies = torch.from_numpy(layout.slot_order(alloc.numpy()))
    groups = torch.from_numpy(layout.group_experts(copies.numpy()))
    return alloc, copies, *_lay_out(alloc, groups, copies, layout)


def _lay_out(alloc: Tensor, groups: Tensor, copies: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """All ranks: first row of each expert ``[E, R]``, cu_seqlens ``[R, G]``, zero_fill_ranges ``[R, G, 2]``."""
    ranks = torch.arange(layout.R)[:, None]
    rows = alloc.T[ranks, groups.clamp(min=0)] * (groups >= 0)
    home = groups[:, : layout.num_home_groups]
    in_slot = torch.zeros(layout.R, layout.E + 1, dtype=torch.bool).scatter_(1, copies % (layout.E + 1), True)
    rows[:, : layout.num_home_groups] *= ~in_slot.gather(1, home)  # its rows are in the slot's group
    padding = -rows % layout.pad
    ends = (rows + padding).cumsum(dim=1)
    begin = ends - rows - padding
    start = torch.zeros(layout.R, layout.E + 1, dtype=torch.int64)
    start.scatter_(1, torch.where(rows > 0, groups, layout.E), begin)
    zero_fill = torch.stack([(begin + rows) * (padding > 0), padding], dim=2)
    return start[:, : layout.E].T, ends, zero_fill


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
    position += counts[:rank].sum(dim=0)[routes]  # an expert's routes are counted rank after rank
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
