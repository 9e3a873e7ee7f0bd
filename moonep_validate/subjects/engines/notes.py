"""What is noted of an engine's calls at MoonEP's door? Before a call and after it, for whoever watches.

The taps of ``--subject`` (tap.py) and those of a served engine (served/taps/sampling.py) note the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moonep_validate.data.problem import PROJECTIONS
from moonep_validate.sessions.protocols import Dispatched
from moonep_validate.subjects.buffer.plan import plan_inputs, plan_sizes, plan_tensors
from moonep_validate.trace.trace import Call

#: What dispatch is given, in the order of its parameters.
ASKED = ("hidden", "topk_weights", "topk_ids", "tokens_per_expert")


def asked(call: Call, given: Mapping[str, Tensor | None], plan: Any) -> None:
    """Before a dispatch: what it is given, by ``ASKED``, and the plan that it replays, if any."""
    call.put(**given)
    call.hold(**plan_inputs(plan))


def dispatched(call: Call, given: Mapping[str, Tensor | None], replayed: Any, out: Any) -> Dispatched:
    """After a dispatch: what came back, and whether its inputs are as they were."""
    rows, row_weights, cu_seqlens, plan = out[:4]
    call.put(rows=rows, row_weights=row_weights, cu_seqlens=cu_seqlens)
    call.put(**plan_tensors(plan))
    call.info["sizes"] = plan_sizes(plan)
    call.unchanged(**given)
    call.unchanged(**plan_inputs(replayed))
    return Dispatched(rows, row_weights, cu_seqlens, plan)


def slots_before(call: Call, full: Mapping[str, Tensor], own: slice, experts: int, plan: Any) -> None:
    """Before a prefetch: a rank's own weights, its slots, and what it may only read.

    Args:
        call: the call.
        full: ``[E+B, ...]`` each, by projection.
        own: the rank's experts.
        experts: E.
        plan: of the last dispatch.
    """
    for name, tensor in full.items():
        call.put(**{f"local_{name}": tensor[own], f"before_{name}": tensor[experts:]})
    call.put(experts_to_copy=plan.experts_to_copy)
    call.hold(**_read(full, experts), **plan_inputs(plan))


def slots_after(call: Call, full: Mapping[str, Tensor], own: slice, experts: int, plan: Any) -> None:
    """After a prefetch: the slots, and whether all else is as it was; arguments as before it."""
    call.put(**{f"slot_{name}": tensor[experts:] for name, tensor in full.items()})
    call.unchanged(**{f"local_{name}": tensor[own] for name, tensor in full.items()})
    call.unchanged(**_read(full, experts), **plan_inputs(plan))


def _read(full: Mapping[str, Tensor], experts: int) -> dict[str, Tensor]:
    return {f"full_{name}": tensor[:experts] for name, tensor in full.items()}


def full_of(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a prefetch of generation A by projection, from its keywords."""
    return {name: arguments[f"full_{name}_weight"] for name in PROJECTIONS}


def given_to_experts(sent: Dispatched, full: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """What the experts are given: rows, route weights, groups, and the weights by ``weight_NAME``."""
    weights = {f"weight_{name}": tensor for name, tensor in full.items()}
    return {"rows": sent.rows, "row_weights": sent.row_weights, "cu_seqlens": sent.cu_seqlens, **weights}


def rows_before(call: Call, rows: Tensor, row_weights: Tensor | None, plan: Any) -> None:
    """Before a combine: what the experts made, and the plan."""
    call.put(rows=rows, row_weights=row_weights)
    call.hold(**plan_inputs(plan))


def combined(
    call: Call, rows: Tensor, row_weights: Tensor | None, plan: Any, out: Any, zero_copy: bool = False
) -> None:
    """After a combine: what came back, and whether its inputs are as before; a zero-copy one works on its rows."""
    call.put(hidden=out[0], topk_weights=out[1])
    call.unchanged(rows=None if zero_copy else rows)
    call.unchanged(row_weights=row_weights, **plan_inputs(plan))
