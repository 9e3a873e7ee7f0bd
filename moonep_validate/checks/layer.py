"""Is the whole layer the dense mixture of experts, without any knowledge of the plan?"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moonep_validate.checks import Compared, axes, check, differ
from moonep_validate.facts import Missing, Step
from moonep_validate.oracle.bounds import within
from moonep_validate.oracle.dense import dense_layer
from moonep_validate.problem import PROJECTIONS


@check("M1", "layer")
def dense_reference(s: Step) -> Iterator[Compared]:
    """The output equals the dense float64 reference"""
    hidden, topk_ids, topk_weights, got = (
        s.tap("layer", n) for n in ("hidden", "topk_ids", "topk_weights", "out")
    )
    weights = [s.tap("load", f"local_{name}").flatten(0, 1) for name in PROJECTIONS]
    if s.info("layer", "marked", False):  # the slots' down projection changed its sign: so does what they compute
        topk_weights = torch.where(torch.from_numpy(s.in_slot), -topk_weights, topk_weights)
    exact = s.case.fill.name == "ints"
    want, variance = dense_layer(hidden, topk_ids, topk_weights, weights, _rank_of(s), exact)
    bad = None if exact else ~within(want, got.double(), variance)
    yield differ("layer output", want, got.double(), axes("rank", "token", "column"), bad=bad)


def _rank_of(s: Step) -> torch.Tensor | None:
    """Where each route was computed, if known: partial sums are rounded once per destination rank."""
    try:
        return torch.from_numpy(s.rank_of)
    except Missing:
        return None
