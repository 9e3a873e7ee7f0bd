"""Faults of integers with too few bits: ids, rows, group ends and offsets that wrap.

A number that does not fit comes back as another one: a signed one as a negative number, which indexes from the end
of a tensor. They change nothing in a small case; docs/contract.md lists no limit that would forbid the large one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moonep_validate.faults import Next, fault

_IDS = {"width": ("int8", "uint8")}
_ROWS = {"width": ("int16", "uint16")}


def narrowed(numbers: Tensor, width: str) -> Tensor:
    """Numbers as an integer type keeps them; shape and dtype stay.

    Args:
        numbers: int32 or int64.
        width: ``int8``, ``uint8``, ``int16``, ``uint16`` or ``int32``.
    """
    bits = int(width.lstrip("uint"))
    low = 0 if width.startswith("u") else -(2 ** (bits - 1))
    return (numbers.long() - low).remainder(2**bits).add(low).to(numbers.dtype)


def _rows(count: int, width: str, device: torch.device) -> Tensor:
    """The row that is met instead of each of some rows."""
    return narrowed(torch.arange(count, device=device), width) % count


@fault("ids-narrowed", on="buffer.dispatch", stage="plan", bugs="B49 K14", words=_IDS)
def _(call: Next, *args: Any, width: str = "int8", **kwargs: Any) -> Any:
    """One rank's expert ids are cast to a type that is too small, and planned so."""
    named = dict(zip(("hidden", "weights", "ids", "counts"), args, strict=False))
    if named.get("ids") is None:
        return call(*args, **kwargs)
    experts = len(named["counts"])
    ids = narrowed(named["ids"], width) % experts
    counts = ids.flatten().long().bincount(minlength=experts).to(named["counts"].dtype)
    return call(named["hidden"], named["weights"], ids, counts, **kwargs)


@fault("plan-rows-narrowed", on="buffer.dispatch", stage="plan", bugs="B50 K14", words=_ROWS)
def _(call: Next, *args: Any, width: str = "int16", **kwargs: Any) -> Any:
    """The plan of one rank holds row numbers that were cast to a type that is too small."""
    result = call(*args, **kwargs)
    if kwargs.get("plan") is not None:
        return result
    plan = result[3]
    raw = torch.where(plan.dst < 0, -plan.dst - 1, plan.dst)
    row = narrowed(raw % plan.NvS, width) % plan.NvS
    placed = raw - raw % plan.NvS + row
    dst = torch.where(plan.dst < 0, -placed - 1, placed)
    return (*result[:3], replace(plan, dst=dst), *result[4:])


@fault("group-ends-narrowed", on="buffer.dispatch", stage="plan", bugs="B51 K13 K14", words=_ROWS)
def _(call: Next, *args: Any, width: str = "int16", **kwargs: Any) -> Any:
    """One rank's cu_seqlens count rows in a type that is too small."""
    result = call(*args, **kwargs)
    if result[2] is None:
        return result
    return (*result[:2], narrowed(result[2], width), *result[3:])


@fault("payload-rows-narrowed", on="buffer.dispatch", stage="dispatch", bugs="B50 K14", words=_ROWS)
def _(call: Next, *args: Any, width: str = "int16", **kwargs: Any) -> Any:
    """One rank's rows arrive where a row number of too few bits puts them; the plan is right."""
    result = call(*args, **kwargs)
    rows = result[0]
    rows.copy_(rows[_rows(len(rows), width, rows.device)])
    return result


@fault("prefetch-ids-narrowed", on="buffer.prefetch_weight", stage="prefetch", bugs="B49 K14 K21", words=_IDS)
def _(call: Next, plan: Any, width: str = "int8", **tensors: Any) -> Any:
    """One rank prefetches the experts whose ids a type that is too small makes of its own."""
    copies = plan.experts_to_copy
    there = torch.where(copies < 0, copies, narrowed(copies, width) % plan.E)
    return call(replace(plan, experts_to_copy=there), **tensors)


@fault("experts-rows-narrowed", on="experts", stage="experts", bugs="B50 K13 K14", words=_ROWS)
def _(call: Next, rows: Tensor, *args: Any, width: str = "int16") -> Any:
    """One rank computes each row from the input that a row number of too few bits names."""
    return call(rows[_rows(len(rows), width, rows.device)], *args)


@fault("combine-rows-narrowed", on="buffer.combine", stage="combine", bugs="B50 K14", words=_ROWS)
def _(call: Next, plan: Any, rows: Tensor, *args: Any, width: str = "int16", **kwargs: Any) -> Any:
    """One rank's tokens gather the rows that row numbers of too few bits name."""
    if kwargs.get("zero_copy"):
        return call(plan, rows, *args, **kwargs)
    return call(plan, rows[_rows(len(rows), width, rows.device)], *args, **kwargs)


@fault("offset-narrowed", on="buffer.dispatch", stage="dispatch", bugs="B51 K14")
def _(call: Next, *args: Any, bits: int = 16, **kwargs: Any) -> Any:
    """The byte offset of one rank's rows has too few bits: 16 here, 31 and 32 need the profile sizes."""
    result = call(*args, **kwargs)
    rows = result[0]
    size = rows.shape[1] * rows.element_size()
    first = torch.arange(len(rows), device=rows.device) * size % 2**bits // size
    rows.copy_(rows[first])
    return result


@fault("adapter-narrows-ids", on="engine.dispatch", stage="prepare", bugs="B49 K14", words=_IDS)
def _(
    call: Next,
    function: Any,
    given: Any,
    hidden: Tensor,
    weights: Any = None,
    ids: Any = None,
    counts: Any = None,
    width: str = "int8",
    **flags: Any,
) -> Any:
    """One rank's adapter casts expert ids to a type that is too small."""
    if given is not None and ids is not None:
        experts = len(counts)
        ids = narrowed(ids, width) % experts
        counts = ids.flatten().long().bincount(minlength=experts).to(counts.dtype)
    return call(function, given, hidden, weights, ids, counts, **flags)


@fault("experts-narrow-rows", on="engine.experts", stage="experts", bugs="B50 K14", words=_ROWS)
def _(
    call: Next,
    function: Any,
    sent: Any,
    plan: Any,
    hidden_nvsh: Tensor,
    *args: Any,
    width: str = "int16",
    **flags: Any,
) -> Any:
    """One rank's expert rows are those that row numbers of too few bits name."""
    if sent is not None:
        hidden_nvsh.copy_(hidden_nvsh[_rows(len(hidden_nvsh), width, hidden_nvsh.device)])
    return call(function, sent, plan, hidden_nvsh, *args, **flags)
