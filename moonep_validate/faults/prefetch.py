"""Faults of the prefetch stage."""

from __future__ import annotations

from typing import Any

from moonep_validate.faults import Next, fault


@fault("slot-not-filled", on="buffer.prefetch_weight", stage="prefetch", bugs="B23 K21")
def _(call: Next, plan: Any, *, rank: int = 1, **tensors: Any) -> Any:
    """The slots of one rank keep what they held before."""
    pools = {name: tensor for name, tensor in tensors.items() if name.endswith("_prefetch_buffer")}
    before = {name: pool[call.rank].clone() for name, pool in pools.items()}
    result = call(plan, **tensors)
    if call.rank == rank:
        for name, pool in pools.items():
            pool[rank] = before[name]
    return result
