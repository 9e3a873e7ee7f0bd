"""Whose row is it? Wrong expert rows are compared with what usual mistakes give, so that a finding says which.

A remark is said only where one mistake alone gives all the rows: on integers a route weight that is left out or
applied twice and a factor of two are often the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b

import torch
from torch import Tensor

from moonep_validate.cases.layout import Ints
from moonep_validate.formats.weight_format import PROJECTIONS, WeightFormat
from moonep_validate.judge.oracle.activation import SILU, SITU, Activation
from moonep_validate.judge.oracle.arithmetic import Arithmetic
from moonep_validate.judge.oracle.dense import expert_rows
from moonep_validate.trace.trace import bits

_Guess = tuple[str, Sequence[Tensor], Tensor, Activation]
#: Powers of two that a row may be multiplied by: beyond these it is no usual mistake.
_TIMES = "times 2**"
_POWERS = (-3, -2, -1, 1, 2, 3)


def said_of(
    rows: tuple[Tensor, Tensor, Tensor],
    group: int,
    weights: Sequence[Tensor],
    experts: Ints,
    arithmetic: Arithmetic,
    form: WeightFormat,
) -> str:
    """A remark for a finding: the one mistake that gives these very rows; nothing if none does, or several do.

    Args:
        rows: wrong ones of one group: inputs ``[n, H]``, route weights ``[n]``, and the outputs ``[n, H]`` float64
            that came.
        group: of the rows.
        weights: of all groups, with scales if packed.
        experts: expert of each group, -1 where that is not known.
        arithmetic: see ``oracle.dense.gated_mlp``.
        form: how the weights are stored.
    """
    x, route_weights, got = rows
    fitting = []
    for text, mine, factors, activation in _guesses(arithmetic, route_weights, group, weights, experts, form):
        supposed = replace(arithmetic, activation=activation)
        want, variance = expert_rows(x, mine, factors, supposed)
        if not bool(supposed.wrong(want, got, variance).any()):
            fitting.append(text)
    named = [text for text in fitting if not text.startswith(_TIMES)]
    alone = fitting if not named or "route weight" in named[0] else named  # scales may well be a factor
    return f"; it is the row {alone[0]}" if len(alone) == 1 else ""


def _guesses(
    arithmetic: Arithmetic,
    route_weights: Tensor,
    group: int,
    weights: Sequence[Tensor],
    experts: Ints,
    form: WeightFormat,
) -> Iterator[_Guess]:
    """What might have been computed instead."""
    activation, one = arithmetic.activation, torch.ones_like(route_weights)
    mine = _values(form, weights, group)
    yield "with the route weight applied twice", mine, route_weights**2, activation
    yield "without its route weight", mine, one, activation
    yield "with gate and up in each other's place", [mine[1], mine[0], mine[2]], route_weights, activation
    yield "with the other activation of SiLU and SiTU", mine, route_weights, SITU if activation is SILU else SILU
    for power in _POWERS:
        yield f"{_TIMES}{power}", mine, route_weights * 2.0**power, activation
    others = _distinct(weights, group)
    if len(weights) > len(PROJECTIONS):
        for what, read in form.misreadings.items():
            misread = [*map(read, weights[: len(PROJECTIONS)]), *weights[len(PROJECTIONS) :]]
            yield what, _values(form, misread, group), route_weights, activation
        for other in others:
            what = f"with the scales of {_name(other, experts)}"
            yield what, _values(form, weights, group, other), route_weights, activation
    for other in others:
        yield f"of {_name(other, experts)}", _values(form, weights, other), route_weights, activation


def _distinct(weights: Sequence[Tensor], group: int) -> list[int]:
    """The other groups, one of those with the same bytes: a slot holds its expert's."""
    first: dict[tuple[bytes, ...], int] = {}
    for other in range(len(weights[0])):
        if other != group:
            key = tuple(blake2b(bits(w[other]).numpy().tobytes()).digest() for w in weights)
            first.setdefault(key, other)
    return list(first.values())


def _name(group: int, experts: Ints) -> str:
    return f"group {group}" + (f", expert {experts[group]}" if experts[group] >= 0 else "")


def _values(form: WeightFormat, weights: Sequence[Tensor], group: int, scales: int | None = None) -> list[Tensor]:
    """One group's gate, up and down as numbers; packed ones under the scales of another group if that is given."""
    source = group if scales is None else scales
    count = len(PROJECTIONS)
    return form.values(
        [*(w[group] for w in weights[:count]), *(s[source] for s in weights[count:])], torch.float32
    )
