"""Which rows go where? Index lists of one rank, derived from a plan's tensors alone, as a replay has to do it.

Nothing in here knows a Buffer: the lists say what to put into and to get from the memory of each rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Index lists of one peer: places here, rows there.
Pairs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Moves:
    """int64 index tensors on the Buffer's device; a list has one entry per rank.

    Attributes:
        sends: tokens of mine, and the rows of that rank which they go to (primaries only).
        weights: routes of mine, and their rows, duplicates too.
        zero: my rows that are padding.
        copies: of my rows, primaries and the duplicates that get the same.
        heads: my rows that have duplicates here.
        sums: for each place in the dedup lists: places among the heads, and the duplicates to add to them then.
        reads: places among my primaries, and their rows, for combine.
        order: for each k: tokens, and the place of their primary with this k.
        num_primaries: how many.
        pushes: slots of that rank, and my experts (from 0) which they get.
        pulls: my slots, and the experts (of all) that they hold.
    """

    sends: list[Pairs]
    weights: list[Pairs]
    zero: Tensor
    copies: Pairs
    heads: Tensor
    sums: list[Pairs]
    reads: list[Pairs]
    order: list[Pairs]
    num_primaries: int
    pushes: list[Pairs]
    pulls: Pairs


def moves_of(plan: Any, rank: int, device: torch.device) -> Moves:
    """The moves of a plan, kept on it until one of its tensors changes: each call of a pass asks for them."""
    tensors = [value for value in vars(plan).values() if isinstance(value, Tensor)]
    if any(tensor.is_inference() for tensor in tensors):  # these do not count their changes
        return _derive(plan, rank, device)
    # A copy of a plan brings the moves along, and may have other tensors, as engines give them to prefetch (W6).
    state = [(id(tensor), tensor._version) for tensor in tensors]
    kept = vars(plan).get("_moves")
    if kept and kept[0] == state:
        moves: Moves = kept[2]
        return moves
    moves = _derive(plan, rank, device)
    object.__setattr__(plan, "_moves", (state, tensors, moves))  # the tensors too: no other gets the id of one
    return moves


def _derive(plan: Any, rank: int, device: torch.device) -> Moves:
    dst = plan.dst.cpu().long()
    primary = torch.nonzero(dst >= 0)[:, 0]
    raw = torch.where(dst < 0, -dst - 1, dst)
    owner, row = raw // plan.NvS, raw % plan.NvS
    everywhere = [torch.nonzero(owner == peer)[:, 0] for peer in range(plan.R)]
    places = [torch.nonzero(owner[primary] == peer)[:, 0] for peer in range(plan.R)]
    of_k = [torch.nonzero(primary % plan.K == k)[:, 0] for k in range(plan.K)]

    def on(*pair: Tensor) -> Pairs:
        first, second = pair
        return first.to(device), second.to(device)

    return Moves(
        sends=[on(primary[place] // plan.K, row[primary[place]]) for place in places],
        weights=[on(route, row[route]) for route in everywhere],
        zero=rows_of(plan.zero_fill_ranges).to(device),
        copies=on(*_copies(plan)),
        heads=_groups(plan)[0].to(device),
        sums=[on(*pair) for pair in _sums(plan)],
        reads=[on(place, row[primary[place]]) for place in places],
        order=[on(primary[place] // plan.K, place) for place in of_k],
        num_primaries=len(primary),
        pushes=[on(*pair) for pair in _pushes(plan, rank)],
        pulls=on(*_pulls(plan, rank)),
    )


def rows_of(ranges: Tensor) -> Tensor:
    """Rows of ``[first, count]`` ranges, in order: int64, on the host."""
    first, count = ranges.cpu().long().unbind(dim=1)
    begin = (count.cumsum(0) - count).repeat_interleave(count)
    return first.repeat_interleave(count) + torch.arange(len(begin)) - begin


def _groups(plan: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The valid dedup lists: primary rows, first place and number of their duplicates, duplicates' rows."""
    counts = plan.dup_counts.tolist()
    primary, first, count = plan.dup_groups[: counts[0]].cpu().long().unbind(dim=1)
    return primary, first, count, plan.dup_loffs.cpu().long()


def _copies(plan: Any) -> Pairs:
    primary, _, count, rows = _groups(plan)
    return primary.repeat_interleave(count), rows[: int(plan.dup_counts[1])]


def _sums(plan: Any) -> list[Pairs]:
    _, first, count, rows = _groups(plan)
    places = range(int(count.max()) if len(count) else 0)
    return [(torch.nonzero(count > place)[:, 0], rows[first[count > place] + place]) for place in places]


def _pushes(plan: Any, rank: int) -> list[Pairs]:
    copies = plan.experts_to_copy.cpu().long()
    per_rank = plan.E // plan.R
    mine = (copies >= 0) & (copies // per_rank == rank)
    return [
        (torch.nonzero(mine[peer])[:, 0], copies[peer][mine[peer]] - rank * per_rank) for peer in range(plan.R)
    ]


def _pulls(plan: Any, rank: int) -> Pairs:
    copies = plan.experts_to_copy[rank].cpu().long()
    used = torch.nonzero(copies >= 0)[:, 0]
    return used, copies[used]
