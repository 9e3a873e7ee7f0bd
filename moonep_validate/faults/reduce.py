"""Faults of the gradient reduction."""

from __future__ import annotations

from typing import Any

from moonep_validate.faults import Next, fault


@fault("slot-gradient-dropped", on="buffer.reduce_grad", stage="reduce", bugs="K03")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """The gate gradients of one rank's slots are not sent."""
    tensors["gate_reduce_buffer"][call.rank] = 0
    return call(plan, **tensors)


@fault("slot-gradient-twice", on="buffer.reduce_grad", stage="reduce", bugs="B08 K03")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """The up gradients of one rank's slots are added twice."""
    tensors["up_reduce_buffer"][call.rank] *= 2
    return call(plan, **tensors)


@fault("slot-gradient-rounded", on="buffer.reduce_grad", stage="reduce", bugs="K03")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """The down gradients of one rank's slots travel as bf16."""
    slots = tensors["down_reduce_buffer"][call.rank]
    slots.copy_(slots.bfloat16())
    return call(plan, **tensors)


@fault("owner-gradient-rounded", on="buffer.reduce_grad", stage="reduce", bugs="K03")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """The sums of one owner's up gradients are rounded to bf16."""
    result = call(plan, **tensors)
    name = next(name for name in tensors if name.endswith("up_grad"))
    tensors[name].copy_(tensors[name].bfloat16())
    return result


@fault("slot-gradient-not-cleared", on="buffer.reduce_grad", stage="reduce", bugs="B40 K11")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """Consumed slots keep their gradients for the next step."""
    before = tensors["down_reduce_buffer"][call.rank].clone()
    result = call(plan, **tensors)
    tensors["down_reduce_buffer"][call.rank] = before
    return result


@fault("unused-slot-cleared", on="buffer.reduce_grad", stage="reduce", bugs="K23")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """All slots are cleared, used or not."""
    result = call(plan, **tensors)
    tensors["gate_reduce_buffer"][call.rank] = 0
    return result
