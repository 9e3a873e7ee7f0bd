"""Faults that contradict themselves: a token's output depends on what it must not depend on.

Two of them no oracle sees: one stays inside the bounds of real values, one is computed rightly with wrong weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moonep_validate.faults import Next, fault


@fault("rounding-follows-batch", on="experts", stage="layer", bugs="B11 K28")
def _(call: Next, rows: Tensor, *args: Any) -> Any:
    """One rank's last bits depend on all its rows, as with one activation scale for a whole batch."""
    out: Tensor = call(rows, *args)
    odd = rows.view(torch.int16).long().sum(dim=0) % 2
    out.view(torch.int16).bitwise_xor_(odd.to(torch.int16))
    return out


# Who owns the experts decides, not who loads them: in generation A each rank loads those of all.
@fault("weights-of-first-load", on="weights", stage="layer", bugs="K21 K23", ranks="all", words={"of": ("all",)})
def _(call: Next, owner: int, layer: int, of: int | str = 1) -> Any:
    """One rank's experts have the weights that were first loaded under their numbers, whatever is loaded later."""
    weights = call(owner, layer)
    first = call.memory.setdefault(f"weights of {owner}", weights)
    return first if of in (owner, "all") else weights


@fault("output-follows-place", on="buffer.combine", stage="combine", bugs="K09")
def _(call: Next, *args: Any, token: int = 0, **kwargs: Any) -> Any:
    """One token's place in one rank's batch doubles its output."""
    result = call(*args, **kwargs)
    result[0][token] *= 2
    return result


@fault("output-follows-rank", on="buffer.combine", stage="combine", bugs="B08 B10 K03")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """One rank's outputs are doubled, as by a second reduction."""
    result = call(*args, **kwargs)
    result[0].mul_(2)
    return result


@fault("neighbour-added", on="buffer.combine", stage="combine", bugs="B07 B11 K03")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """The output of one rank's last token is added to that of its first one."""
    result = call(*args, **kwargs)
    result[0][0] += result[0][-1]
    return result


@fault("zero-weight-counts", on="experts", stage="experts", bugs="K05 K07")
def _(call: Next, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Any) -> Any:
    """One rank takes a route weight of 0 for 1/2, as where weights are bounded from below before a division."""
    row_weights = torch.where(row_weights == 0, 0.5, row_weights)
    return call(rows, row_weights, cu_seqlens, weights)


@fault("sign-lost", on="experts", stage="experts", bugs="K18 K27")
def _(call: Next, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Sequence[Tensor]) -> Any:
    """One rank's down projections lose their signs, as in an unsigned format."""
    weights = [*weights[:2], weights[2].abs()]
    return call(rows, row_weights, cu_seqlens, weights)
