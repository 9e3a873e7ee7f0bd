"""Faults of the combine stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moonep_validate.faults import Next, fault


@fault("duplicates-dropped", on="buffer.combine", stage="combine", bugs="B36 K09 K10")
def _(call: Next, plan: Any, *args: Any, rank: int = 1, **kwargs: Any) -> Any:
    """One rank does not add the duplicate rows of a token to its primary row."""
    if call.rank == rank:
        plan = replace(plan, dup_counts=torch.zeros_like(plan.dup_counts))
    return call(plan, *args, **kwargs)
