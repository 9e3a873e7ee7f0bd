"""Faults of order: a fence, a wait or a lease that is not respected; most show only where ranks run at odds."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moonep_validate.faults import Next, fault


def _without(name: str, stage: str, summary: str, needs_gpu: bool = False) -> None:
    """Register a fault that leaves out one named fence on every rank."""

    def function(call: Next, fence: str, memory: Tensor) -> None:
        if fence != name:
            call(fence, memory)

    function.__doc__ = summary
    id = f"no-{name.replace(' ', '-')}-fence"
    fault(id, on="comm.fence", stage=stage, bugs="K22", ranks="all", needs_gpu=needs_gpu)(function)


_without("dispatch exit", "dispatch", "Rows are used before every rank has written them.")
_without("prefetch exit", "prefetch", "Generation B: slots are used before every owner has pushed.")
_without("combine prologue", "combine", "Sums are read before every rank has made its own.")
_without("combine exit", "combine", "A rank goes on while others still read its rows; on a GPU.", needs_gpu=True)


@fault("event-not-waited", on="event.wait", stage="dispatch", bugs="K22", needs_gpu=True, ranks="all")
def _(call: Next, event: Any) -> None:
    """The result of an asynchronous call is used without waiting for it; on a GPU."""


@fault("slots-reused-early", on="schedule", stage="experts", bugs="K21 K22", ranks="all")
def _(call: Next, travels: Any, *args: Any) -> list[tuple[str, int]]:
    """The slots of a batch are filled for the next one before its experts have run."""
    order: list[tuple[str, int]] = call(travels, *args)
    for place, (op, batch) in enumerate(order):
        if op == "prefetch":
            mine = [b for b, launch in enumerate(travels) if launch.buffer == travels[batch].buffer and b != batch]
            ready = order.index(("dispatch", batch))
            early = [at for at in range(ready + 1, place) if order[at][0] == "experts" and order[at][1] in mine]
            if early:
                order.insert(early[-1], order.pop(place))
                return order
    return order


@fault("view-used-after-dispatch", on="schedule", stage="experts", bugs="K22", ranks="all")
def _(call: Next, travels: Any, *args: Any) -> list[tuple[str, int]]:
    """The next batch of a Buffer is dispatched while a zero-copy view of it is still to be computed."""
    order: list[tuple[str, int]] = call(travels, *args)
    for place, (op, batch) in enumerate(order):
        if op == "dispatch":
            views = [b for b, f in enumerate(travels) if f.buffer == travels[batch].buffer and f.zero_copy]
            early = [at for at in range(place) if order[at][0] == "experts" and order[at][1] in views]
            if early:
                order.insert(early[-1], order.pop(place))
                return order
    return order
