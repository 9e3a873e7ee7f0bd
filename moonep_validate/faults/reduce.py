"""Faults of the gradient reduction."""

from __future__ import annotations

from typing import Any

from moonep_validate.faults import Next, fault


@fault("slot-gradient-dropped", on="buffer.reduce_grad", stage="reduce", bugs="K03")
def _(call: Next, plan: Any, *, rank: int = 1, **tensors: Any) -> Any:
    """The gate gradients of one rank's slots are not sent."""
    if call.rank == rank:
        tensors["gate_reduce_buffer"][rank] = 0
    return call(plan, **tensors)


@fault("slot-gradient-twice", on="buffer.reduce_grad", stage="reduce", bugs="B08 K03")
def _(call: Next, plan: Any, *, rank: int = 1, **tensors: Any) -> Any:
    """The up gradients of one rank's slots are added twice."""
    if call.rank == rank:
        tensors["up_reduce_buffer"][rank] *= 2
    return call(plan, **tensors)


@fault("slot-gradient-not-cleared", on="buffer.reduce_grad", stage="reduce", bugs="B40 K11")
def _(call: Next, plan: Any, *, rank: int = 1, **tensors: Any) -> Any:
    """Consumed slots keep their gradients for the next step."""
    before = tensors["down_reduce_buffer"][call.rank].clone()
    result = call(plan, **tensors)
    if call.rank == rank:
        tensors["down_reduce_buffer"][rank] = before
    return result


@fault("unused-slot-cleared", on="buffer.reduce_grad", stage="reduce", bugs="K23")
def _(call: Next, plan: Any, *, rank: int = 1, **tensors: Any) -> Any:
    """All slots are cleared, used or not."""
    result = call(plan, **tensors)
    if call.rank == rank:
        tensors["gate_reduce_buffer"][rank] = 0
    return result
