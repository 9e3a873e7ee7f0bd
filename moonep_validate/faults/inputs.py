"""Faults that change a plan which a call was given, and which its caller keeps for the backward pass."""

from __future__ import annotations

from typing import Any

import torch

from moonep_validate.faults import Next, fault
from moonep_validate.faults.form import PLAN


def _changes_plan(id: str, seam: str, stage: str) -> None:
    """Register the fault of one call."""

    def around(call: Next, *args: Any, field: str = "dst", **kwargs: Any) -> Any:
        plan = kwargs.get("plan", args[0] if stage != "dispatch" else None)
        result = call(*args, **kwargs)
        if plan is not None:
            first = getattr(plan, field).flatten()[:1]
            first += torch.where(first > 0, -1, 1)
        return result

    around.__doc__ = f"One rank's {stage} changes a field of the plan that it is given."
    fault(id, on=seam, stage=stage, bugs="K24 K25", words={"field": PLAN})(around)


_changes_plan("replay-changes-plan", "buffer.dispatch", "dispatch")
_changes_plan("prefetch-changes-plan", "buffer.prefetch_weight", "prefetch")
_changes_plan("combine-changes-plan", "buffer.combine", "combine")
_changes_plan("reduce-changes-plan", "buffer.reduce_grad", "reduce")
