"""Faults of the prefetch stage; they see slots through both generations' arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moonep_validate.faults import Next, fault


def _slots(tensors: dict[str, Any], plan: Any, rank: int) -> dict[str, Tensor]:
    """This rank's slots by projection (``gate``, ``gate_scale``, ...), as views."""
    if "full_gate_weight" in tensors:
        named = {n[5:].replace("_weight", ""): t[plan.E :] for n, t in tensors.items() if n.startswith("full_")}
    else:
        named = {
            n[: -len("_prefetch_buffer")]: t[rank] for n, t in tensors.items() if n.endswith("_prefetch_buffer")
        }
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _used(plan: Any, rank: int) -> Tensor:
    used: Tensor = torch.nonzero(plan.experts_to_copy[rank] >= 0)[:, 0]
    return used


@fault("slot-not-filled", on="buffer.prefetch_weight", stage="prefetch", bugs="B23 K21")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """The slots of one rank keep what they held before."""
    slots = _slots(tensors, plan, call.rank)
    before = {name: slot.clone() for name, slot in slots.items()}
    result = call(plan, **tensors)
    for name, slot in slots.items():
        slot.copy_(before[name])
    return result


@fault("slot-of-first-prefetch", on="buffer.prefetch_weight", stage="prefetch", bugs="K21 K23")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """The slots of one rank are filled once and keep the first layer's experts."""
    result = call(plan, **tensors)
    for name, slot in _slots(tensors, plan, call.rank).items():
        first = call.memory.setdefault(name, slot.clone())
        slot[_used(plan, call.rank)] = first[_used(plan, call.rank)]
    return result


@fault("projection-not-moved", on="buffer.prefetch_weight", stage="prefetch", bugs="B22 K19 K21")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """The up projection stays behind."""
    up = _slots(tensors, plan, call.rank)["up"]
    before = up.clone()
    result = call(plan, **tensors)
    up.copy_(before)
    return result


@fault("scales-left-behind", on="buffer.prefetch_weight", stage="prefetch", bugs="K16 K21")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """Weights move, their scales do not."""
    scales = {name: slot for name, slot in _slots(tensors, plan, call.rank).items() if name.endswith("_scale")}
    before = {name: slot.clone() for name, slot in scales.items()}
    result = call(plan, **tensors)
    for name, slot in scales.items():
        slot.copy_(before[name])
    return result


@fault("gate-and-up-swapped", on="buffer.prefetch_weight", stage="prefetch", bugs="K17")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """The slots of one rank hold gate and up in each other's place."""
    result = call(plan, **tensors)
    slots = _slots(tensors, plan, call.rank)
    gate = slots["gate"].clone()
    slots["gate"].copy_(slots["up"])
    slots["up"].copy_(gate)
    return result


@fault("slots-in-other-order", on="buffer.prefetch_weight", stage="prefetch", bugs="K06 K21", ranks="all")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """The used slots of every rank are filled in reverse order."""
    result = call(plan, **tensors)
    used = _used(plan, call.rank)
    for slot in _slots(tensors, plan, call.rank).values():
        slot[used] = slot[used.flip(0)]
    return result


@fault("slot-row-shifted", on="buffer.prefetch_weight", stage="prefetch", bugs="K14 K16")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """The down projection arrives one row off, as with a wrong stride."""
    result = call(plan, **tensors)
    down = _slots(tensors, plan, call.rank)["down"]
    down[_used(plan, call.rank)] = down[_used(plan, call.rank)].roll(1, dims=1)
    return result


@fault("unused-slot-written", on="buffer.prefetch_weight", stage="prefetch", bugs="K14")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """One rank's last slot is written although the plan leaves it unused."""
    result = call(plan, **tensors)
    if plan.experts_to_copy[call.rank, -1] < 0:
        _slots(tensors, plan, call.rank)["gate"][-1] = 1
    return result


@fault("gap-written", on="buffer.prefetch_weight", stage="prefetch", bugs="K14 K20")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """One rank's slots are filled one byte too far, into the gap behind them (packed weights only)."""
    result = call(plan, **tensors)
    pool, last = tensors.get("gate_prefetch_buffer"), _slots(tensors, plan, call.rank)["gate"]
    end = last.storage_offset() + last.numel()
    gap = pool.stride(0) > pool[0].numel() if pool is not None else end < last.untyped_storage().nbytes()
    if gap and last.dtype == torch.uint8:
        last.as_strided((1,), (1,), end).fill_(0)
    return result


@fault("sources-of-first-load", on="buffer.prefetch_weight", stage="prefetch", bugs="K19 K21 K23", ranks="all")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """Every rank reads the tensors that it saw first, although others were loaded since."""
    mine = {name: tensor for name, tensor in tensors.items() if name.startswith(("full_", "local_"))}
    return call(plan, **tensors | call.memory.setdefault("sources", mine))


@fault("rotation-without-scales", on="weights.rows", stage="prefetch", bugs="K16 K21 K23")
def _(call: Next, rows: Tensor, what: str) -> Any:
    """One rank puts its own experts' weights first, and leaves the scales in the order of the ids."""
    stays = what.endswith("_scale")
    return torch.arange(rows.numel()).view(rows.shape) if stays else call(rows, what)


@fault("rotation-one-rank-too-far", on="weights.rows", stage="prefetch", bugs="B23 K06 K21")
def _(call: Next, rows: Tensor, what: str) -> Any:
    """One rank's prefetch reads each expert where the next rank's experts are."""
    far = what == "prefetch"
    return call(rows.roll(-1, dims=0) if far else rows, what)


@fault("owner-weight-changed", on="buffer.prefetch_weight", stage="prefetch", bugs="K25")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """The owner's own weight changes."""
    result = call(plan, **tensors)
    own = call.rank * (plan.E // plan.R) if "full_gate_weight" in tensors else 0
    name = "full_gate_weight" if "full_gate_weight" in tensors else "local_gate_weight"
    tensors[name][own, 0, 0] += 1
    return result


@fault("others-weight-changed", on="buffer.prefetch_weight", stage="prefetch", bugs="K25")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """Of generation A: the weight of an expert that another rank owns changes where one rank reads it."""
    result = call(plan, **tensors)
    if "full_gate_weight" in tensors:
        other = (call.rank + 1) % plan.R * (plan.E // plan.R)
        tensors["full_gate_weight"][other, 0, 0] += 1
    return result


@fault("empty-plan-refused", on="buffer.prefetch_weight", stage="prefetch", bugs="K11", crashes=True)
def _(call: Next, plan: Any, *args: Any, **kwargs: Any) -> Any:
    """One rank's prefetch raises where the plan has nothing to copy."""
    if not (plan.experts_to_copy >= 0).any():
        raise ValueError("nothing to prefetch")
    return call(plan, *args, **kwargs)
