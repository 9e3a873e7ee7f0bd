"""Faults of the combine stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moonep_validate.faults import Next, fault


def _duplicates(plan: Any) -> Tensor:
    rows: Tensor = plan.dup_loffs[: int(plan.dup_counts[1])].long()
    return rows


@fault("duplicates-dropped", on="buffer.combine", stage="combine", bugs="B36 K09 K10")
def _(call: Next, plan: Any, *args: Any, **kwargs: Any) -> Any:
    """One rank does not add the duplicate rows of a token to its primary row."""
    plan = replace(plan, dup_counts=torch.zeros_like(plan.dup_counts))
    return call(plan, *args, **kwargs)


@fault("duplicates-added-twice", on="buffer.combine", stage="combine", bugs="B08 K03")
def _(call: Next, plan: Any, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
    """One rank adds each duplicate twice."""
    if not kwargs.get("zero_copy"):
        rows = rows.clone()
        rows[_duplicates(plan)] *= 2
    return call(plan, rows, *args, **kwargs)


@fault("combine-applies-weights", on="buffer.combine", stage="combine", bugs="K01 K05")
def _(call: Next, plan: Any, rows: Tensor, weights: Any = None, *args: Any, **kwargs: Any) -> Any:
    """One rank multiplies its rows by the route weights, which combine must not."""
    if weights is not None and not kwargs.get("zero_copy"):
        rows = (rows.float() * weights[:, None]).bfloat16()
    return call(plan, rows, weights, *args, **kwargs)


@fault("combine-adds-tail", on="buffer.combine", stage="combine", bugs="B25 B29 K08")
def _(call: Next, plan: Any, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
    """One rank adds an undefined row to its first token."""
    result = call(plan, rows, *args, **kwargs)
    result[0][0] += rows[-1]
    return result


@fault("tokens-shifted", on="buffer.combine", stage="combine", bugs="B32 K09")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """One rank returns each token to the next place."""
    result = call(*args, **kwargs)
    result[0].copy_(result[0].roll(1, dims=0))
    return result


@fault("combine-of-latest-plan", on="buffer.combine", stage="combine", bugs="B32 K09 K24")
def _(call: Next, plan: Any, *args: Any, **kwargs: Any) -> Any:
    """One rank reads its tokens with destinations that are rolled by one token."""
    plan = replace(plan, dst=plan.dst.roll(plan.K))
    return call(plan, *args, **kwargs)


@fault("gathered-weights-shifted", on="buffer.combine", stage="combine", bugs="K09")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """One rank's gathered route weights are off by one k."""
    result = call(*args, **kwargs)
    if result[1] is not None:
        result[1].copy_(result[1].flatten().roll(1).view_as(result[1]))
    return result


@fault("combine-changes-input", on="buffer.combine", stage="combine", bugs="K25")
def _(call: Next, plan: Any, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Combine on a copy changes the caller's rows."""
    result = call(plan, rows, *args, **kwargs)
    if not kwargs.get("zero_copy"):
        rows[0, 0] = 7.0
    return result


@fault("combine-in-bf16", on="buffer.combine", stage="combine", bugs="K28")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """One rank's result has one mantissa bit less, as after another rounding."""
    result = call(*args, **kwargs)
    result[0].view(torch.int16).bitwise_and_(~1)
    return result


@fault("zero-copy-drops-duplicates", on="buffer.combine", stage="combine", bugs="K09 K24")
def _(call: Next, plan: Any, *args: Any, **kwargs: Any) -> Any:
    """With zero-copy, one rank does not add the duplicate rows of a token."""
    if kwargs.get("zero_copy"):
        plan = replace(plan, dup_counts=torch.zeros_like(plan.dup_counts))
    return call(plan, *args, **kwargs)


@fault("duplicates-dropped-later", on="buffer.combine", stage="combine", bugs="K22 K24 K28")
def _(call: Next, plan: Any, *args: Any, after: int = 1, **kwargs: Any) -> Any:
    """From some call on, one rank does not add the duplicate rows of a token: the first steps are right."""
    calls = call.memory["calls"] = call.memory.get("calls", 0) + 1
    if calls > after:
        plan = replace(plan, dup_counts=torch.zeros_like(plan.dup_counts))
    return call(plan, *args, **kwargs)
