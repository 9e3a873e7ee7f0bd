"""Are the parts around the routed experts right? Router, latent projection, norm, shared expert, output.

Each is judged on the inputs that it was really given. A uniform factor on the routed sum all but vanishes in the
norm, so the sum before it is judged too (C1, C3, M1), and not only the output.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moonep_validate.data.k3 import NORM_EPS, SCALING_FACTOR
from moonep_validate.judge.checks import Compared, axes, differ, differ_bits
from moonep_validate.judge.facts import Step
from moonep_validate.judge.oracle import k3
from moonep_validate.judge.oracle.bounds import FLOAT32_BITS, rounding_variance, within
from moonep_validate.judge.registry import check

_ROUTE = axes("rank", "token", "k")
_ELEMENT = axes("rank", "token", "column")

#: (what receives, what it must be), as ``op.tensor``.
_WIRES = (
    ("latent.hidden", "router.hidden"),
    ("layer.hidden", "latent.out"),
    ("layer.topk_ids", "router.ids"),
    ("layer.topk_weights", "router.weights"),
    ("norm.routed", "layer.out"),
    ("shared.hidden", "router.hidden"),
    ("output.normed", "norm.out"),
    ("output.shared", "shared.out"),
)


def _scores(s: Step) -> tuple[Tensor, Tensor]:
    """Scores and their bounds from the router's inputs: ``[R, S, E]``."""
    return k3.scores(s.tap("router", "hidden"), s.tap("router", "gate")[0])


@check("Q1", "router", needs="full", bounded=True)
def router_choice(s: Step) -> Iterator[Compared]:
    """The router chooses the K distinct experts of largest score plus bias"""
    ids = s.tap("router", "ids").long().sort(dim=-1).values
    legal = (ids >= 0) & (ids < s.case.E)
    yield differ(f"chosen expert, in 0..{s.case.E - 1}", "legal", ids, _ROUTE, bad=~legal)
    again = torch.zeros_like(legal)
    again[..., 1:] = ids[..., 1:] == ids[..., :-1]
    yield differ("chosen expert, once a token", "another", ids, _ROUTE, bad=again)
    want, clear = k3.chosen(*_scores(s), s.tap("router", "bias")[0], s.case.K)
    yield differ("chosen expert, in ascending order", want, ids, _ROUTE, bad=clear[..., None] & (want != ids))


@check("Q2", "router", needs="full", bounded=True)
def router_weights(s: Step) -> Iterator[Compared]:
    """Route weights are the factor times the chosen scores, without bias, over their sum"""
    ids, got = s.tap("router", "ids").long().clamp(0, s.case.E - 1), s.tap("router", "weights").double()
    want, bound = k3.route_weights(*_scores(s), ids, SCALING_FACTOR)
    yield differ("route weight", want, got, _ROUTE, bad=~((got - want).abs() <= bound))


@check("Q3", "router", needs="full", bounded=True)
def router_weight_sum(s: Step) -> Iterator[Compared]:
    """The route weights of a token sum to the scaling factor"""
    got = s.tap("router", "weights").double().sum(dim=-1)
    # K quotients that sum to one, each with its rounding, those of the sum, of the division and of the factor.
    bound = SCALING_FACTOR * (s.case.K + 4) * 2.0**-FLOAT32_BITS
    bad = ~((got - SCALING_FACTOR).abs() <= bound)
    yield differ("sum of route weights", SCALING_FACTOR, got, axes("rank", "token"), bad=bad)


@check("T1", "latent", needs="full", bounded=True)
def latent_projection(s: Step) -> Iterator[Compared]:
    """Dispatched tokens are the latent projection of the full ones"""
    want, variance = k3.projected(s.tap("latent", "hidden"), s.tap("latent", "weight")[0])
    yield _bounded("latent token", want, s.tap("latent", "out"), variance)


@check("N1", "norm", needs="full", bounded=True)
def norm_after_sum(s: Step) -> Iterator[Compared]:
    """RMSNorm is applied once, to the sum over all experts and ranks"""
    want, variance = k3.rms_norm(s.tap("norm", "routed"), s.tap("norm", "weight")[0], NORM_EPS)
    yield _bounded("normed sum", want, s.tap("norm", "out"), variance)


@check("S1", "shared", needs="full", bounded=True)
def shared_expert(s: Step) -> Iterator[Compared]:
    """The shared expert sees the full tokens, and is neither weighted nor scaled"""
    matrices = [s.tap("shared", name)[0] for name in ("gate", "up", "down")]
    hidden, got = s.tap("shared", "hidden"), s.tap("shared", "out")
    want, variance = k3.shared_expert(hidden.flatten(0, 1), matrices)
    yield _bounded("shared output", want.view(got.shape), got, variance.view(got.shape))


@check("T2", "output", needs="full", bounded=True)
def up_projection(s: Step) -> Iterator[Compared]:
    """The normed sum goes through the up-projection"""
    want, variance = k3.projected(s.tap("output", "normed"), s.tap("output", "weight")[0])
    yield _bounded("up-projection", want, s.tap("output", "up"), variance)


@check("S2", "output", needs="full", bounded=True)
def whole_output(s: Step) -> Iterator[Compared]:
    """The output is the routed part plus the shared expert, each added once"""
    want = s.tap("output", "up").double() + s.tap("output", "shared").double()
    yield _bounded("output", want, s.tap("output", "out"), rounding_variance(want))


@check("M2", "output", needs="full", about_callers=True)
def parts_wired(s: Step) -> Iterator[Compared]:
    """Each part is given the very bits that the part before it returned"""
    for receives, gives in _WIRES:
        given, got = s.tap(*gives.split(".")), s.tap(*receives.split("."))
        yield differ_bits(f"{receives} against {gives}", given, got, axes("rank", "token", "column"))


def _bounded(what: str, want: Tensor, got: Tensor, variance: Tensor) -> Compared:
    return differ(what, want, got.double(), _ELEMENT, bad=~within(want, got.double(), variance))
