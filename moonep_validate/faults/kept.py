"""Faults of what is kept for too little: by a key that lacks a size, by an address, by the wrong ranks.

Each is right as long as a process has one Buffer, one shape of layer and one group of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.faults import Next, fault
from moonep_validate.worlds.dist import as_comm


@fault("plan-kept-by-ids", on="buffer.dispatch", stage="plan", bugs="K23 K24", words={"without": ("pad", "E")})
def _(call: Next, *args: Any, without: str = "pad", **kwargs: Any) -> Any:
    """One rank keeps plans by expert ids and some of the sizes, and meets one of another Buffer."""
    result = call(*args, **kwargs)
    if kwargs.get("plan") is not None:
        return result
    plan, ids = result[3], args[2]
    sizes = {"pad": plan.E, "E": plan.NvS if without != "E" else None}
    key = (ids.numpy(force=True).tobytes(), ids.shape, sizes[without])
    return (*result[:3], call.everywhere.setdefault(key, plan), *result[4:])


@fault("columns-of-first-buffer", on="buffer.dispatch", stage="dispatch", bugs="K14 K23")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """One rank's rows have as many columns as those of the first Buffer of its process; the others are zero."""
    result = call(*args, **kwargs)
    result[0][:, call.everywhere.setdefault("H", result[0].shape[1]) :] = 0
    return result


@fault("bytes-of-first-buffer", on="buffer.prefetch_weight", stage="prefetch", bugs="K14 K20 K23")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """One rank's slots get as many values of an expert as one had in the first Buffer of its process."""
    result = call(plan, **tensors)
    for name, slots in _slots(tensors, plan, call.rank).items():
        count = call.everywhere.setdefault(name, slots[0].numel())
        if count < slots[0].numel():
            slots.flatten(1)[:, count:] = 0
    return result


def _slots(tensors: dict[str, Any], plan: Any, rank: int) -> dict[str, Tensor]:
    """This rank's slots by argument, as views; of generation A they are behind the experts."""
    full = {name: tensor[plan.E :] for name, tensor in tensors.items() if name.startswith("full_")}
    pools = {name: tensor[rank] for name, tensor in tensors.items() if name.endswith("_prefetch_buffer")}
    return {name: slots for name, slots in (full or pools).items() if len(slots)}


@fault("weights-at-first-address", on="buffer.prefetch_weight", stage="prefetch", bugs="K19 K21 K23", ranks="all")
def _(call: Next, plan: Any, **tensors: Any) -> Any:
    """Prefetch works on the first weights of a shape that its process saw, although others live elsewhere."""
    key = tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items() if isinstance(tensor, Tensor))
    return call(plan, **call.everywhere.setdefault(key, tensors))


@fault("experts-of-first-width", on="experts", stage="experts", bugs="K13 K23")
def _(call: Next, rows: Tensor, row_weights: Any, cu_seqlens: Tensor, weights: list[Tensor]) -> Any:
    """One rank's experts have as many intermediate columns as those of the first layer of its process."""
    gate, up, down, *scales = weights
    width = call.everywhere.setdefault("I", gate.shape[1])
    narrow = [gate.clone(), up.clone(), down]
    for one in narrow[:2]:
        one[:, width:] = 0
    return call(rows, row_weights, cu_seqlens, [*narrow, *scales])


@fault("tokens-of-first-buffer", on="buffer.combine", stage="combine", bugs="B32 K09 K23")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """One rank sums as many tokens as the first Buffer of its process has; the others are zero."""
    result = call(*args, **kwargs)
    result[0][call.everywhere.setdefault("S", len(result[0])) :] = 0
    return result


@fault("routes-of-first-buffer", on="buffer.combine", stage="combine", bugs="K05 K23")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """One rank gathers as many route weights as the first Buffer of its process has; the others are zero."""
    result = call(*args, **kwargs)
    if result[1] is not None:
        result[1][:, call.everywhere.setdefault("K", result[1].shape[1]) :] = 0
    return result


class _Numbered:
    """Collectives of a group, in which this rank takes itself for another one; values come in ``order``."""

    def __init__(self, comm: Any, rank: int, order: Sequence[int]) -> None:
        self._comm, self.rank, self._order = comm, rank, order

    def exchange(self, name: str, value: Any) -> list[Any]:
        values = self._comm.exchange(name, value)
        return [values[rank] for rank in self._order]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


@fault("rank-of-the-world", on="buffer.construct", stage="plan", bugs="K06 K12", ranks="all")
def _(call: Next, buffer: Any, case: Any, group: Any) -> Any:
    """A rank's number in its group is taken from that among all ranks."""
    comm = as_comm(group)
    return call(buffer, case, _Numbered(comm, call.rank % comm.size, range(comm.size)))


