"""Faults of a rank or of the Buffer's life rather than of a result."""

from __future__ import annotations

import time
from typing import Any

from moonep_validate.faults import Next, fault


@fault("rank-raises", on="buffer.prefetch_weight", stage="prefetch", bugs="K12", crashes=True)
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """One rank raises instead of prefetching."""
    raise RuntimeError("seeded failure of prefetch_weight")


@fault("rank-never-returns", on="buffer.combine", stage="combine", bugs="B39 B43 K11 K12", crashes=True)
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """One rank never comes back from combine."""
    while True:
        time.sleep(0.01)


@fault("rank-skips-combine", on="buffer.combine", stage="combine", bugs="B42 K12", crashes=True)
def _(call: Next, plan: Any, rows: Any, weights: Any = None, *args: Any, **kwargs: Any) -> Any:
    """One rank leaves out the collective combine and goes on."""
    tokens = plan.N // plan.K
    gathered = None if weights is None else weights[: plan.N].view(tokens, plan.K).clone()
    return rows[:tokens].clone(), gathered, None


@fault("bad-input-accepted", on="buffer.construct", stage="life", bugs="K15", ranks="all")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """Dispatch converts tokens of a wrong dtype instead of refusing them."""
    buffer = call(*args, **kwargs)
    dispatch = buffer.dispatch
    buffer.dispatch = lambda hidden, *a, **k: dispatch(hidden.bfloat16(), *a, **k)
    return buffer


@fault("destroy-does-nothing", on="buffer.construct", stage="life", bugs="K23", ranks="all")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """Destroy returns and leaves the Buffer usable."""
    buffer = call(*args, **kwargs)
    buffer.destroy = lambda: None
    return buffer


@fault("destroy-fails", on="buffer.destroy", stage="life", bugs="K23", crashes=True)
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """Destroy raises on one rank."""
    raise RuntimeError("seeded failure of destroy")
