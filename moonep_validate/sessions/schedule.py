"""In which order may batches that are in flight at a time be launched? Any order that the contract allows.

A schedule is a list of (operation, batch). A batch is dispatched, prefetched, computed and combined in this order.
Between batches of one Buffer:

* slots belong to one batch from its prefetch to its experts;
* a collective (dispatch or combine) comes between the experts of one batch and the prefetch of the next, since a
  peer may push weights before this rank is done (W4);
* a zero-copy batch has the rows of its Buffer for itself from dispatch to combine (A1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moonep_validate.hashing import below, hashed

OPS = ("dispatch", "prefetch", "experts", "combine")


@dataclass(frozen=True)
class Launch:
    """How a batch is launched.

    Attributes:
        buffer: on which of the Buffers.
        zero_copy, asynchronous: flags of its calls.
    """

    buffer: int
    zero_copy: bool
    asynchronous: bool


def launches(count: int, buffers: int, seed: int) -> list[Launch]:
    """How each batch is launched, as the seed says."""
    bits = hashed("flights", seed, torch.arange(count)[:, None], torch.arange(3))
    on = below(bits[:, 0], buffers).tolist()
    flags = (bits[:, 1:] >> 7 & 1).bool().tolist()
    return [Launch(buffer, *flag) for buffer, flag in zip(on, flags, strict=True)]


def interleaving(batches: Sequence[Launch], seed: int) -> list[tuple[str, int]]:
    """A legal order, the same for the same seed; every rank launches in it."""
    done = [0] * len(batches)
    order: list[tuple[str, int]] = []
    while any(count < len(OPS) for count in done):
        legal = [b for b in range(len(batches)) if done[b] < len(OPS) and _may(batches, order, done, b)]
        chosen = legal[int(below(hashed("schedule", seed, len(order)), len(legal)))]
        order.append((OPS[done[chosen]], chosen))
        done[chosen] += 1
    return order


def _may(batches: Sequence[Launch], order: Sequence[tuple[str, int]], done: Sequence[int], batch: int) -> bool:
    """Whether the next operation of a batch may be launched now."""
    op, launch = OPS[done[batch]], batches[batch]
    beside = [b for b, other in enumerate(batches) if other.buffer == launch.buffer and b != batch]
    in_flight = [b for b in beside if 0 < done[b] < len(OPS)]
    if op == "dispatch":
        return not any(launch.zero_copy or batches[b].zero_copy for b in in_flight)
    if op == "prefetch":
        if any(done[b] == OPS.index("experts") for b in in_flight):  # its slots are filled and not yet read
            return False
        last = [step for step, b in reversed(order) if (b == batch or b in beside) and step != "prefetch"]
        return last[0] != "experts"
    return True
