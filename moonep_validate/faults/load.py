"""Faults of an engine's weight loading: what its loader is offered is not what the checkpoint holds.

They sit on the reader of the checkpoint, which yields (expert, projection, tensor) of all experts on every rank:
gate and up ``[I, H]``, down ``[H, I]``, bf16. A rank keeps its own experts of them, so a fault of one rank is one
of that rank's shard. The recorded checkpoint stays the true one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.faults import Next, fault

_Item = tuple[int, str, Tensor]
_Items = Iterator[_Item]


def _changed(call: Next, case: Case, layer: int, change: Callable[[_Item], _Item | None]) -> _Items:
    """The checkpoint with every item changed, or left out where the change is None."""
    for item in call(case, layer):
        new = change(item)
        if new is not None:
            yield new


def _home(case: Case, rank: int) -> int:
    """The first expert of a rank."""
    return rank * case.experts_per_rank


@fault("loader-swaps-gate-and-up", on="engine.load", stage="load", bugs="B61 B62 K17")
def _(call: Next, case: Case, layer: int) -> _Items:
    """One rank loads gate and up into each other's place."""
    names = {"gate": "up", "up": "gate", "down": "down"}
    return _changed(call, case, layer, lambda item: (item[0], names[item[1]], item[2]))


@fault("loader-takes-gate-for-up", on="engine.load", stage="load", bugs="B68 K17 K19")
def _(call: Next, case: Case, layer: int) -> _Items:
    """One rank loads the gate into both halves of the fused matrix."""
    gate: dict[int, Tensor] = {}

    def change(item: _Item) -> _Item:
        expert, name, tensor = item
        gate.setdefault(expert, tensor)  # the gate of an expert comes first
        return expert, name, gate[expert] if name == "up" else tensor

    return _changed(call, case, layer, change)


@fault("loader-transposes", on="engine.load", stage="load", bugs="B68 K19")
def _(call: Next, case: Case, layer: int) -> _Items:
    """One rank transposes the down matrices; needs H = I, since a loader refuses another shape."""

    def change(item: _Item) -> _Item:
        expert, name, tensor = item
        return expert, name, tensor.T.contiguous() if name == "down" and case.H == case.I else tensor

    return _changed(call, case, layer, change)


@fault("loader-shifts-experts", on="engine.load", stage="load", bugs="B45 K06 K19")
def _(call: Next, case: Case, layer: int) -> _Items:
    """One rank's experts are off by one."""
    return _changed(call, case, layer, lambda item: ((item[0] + 1) % case.E, *item[1:]))


@fault("loader-takes-other-shard", on="engine.load", stage="load", bugs="K06 K20")
def _(call: Next, case: Case, layer: int) -> _Items:
    """One rank loads the experts of the next rank."""
    shift = case.E - case.experts_per_rank
    return _changed(call, case, layer, lambda item: ((item[0] + shift) % case.E, *item[1:]))


@fault("loader-skips-expert", on="engine.load", stage="load", bugs="B67 K19", ranks=0)
def _(call: Next, case: Case, layer: int, expert: int = 0) -> _Items:
    """One rank leaves out one of its experts, the first by default, as where id 0 counts as no id."""
    skipped = _home(case, call.rank) + expert
    return _changed(call, case, layer, lambda item: None if item[0] == skipped else item)


@fault("loader-skips-tensor", on="engine.load", stage="load", bugs="B67 B69 K19")
def _(call: Next, case: Case, layer: int, expert: int = 1) -> _Items:
    """One rank leaves out the down matrix of one of its experts."""
    skipped = (_home(case, call.rank) + expert % case.experts_per_rank, "down")
    return _changed(call, case, layer, lambda item: None if item[:2] == skipped else item)


@fault("loader-keeps-stale", on="engine.load", stage="load", bugs="K19 K23")
def _(call: Next, case: Case, layer: int) -> _Items:
    """One rank loads its up matrices twice, and the one that wins is of another layer."""
    yield from call(case, layer)
    yield from (item for item in call(case, layer + 1) if item[1] == "up")


@fault("loader-rounds-to-int", on="engine.load", stage="load", bugs="K18 K19")
def _(call: Next, case: Case, layer: int) -> _Items:
    """One rank's weights pass through integers, as bytes that are converted instead of reinterpreted."""
    return _changed(call, case, layer, lambda item: (*item[:2], item[2].round()))


@fault("loader-through-float8", on="engine.load", stage="load", bugs="B69 K18")
def _(call: Next, case: Case, layer: int) -> _Items:
    """One rank's weights pass through float8, as those of a layer that counts as quantised."""
    through = torch.float8_e4m3fn
    return _changed(call, case, layer, lambda item: (*item[:2], item[2].to(through).bfloat16()))


@fault("loader-misses-tail-rows", on="engine.load", stage="load", bugs="K20")
def _(call: Next, case: Case, layer: int) -> _Items:
    """One rank's shard of the gate ends early: the last rows are zero."""

    def change(item: _Item) -> _Item:
        expert, name, tensor = item
        if name == "gate":
            tensor = tensor.clone()
            tensor[-8:] = 0
        return expert, name, tensor

    return _changed(call, case, layer, change)


@fault("loader-flips-one-bit", on="engine.load", stage="load", bugs="K19")
def _(call: Next, case: Case, layer: int, expert: int = 0) -> _Items:
    """The last bit of the last weight of one expert is another one, on one rank only."""

    def change(item: _Item) -> _Item:
        if item[:2] != (_home(case, call.rank) + expert % case.experts_per_rank, "down"):
            return item
        tensor = item[2].clone()
        tensor.view(torch.int16)[-1, -1] ^= 1
        return (*item[:2], tensor)

    return _changed(call, case, layer, change)
