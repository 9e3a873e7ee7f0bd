"""Faults of the dispatch stage."""

from __future__ import annotations

from typing import Any

from moonep_validate.faults import Next, fault


@fault("row-of-another-token", on="buffer.dispatch", stage="dispatch", bugs="B20 B24 K06")
def _(call: Next, *args: Any, rank: int = 1, row: int = 0, **kwargs: Any) -> Any:
    """One row of one rank holds the payload of the next row; its weight is right."""
    rows, weights, cu_seqlens, plan = call(*args, **kwargs)
    if call.rank == rank and row + 1 < len(rows):
        rows[row] = rows[row + 1]
    return rows, weights, cu_seqlens, plan
