"""Faults of the dispatch stage."""

from __future__ import annotations

from typing import Any

import torch

from moonep_validate.faults import Next, fault


def _pads(plan: Any) -> list[int]:
    return [row for first, count in plan.zero_fill_ranges.tolist() for row in range(first, first + count)]


def _duplicates(plan: Any) -> torch.Tensor:
    rows: torch.Tensor = plan.dup_loffs[: int(plan.dup_counts[1])].long()
    return rows


@fault("row-of-another-token", on="buffer.dispatch", stage="dispatch", bugs="B20 B24 K06")
def _(call: Next, *args: Any, row: int = 0, **kwargs: Any) -> Any:
    """One row of one rank holds the payload of the next row; its weight is right."""
    result = call(*args, **kwargs)
    rows = result[0]
    if row + 1 < len(rows):
        rows[row] = rows[row + 1]
    return result


@fault("payload-through-arithmetic", on="buffer.dispatch", stage="dispatch", bugs="K18")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """Rows pass through a float32 addition: NaN payloads and -0.0 are lost."""
    result = call(*args, **kwargs)
    end = None if result[2] is None else int(result[2][-1])  # what is undefined anyway stays as it is
    result[0][:end] = (result[0][:end].float() + 0.0).bfloat16()
    return result


@fault("route-weights-shifted", on="buffer.dispatch", stage="dispatch", bugs="K09")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """Each row of one rank has the route weight of the next."""
    result = call(*args, **kwargs)
    if result[1] is not None:
        result[1].copy_(result[1].roll(-1))
    return result


@fault("pads-not-zeroed", on="buffer.dispatch", stage="dispatch", bugs="B27 B28 K08")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """Padding rows keep old values."""
    result = call(*args, **kwargs)
    result[0][_pads(result[3])] = 3.0
    return result


@fault("pad-weights-not-zeroed", on="buffer.dispatch", stage="dispatch", bugs="B24 K08")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """Padding rows keep old route weights."""
    result = call(*args, **kwargs)
    if result[1] is not None:
        result[1][_pads(result[3])] = 0.5
    return result


@fault("duplicates-not-copied", on="buffer.dispatch", stage="dispatch", bugs="B36 K10")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """Duplicate rows of one rank stay empty."""
    result = call(*args, **kwargs)
    result[0][_duplicates(result[3])] = 0.0
    return result


@fault("dispatch-changes-input", on="buffer.dispatch", stage="dispatch", bugs="K25")
def _(call: Next, hidden: Any, *args: Any, **kwargs: Any) -> Any:
    """The tokens of one rank are overwritten."""
    result = call(hidden, *args, **kwargs)
    hidden[0, 0] += 1
    return result


@fault("replay-returns-copy", on="buffer.dispatch", stage="dispatch", bugs="K22")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """A replay returns another plan object than it was given."""
    result = call(*args, **kwargs)
    if kwargs.get("plan") is not None:
        return (*result[:3], result[3].clone(), *result[4:])
    return result


@fault("replay-of-latest-plan", on="buffer.dispatch", stage="dispatch", bugs="K24", ranks="all")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """A replay uses the plan of the latest fresh dispatch: the plan of another micro-batch."""
    given = kwargs.get("plan")
    if given is None:
        result = call(*args, **kwargs)
        call.memory["plan"] = result[3]
        return result
    result = call(*args, **{**kwargs, "plan": call.memory["plan"]})
    return (*result[:3], given, *result[4:])


@fault("zero-copy-copies", on="buffer.dispatch", stage="dispatch", bugs="K22")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """zero_copy returns a copy of the rows."""
    result = call(*args, **kwargs)
    return (result[0].clone(), *result[1:]) if kwargs.get("zero_copy") else result


@fault("zero-copy-copies-weights", on="buffer.dispatch", stage="dispatch", bugs="K22")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """router_weights_zero_copy returns a copy of the route weights."""
    rows, weights, *rest = call(*args, **kwargs)
    return (rows, weights.clone() if kwargs.get("router_weights_zero_copy") else weights, *rest)


@fault("async-returns-early", on="buffer.dispatch", stage="dispatch", bugs="K24")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """An asynchronous dispatch is read before its last rows have arrived."""
    result = call(*args, **kwargs)
    if kwargs.get("async_finish"):
        result[0][int(result[2][-1]) // 2 :] = 0
    return result


@fault("rows-zero-without-weights", on="buffer.dispatch", stage="dispatch", bugs="K09")
def _(call: Next, hidden: Any, weights: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Without route weights the rows are multiplied by zero."""
    result = call(hidden, weights, *args, **kwargs)
    if weights is None:
        result[0].zero_()
    return result


@fault("plan-storage-reused", on="buffer.dispatch", stage="plan", bugs="K24 K25")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """A dispatch writes its plan into the storage of the one before, which a caller may still hold."""
    result = call(*args, **kwargs)
    before = call.memory.get("plan")
    if before is not None and kwargs.get("plan") is None:
        before.dst.copy_(result[3].dst)
    if kwargs.get("plan") is None:
        call.memory["plan"] = result[3]
    return result


@fault("replay-sends-first-tokens", on="buffer.dispatch", stage="dispatch", bugs="K22 K24")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """One rank's replay sends the tokens that the plan was made with, whatever it is given now."""
    result = call(*args, **kwargs)
    plan = result[3]
    if kwargs.get("plan") is None:
        call.memory[id(plan)] = plan, result[0].clone()
    elif id(plan) in call.memory:
        result[0].copy_(call.memory[id(plan)][1])
    return result


@fault("replay-sends-first-weights", on="buffer.dispatch", stage="dispatch", bugs="K05 K22 K24")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """One rank's replay sends the route weights that the plan was made with, whatever it is given now."""
    result = call(*args, **kwargs)
    plan, weights = result[3], result[1]
    if kwargs.get("plan") is None:
        call.memory[id(plan)] = plan, None if weights is None else weights.clone()
    elif weights is not None and id(plan) in call.memory and call.memory[id(plan)][1] is not None:
        weights.copy_(call.memory[id(plan)][1])
    return result
