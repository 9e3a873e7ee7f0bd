"""Faults of form: a result is right in all that a careless caller reads, but not in shape, dtype or layout.

``how`` says what is wrong: ``wide`` is the next wider dtype, ``short`` lacks the last row, ``long`` has a row of
garbage behind the right ones, ``strided`` is every second element of a larger tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moonep_validate.faults import Next, fault

_WIDE = {torch.bfloat16: torch.float32, torch.float32: torch.float64, torch.int32: torch.int64}
_HOW: dict[str, Callable[[Tensor], Tensor]] = {
    "wide": lambda t: t.to(_WIDE[t.dtype]),
    "float64": Tensor.double,
    "short": lambda t: t[:-1],
    "long": lambda t: torch.cat([t, torch.full_like(t[:1], 77)]),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
}
PLAN = ("dst", "experts_to_copy", "zero_fill_ranges", "remote_stats", "dup_groups", "dup_loffs", "dup_counts")
_RESULTS = ("rows", "row_weights", "cu_seqlens")


def _changed(results: tuple[Any, ...], place: int, how: str) -> tuple[Any, ...]:
    """The results with one of them in another form; None stays None."""
    if results[place] is None:
        return results
    return (*results[:place], _HOW[how](results[place]), *results[place + 1 :])


@fault(
    "plan-form",
    on="buffer.dispatch",
    stage="plan",
    bugs="K15 K20",
    words={"tensor": ("cu_seqlens", *PLAN), "how": ("wide", "short", "long", "strided")},
)
def _(call: Next, *args: Any, tensor: str = "dst", how: str = "wide", **kwargs: Any) -> Any:
    """One tensor of one rank's plan has another form; the replay of a plan keeps it as it is."""
    results = call(*args, **kwargs)
    if kwargs.get("plan") is not None:
        return results
    if tensor == "cu_seqlens":
        return _changed(results, _RESULTS.index(tensor), how)
    plan = replace(results[3], **{tensor: _HOW[how](getattr(results[3], tensor))})
    return (*results[:3], plan, *results[4:])


@fault(
    "rows-form",
    on="buffer.dispatch",
    stage="dispatch",
    bugs="K15 K20",
    words={"tensor": _RESULTS[:2], "how": tuple(_HOW)},
)
def _(call: Next, *args: Any, tensor: str = "rows", how: str = "wide", **kwargs: Any) -> Any:
    """One rank's dispatched rows, or their weights, have another form."""
    return _changed(call(*args, **kwargs), _RESULTS.index(tensor), how)


@fault("experts-form", on="experts", stage="experts", bugs="K15 K20", words={"how": tuple(_HOW)})
def _(call: Next, *args: Any, how: str = "wide") -> Any:
    """One rank's expert rows have another form."""
    return _HOW[how](call(*args))


@fault("combine-form", on="buffer.combine", stage="combine", bugs="K15 K20", words={"how": tuple(_HOW)})
def _(call: Next, *args: Any, how: str = "wide", **kwargs: Any) -> Any:
    """One rank's combined tokens have another form."""
    return _changed(call(*args, **kwargs), 0, how)


@fault("gathered-weights-form", on="buffer.combine", stage="combine", bugs="K15 K20", words={"how": tuple(_HOW)})
def _(call: Next, *args: Any, how: str = "wide", **kwargs: Any) -> Any:
    """The route weights that come back to one rank have another form."""
    return _changed(call(*args, **kwargs), 1, how)


def _of_the_model(stage: str, *tensors: str) -> None:
    """Register the fault of a part around the routed experts, which returns one tensor or several."""

    def around(call: Next, *args: Any, how: str = "wide", tensor: str = tensors[0], **kwargs: Any) -> Any:
        results = call(*args, **kwargs)
        if isinstance(results, tuple):
            return _changed(results, tensors.index(tensor), how)
        return _HOW[how](results)

    around.__doc__ = f"What one rank's part {stage} returns has another form."
    words = {"tensor": tensors, "how": ("wide", "short")}
    fault(f"{stage}-form", on=f"model.{stage}", stage=stage, bugs="K15", words=words)(around)


_of_the_model("router", "ids", "weights")
_of_the_model("latent", "out")
_of_the_model("norm", "out")
_of_the_model("shared", "out")
_of_the_model("output", "up", "out")


@fault("weights-that-nobody-gave", on="buffer.dispatch", stage="dispatch", bugs="K05 K08")
def _(call: Next, hidden: Tensor, weights: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """One rank's dispatch without route weights returns weights of its rows."""
    result = call(hidden, weights, *args, **kwargs)
    made = result[1] if weights is not None else torch.full(result[0].shape[:1], 7.0, device=hidden.device)
    return (result[0], made, *result[2:])


@fault("gathered-from-no-weights", on="buffer.combine", stage="combine", bugs="K05 K08")
def _(call: Next, plan: Any, rows: Tensor, weights: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """One rank's combine without route weights returns weights of its tokens."""
    result = call(plan, rows, weights, *args, **kwargs)
    made = result[1] if weights is not None else result[0].new_ones(len(result[0]), plan.K, dtype=torch.float32)
    return (result[0], made, *result[2:])