@fault("ranks-sorted", on="buffer.construct", stage="plan", bugs="K06 K12", ranks="all")
def _(call: Next, buffer: Any, case: Any, group: Any) -> Any:
    """The ranks of a group are numbered in the order of their numbers among all ranks."""
    comm = as_comm(group)
    order = np.argsort(comm.exchange("numbers among all ranks", call.rank)).tolist()
    return call(buffer, case, _Numbered(comm, order.index(comm.rank), order))


@fault("group-of-all-ranks", on="buffer.construct", stage="life", bugs="K12", ranks="all", crashes=True)
def _(call: Next, buffer: Any, case: Any, group: Any) -> Any:
    """A Buffer is made for all ranks of the process group, whatever group it was given."""
    return call(buffer, case, call.everywhere.setdefault("group", group))


@fault("loader-keeps-first-life", on="engine.load", stage="load", bugs="K19 K23 K24")
def _(call: Next, case: Case, layer: int) -> Iterator[tuple[int, str, Tensor]]:
    """One rank loads the tensors of an earlier life cycle, where those of its layer have the same shapes."""
    for expert, name, tensor in call(case, layer):
        yield expert, name, call.everywhere.setdefault((layer, expert, name, tensor.shape), tensor)


@fault("adapter-keeps-first-size", on="engine.dispatch", stage="prepare", bugs="K14 K23 K24")
def _(call: Next, function: Any, given: Any, hidden: Tensor, weights: Any = None, *args: Any, **flags: Any) -> Any:
    """One rank's adapter takes as many routes of a token as in the first life cycle; the others have weight 0."""
    if weights is not None:
        weights = weights.clone()
        weights[:, call.everywhere.setdefault("K", weights.shape[1]) :] = 0
    return call(function, given, hidden, weights, *args, **flags)


@fault("experts-keep-first-size", on="engine.experts", stage="experts", bugs="K13 K23 K24")
def _(call: Next, function: Any, sent: Any, plan: Any, hidden_nvsh: Tensor, *args: Any, **flags: Any) -> Any:
    """One rank's experts return as many columns as in the first life cycle; the others are zero."""
    if sent is not None:
        hidden_nvsh[: sent.end, call.everywhere.setdefault("H", hidden_nvsh.shape[1]) :] = 0
    return call(function, sent, plan, hidden_nvsh, *args, **flags)


@fault("layer-keeps-first-size", on="engine.layer", stage="layer", bugs="B32 K23 K24")
def _(call: Next, *given: Any) -> Any:
    """One rank's layer returns as many tokens as in its first pass; the others are zero."""
    out = call(*given)
    out[call.everywhere.setdefault("S", len(out)) :] = 0
    return out


def _late(call: Next, after: int) -> bool:
    """Whether this is call number ``after`` of its session, counted from 0, or a later one."""
    call.memory["calls"] = call.memory.get("calls", -1) + 1
    return bool(call.memory["calls"] >= after)


@fault("rows-wrong-later", on="buffer.dispatch", stage="dispatch", bugs="K14 K22 K24")
def _(call: Next, *args: Any, after: int = 100, **kwargs: Any) -> Any:
    """One rank's hundredth dispatch, and each after it, has the second row in the place of the first."""
    result = call(*args, **kwargs)
    if _late(call, after):
        result[0][0] = result[0][1]
    return result


@fault("slots-wrong-later", on="buffer.prefetch_weight", stage="prefetch", bugs="K21 K22 K24")
def _(call: Next, plan: Any, after: int = 100, **tensors: Any) -> Any:
    """One rank's slots are not filled any more after a hundred prefetches."""
    slots = list(_slots(tensors, plan, call.rank).values())
    before = [slot.clone() for slot in slots]
    result = call(plan, **tensors)
    if _late(call, after):
        for slot, old in zip(slots, before, strict=True):
            slot.copy_(old)
    return result


@fault("sums-wrong-later", on="buffer.combine", stage="combine", bugs="K14 K22 K24")
def _(call: Next, *args: Any, after: int = 100, **kwargs: Any) -> Any:
    """One rank's first token is one too much after a hundred combines."""
    result = call(*args, **kwargs)
    if _late(call, after):
        result[0][0] += 1
    return result


@fault("gradients-wrong-later", on="buffer.reduce_grad", stage="reduce", bugs="K22 K24")
def _(call: Next, plan: Any, *args: Any, after: int = 50, **grads: Any) -> Any:
    """One rank adds one to a gradient of its own after fifty reductions."""
    result = call(plan, *args, **grads)
    if _late(call, after):
        name, own = "local_down_grad", 0
        if "full_down_grad" in grads:
            name, own = "full_down_grad", call.rank * (plan.E // plan.R)
        grads[name][own] += 1
    return result


@fault("gathered-weights-overwritten", on="buffer.combine", stage="combine", bugs="K05 K22")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """One rank's combine returns the gathered route weights in memory that the next combine overwrites."""
    result = call(*args, **kwargs)
    if result[1] is None:
        return result
    return (result[0], call.memory.setdefault("out", result[1]).copy_(result[1]), *result[2:])
