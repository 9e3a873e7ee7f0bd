"""Faults inside an engine's MoE layer: between its experts and combine, and around its whole forward pass.

The first kind changes the experts' output ``[NvS, H]`` in place, before the tap records it; ``sent`` is the
dispatch that it belongs to. The second kind sees ``[T, H]``, the result for this rank's T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moonep_validate.faults import Next, fault

_Change = Callable[[Next, Any, Tensor], None]


def _experts(id: str, bugs: str) -> Callable[[_Change], _Change]:
    """Register a fault that changes one rank's expert rows."""

    def register(change: _Change) -> _Change:
        def around(
            call: Next,
            function: Any,
            sent: Any,
            plan: Any,
            hidden_nvsh: Tensor,
            *args: Any,
            **flags: Any,
        ) -> Any:
            if sent is not None:
                change(call, sent, hidden_nvsh)
            return call(function, sent, plan, hidden_nvsh, *args, **flags)

        around.__doc__ = change.__doc__
        fault(id, on="engine.experts", stage="experts", bugs=bugs)(around)
        return change

    return register


def _by(out: Tensor, factor: Tensor, end: int) -> None:
    """Multiply the rows before ``end`` by a factor each, rounded once."""
    out[:end] = (out[:end].float() * factor[:end, None]).to(out.dtype)


def _largest(out: Tensor, first: int, end: int) -> int:
    """The row of ``[first, end)`` with the largest sum of magnitudes: no padding, and no token of weight zero."""
    return first + int(out[first:end].float().nan_to_num().abs().sum(1).argmax())


@_experts("experts-weigh-twice", bugs="B01 B02 K01")
def _(call: Next, sent: Any, out: Tensor) -> None:
    """One rank applies the route weight twice."""
    _by(out, sent.row_weights, sent.end)


@_experts("experts-weigh-never", bugs="B02 B03 K01")
def _(call: Next, sent: Any, out: Tensor) -> None:
    """One rank does not apply the route weight."""
    weights = sent.row_weights
    _by(out, torch.where(weights == 0, 1.0, 1 / weights), sent.end)


@_experts("experts-drop-row", bugs="B20 K06 K13")
def _(call: Next, sent: Any, out: Tensor) -> None:
    """One row of one rank is zero."""
    out[_largest(out, 0, sent.end)] = 0


@_experts("experts-swap-groups", bugs="B22 K06")
def _(call: Next, sent: Any, out: Tensor) -> None:
    """A row of one rank's first group and one of its last group are in each other's place."""
    ends = sorted({0, *sent.cu_seqlens.tolist()})
    first, last = _largest(out, *ends[:2]), _largest(out, *ends[-2:])
    out[[first, last]] = out[[last, first]]


@_experts("experts-copy-tail", bugs="B25 B29 K08")
def _(call: Next, sent: Any, out: Tensor) -> None:
    """One row of one rank is the undefined one behind the last group."""
    if sent.end < len(out):
        out[_largest(out, 0, sent.end)] = out[sent.end]


@_experts("experts-scale-columns", bugs="B58 K16")
def _(call: Next, sent: Any, out: Tensor) -> None:
    """The last block of 32 columns of one rank is twice as large, as with another block's scale."""
    out[: sent.end, -32:] *= 2


@_experts("experts-return-previous", bugs="K22 K24")
def _(call: Next, sent: Any, out: Tensor) -> None:
    """One rank's output is that of the step before, as with a buffer that two steps share."""
    now = out.clone()
    before = call.memory.get("out", now)
    if before.shape == now.shape:
        out.copy_(before)
    call.memory["out"] = now


@fault("layer-shifts-tokens", on="engine.layer", stage="layer", bugs="B32 K09")
def _(call: Next, *given: Any) -> Any:
    """One rank returns each token in the next place."""
    out = call(*given)
    return out.roll(1, 0)


@fault("layer-returns-previous", on="engine.layer", stage="layer", bugs="K22 K24")
def _(call: Next, *given: Any) -> Any:
    """One rank returns the output of the step before, if that had as many tokens."""
    out = call(*given)
    before = call.memory.get("out", out)
    call.memory["out"] = out.clone()
    return before if before.shape == out.shape else out


@fault(
    "layer-skips-without-tokens",
    on="engine.layer",
    stage="life",
    bugs="B39 B42 B43 K11 K12",
    ranks="all",
    crashes=True,
)
def _(call: Next, layer: Any, hidden: Tensor, *given: Any) -> Any:
    """A rank without tokens leaves the step out, while its peers wait for it, in its first step for a Buffer."""
    return call(layer, hidden, *given) if len(hidden) else hidden


@fault("layer-times-ranks", on="engine.layer", stage="layer", bugs="B06 B08 K03")
def _(call: Next, layer: Any, hidden: Tensor, weights: Tensor, ids: Tensor, counts: list[int]) -> Any:
    """One rank's output is R times too large, as after one reduction too many."""
    out = call(layer, hidden, weights, ids, counts)
    return out * len(counts)


@fault("layer-adds-its-input", on="engine.layer", stage="layer", bugs="B04 K02")
def _(call: Next, layer: Any, hidden: Tensor, *given: Any) -> Any:
    """One rank adds the tokens to the result, as a residual that is added elsewhere too."""
    before = hidden.clone()
    out = call(layer, hidden, *given)
    return out + before


@fault("layer-returns-float32", on="engine.layer", stage="layer", bugs="K15")
def _(call: Next, *given: Any) -> Any:
    """One rank returns float32."""
    out = call(*given)
    return out.float()
