"""What is in a plan? Its tensors, and every field that a call which is given a plan must leave as it is."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

PLAN_FIELDS = (
    "dst",
    "experts_to_copy",
    "zero_fill_ranges",
    "remote_stats",
    "dup_groups",
    "dup_loffs",
    "dup_counts",
)
_LISTS = ("dup_groups", "dup_loffs")


def plan_tensors(plan: Any) -> dict[str, Tensor]:
    """The tensors of a plan, by field."""
    return {name: getattr(plan, name) for name in PLAN_FIELDS}


def plan_sizes(plan: Any) -> dict[str, int]:
    """The sizes that a plan names, by field; no other whole number is one."""
    found = {name: getattr(plan, name, None) for name in ("N", "R", "E", "NvS", "K", "B")}
    return {name: size for name, size in found.items() if type(size) is int}


def plan_inputs(plan: Any) -> dict[str, Tensor]:
    """Every public field of a plan as a tensor, by ``plan.FIELD``; nothing for no plan.

    Of the dedup lists only the entries that ``dup_counts`` makes valid count (docs/contract.md, Plan fields).
    """
    public = [name for name in getattr(plan, "__dict__", {}) if not name.startswith("_")]
    values = {name: getattr(plan, name, None) for name in ([*PLAN_FIELDS, *public] if plan is not None else [])}
    counts = values.get("dup_counts")
    for place, name in enumerate(_LISTS):
        if name in values:
            values[name] = _valid(values[name], counts, place)
    return {f"plan.{name}": held for name, value in values.items() if (held := _as_tensor(value)) is not None}


def _valid(entries: Any, counts: Any, place: int) -> Any:
    """The entries with all behind the valid ones set to zero; as they are where the form is wrong."""
    right = isinstance(entries, Tensor) and isinstance(counts, Tensor) and entries.dim() and counts.numel() == 2
    if not right:
        return entries
    valid = torch.arange(len(entries), device=entries.device) < counts.flatten()[place].to(entries.device)
    return torch.where(valid.view(-1, *[1] * (entries.dim() - 1)), entries, 0)


def _as_tensor(value: Any) -> Tensor | None:
    """A field as a tensor; None for what is neither a tensor nor a number, nothing being an empty one."""
    if isinstance(value, Tensor):
        return value
    if value is None:
        return torch.zeros(0)
    return _number(value) if isinstance(value, int | float) else None


@lru_cache(maxsize=64, typed=True)
def _number(value: float) -> Tensor:
    """A number as a tensor, which nobody changes: every call that is given a plan asks for the same few."""
    return torch.tensor(value)
