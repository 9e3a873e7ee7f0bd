"""Faults of an engine's adapter, which turns a step's tokens into a dispatch: one rank asks for something else.

They sit before the tap that records the dispatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moonep_validate.data.problem import Batch
from moonep_validate.faults import Next, fault

_NAMES = ("hidden", "weights", "ids", "counts")


@dataclass(frozen=True)
class Asked:
    """A dispatch that an engine asks for.

    Attributes:
        given: what the layer was given in this step; its first ``given.tokens`` rows.
        hidden: ``[capacity, H]`` bf16, the engine's padding included.
        weights: ``[capacity, K]`` float32.
        ids: ``[capacity, K]`` int32.
        counts: ``[E]`` int32.
    """

    given: Batch
    hidden: Tensor
    weights: Tensor
    ids: Tensor
    counts: Tensor

    @property
    def tokens(self) -> int:
        """Rows that are no padding."""
        return self.given.tokens

    @property
    def experts(self) -> int:
        """``E``."""
        return len(self.counts)

    def but_ids(self, ids: Tensor) -> Asked:
        """Other ids, and their counts."""
        counts = ids.flatten().long().bincount(minlength=self.experts).to(self.counts.dtype)
        return replace(self, ids=ids, counts=counts)


_Change = Callable[[Next, Asked], Asked]


def _adapter(id: str, bugs: str, alone: bool = False) -> Callable[[_Change], _Change]:
    """Register a fault that changes what a rank asks for."""

    def register(change: _Change) -> _Change:
        def around(call: Next, function: Any, given: Any, *args: Any, **flags: Any) -> Any:
            if given is None:
                return call(function, given, *args, **flags)
            named = dict(zip(_NAMES, args, strict=False))
            named |= {name: flags.pop(name) for name in _NAMES if name in flags}
            asked = change(call, Asked(given, **named))
            return call(function, given, *(getattr(asked, name) for name in _NAMES), **flags)

        around.__doc__ = change.__doc__
        fault(id, on="engine.dispatch", stage="prepare", bugs=bugs, alone=alone)(around)
        return change

    return register


@_adapter("adapter-pads-first", bugs="K08 K09")
def _(call: Next, asked: Asked) -> Asked:
    """One rank's padding rows come before its tokens."""
    pads = len(asked.hidden) - asked.tokens
    hidden, weights, ids = (part.roll(pads, 0) for part in (asked.hidden, asked.weights, asked.ids))
    return replace(asked, hidden=hidden, weights=weights, ids=ids)


@_adapter("adapter-weighs-pads", bugs="B26 K08")
def _(call: Next, asked: Asked) -> Asked:
    """One rank's padding rows have weight 1."""
    weights = asked.weights.clone()
    weights[asked.tokens :] = 1
    return replace(asked, weights=weights)


@_adapter("adapter-counts-without-pads", bugs="B26 B46 K13")
def _(call: Next, asked: Asked) -> Asked:
    """One rank's tokens_per_expert leaves its padding rows out."""
    return replace(asked, counts=asked.but_ids(asked.ids[: asked.tokens]).counts)


@_adapter("adapter-wraps-invalid-ids", bugs="B24 B26 K07")
def _(call: Next, asked: Asked) -> Asked:
    """One rank sends id -1 to the last expert, and keeps its weight."""
    invalid = (asked.given.topk_ids[: asked.tokens] < 0).to(asked.ids.device)
    kept = asked.given.topk_weights[: asked.tokens].to(asked.weights.device)
    ids, weights = asked.ids.clone(), asked.weights.clone()
    ids[: asked.tokens][invalid] = asked.experts - 1
    weights[: asked.tokens][invalid] = kept[invalid]
    return replace(asked.but_ids(ids), weights=weights)


@_adapter("adapter-capacity-differs", bugs="K12 K13", alone=True)
def _(call: Next, asked: Asked) -> Asked:
    """One rank dispatches a row less than its peers."""
    return replace(asked.but_ids(asked.ids[:-1]), hidden=asked.hidden[:-1], weights=asked.weights[:-1])


@_adapter("adapter-shifts-tokens", bugs="B32 K09")
def _(call: Next, asked: Asked) -> Asked:
    """One rank sends each token with the routes of its neighbour."""
    real, pads = asked.hidden[: asked.tokens], asked.hidden[asked.tokens :]
    return replace(asked, hidden=torch.cat([real.roll(1, 0), pads]))


@_adapter("adapter-rounds-weights", bugs="B12 B13 K04")
def _(call: Next, asked: Asked) -> Asked:
    """One rank's route weights are rounded to bf16."""
    return replace(asked, weights=asked.weights.bfloat16().float())


@_adapter("adapter-flips-ids", bugs="K05 K09")
def _(call: Next, asked: Asked) -> Asked:
    """One rank's ids are in the opposite order of k, their weights are not."""
    return replace(asked, ids=asked.ids.flip(1))


@_adapter("adapter-shifts-ids", bugs="B45 K06")
def _(call: Next, asked: Asked) -> Asked:
    """One rank's expert ids are one too large."""
    return asked.but_ids((asked.ids + 1) % asked.experts)


@_adapter("adapter-sends-local-ids", bugs="B20 B22 K06")
def _(call: Next, asked: Asked) -> Asked:
    """One rank sends the experts of the upper half by their place in it."""
    return asked.but_ids(asked.ids % (asked.experts // 2))


@_adapter("adapter-sends-previous-ids", bugs="B32 K22 K24")
def _(call: Next, asked: Asked) -> Asked:
    """One rank sends the ids of the step before, if that had the same capacity."""
    before = call.memory.get("ids", asked.ids)
    call.memory["ids"] = asked.ids.clone()
    return asked.but_ids(before) if before.shape == asked.ids.shape else asked
