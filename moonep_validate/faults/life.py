"""Faults of a rank rather than of a result: it raises, never returns, or stays away."""

from __future__ import annotations

import time
from typing import Any

from moonep_validate.faults import Next, fault


@fault("rank-raises", on="buffer.prefetch_weight", stage="prefetch", bugs="K12")
def _(call: Next, *args: Any, rank: int = 1, **kwargs: Any) -> Any:
    """One rank raises instead of prefetching."""
    if call.rank == rank:
        raise RuntimeError("seeded failure of prefetch_weight")
    return call(*args, **kwargs)


@fault("rank-never-returns", on="buffer.combine", stage="combine", bugs="B39 B43 K11 K12")
def _(call: Next, *args: Any, rank: int = 1, **kwargs: Any) -> Any:
    """One rank never comes back from combine."""
    while call.rank == rank:
        time.sleep(0.01)
    return call(*args, **kwargs)


@fault("rank-skips-prefetch", on="buffer.prefetch_weight", stage="prefetch", bugs="B42 K12")
def _(call: Next, *args: Any, rank: int = 1, **kwargs: Any) -> Any:
    """One rank leaves out the collective prefetch and goes on to its experts."""
    return None if call.rank == rank else call(*args, **kwargs)
