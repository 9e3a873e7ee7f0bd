"""Whose row is it? A wrong expert row is compared with what usual mistakes give, so that a finding says which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moonep_validate.cases.layout import Ints
from moonep_validate.formats.weight_format import PROJECTIONS, WeightFormat
from moonep_validate.judge.oracle.activation import SILU, SITU, Activation
from moonep_validate.judge.oracle.arithmetic import Arithmetic
from moonep_validate.judge.oracle.dense import expert_rows

_Guess = tuple[str, Sequence[Tensor], Tensor, Activation]


def said_of(
    row: tuple[Tensor, Tensor, Tensor],
    group: int,
    weights: Sequence[Tensor],
    experts: Ints,
    arithmetic: Arithmetic,
    form: WeightFormat,
) -> str:
    """A remark for a finding: the first mistake that gives this very row, or nothing.

    Args:
        row: input ``[H]``, route weight, and the output ``[H]`` float64 that came.
        group: of the row.
        weights: of all groups, with scales if packed.
        experts: expert of each group, -1 where that is not known.
        arithmetic: see ``oracle.dense.gated_mlp``.
        form: how the weights are stored.
    """
    x, route_weight, got = row
    for text, mine, factor, activation in _guesses(arithmetic, route_weight, group, weights, experts, form):
        supposed = replace(arithmetic, activation=activation)
        want, variance = expert_rows(x[None], mine, factor[None], supposed)
        if not bool(supposed.wrong(want[0], got, variance[0]).any()):
            return f"; it is the row {text}"
    return ""


def _guesses(
    arithmetic: Arithmetic,
    route_weight: Tensor,
    group: int,
    weights: Sequence[Tensor],
    experts: Ints,
    form: WeightFormat,
) -> Iterator[_Guess]:
    """What might have been computed instead, the most special first."""
    activation, one = arithmetic.activation, torch.ones_like(route_weight)
    mine = _values(form, weights, group)
    yield "with the route weight applied twice", mine, route_weight**2, activation
    yield "without its route weight", mine, one, activation
    yield "with gate and up in each other's place", [mine[1], mine[0], mine[2]], route_weight, activation
    yield "with the other activation of SiLU and SiTU", mine, route_weight, SITU if activation is SILU else SILU
    others = [other for other in range(len(weights[0])) if other != group]
    if len(weights) > len(PROJECTIONS):
        for what, read in form.misreadings.items():
            misread = [*map(read, weights[: len(PROJECTIONS)]), *weights[len(PROJECTIONS) :]]
            yield what, _values(form, misread, group), route_weight, activation
        for other in others:
            what = f"with the scales of {_name(other, experts)}"
            yield what, _values(form, weights, group, other), route_weight, activation
    for other in others:
        yield f"of {_name(other, experts)}", _values(form, weights, other), route_weight, activation


def _name(group: int, experts: Ints) -> str:
    return f"group {group}" + (f", expert {experts[group]}" if experts[group] >= 0 else "")


def _values(form: WeightFormat, weights: Sequence[Tensor], group: int, scales: int | None = None) -> list[Tensor]:
    """One group's gate, up and down as numbers; packed ones under the scales of another group if that is given."""
    source = group if scales is None else scales
    count = len(PROJECTIONS)
    return form.values(
        [*(w[group] for w in weights[:count]), *(s[source] for s in weights[count:])], torch.float32
    )
