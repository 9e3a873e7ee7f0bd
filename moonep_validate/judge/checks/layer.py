"""Is the whole layer the dense mixture of experts, without any knowledge of the plan?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from moonep_validate.cases.layout import Ints
from moonep_validate.judge.checks import Compared, Place, differ, differ_beyond, differ_bits
from moonep_validate.judge.facts import Absent, Missing, Step
from moonep_validate.judge.oracle.dense import dense_layer
from moonep_validate.judge.registry import check


@check("I16", "layer", needs="digest", about_callers=True)
def layer_rows(s: Step) -> Iterator[Compared]:
    """The layer returns the first rows of what combine returned"""
    rank, token = np.nonzero(s.real)
    index = torch.from_numpy(rank), torch.from_numpy(token)
    combined, out = s.tap("combine", "hidden"), s.tap("layer", "out")
    if not len(rank):
        raise Absent("no rank has a token in this step")
    most = int(token.argmax())
    if token[most] >= combined.shape[1]:
        where = {"rank": int(rank[most])}
        yield differ("tokens that combine returned", [token[most] + 1], [combined.shape[1]], lambda i: where)
        return
    yield differ_bits("layer output", combined[index], out[index], _place(rank, token))


@check("M1", "layer", needs="full", bounded=True)
def dense_reference(s: Step) -> Iterator[Compared]:
    """The layer equals a dense mixture of experts in float64, computed without the plan"""
    rank, token = np.nonzero(s.real)
    index = torch.from_numpy(rank), torch.from_numpy(token)
    hidden, ids, route_weights, got = (
        s.tap("layer", name)[index] for name in ("hidden", "topk_ids", "topk_weights", "out")
    )
    if not len(rank):
        raise Absent("no rank has a token in this step")
    route_weights = torch.where(ids < 0, 0, route_weights)  # an invalid route counts for nothing (I2)
    if s.info("layer", "marked", False):  # the slots' down projection changed its sign: so does what they compute
        route_weights = torch.where(torch.from_numpy(s.in_slot[rank, token]), -route_weights, route_weights)
    stored = [s.tap("load", f"local_{name}").flatten(0, 1) for name in s.stored_names("load", "local_")]
    weights = s.format.values(stored, torch.float32)  # of all experts: ``[E, rows, columns]``
    place = _rank_of(s, rank, token)
    want, variance = dense_layer(hidden, ids.clamp(min=0), route_weights, weights, place, s.arithmetic)
    yield differ_beyond("layer output", want, got.double(), variance, s.arithmetic, _place(rank, token))


def _place(rank: Ints, token: Ints) -> Place:
    """Index of a real token and column -> where it is."""
    return lambda i: {"rank": int(rank[i[0]]), "token": int(token[i[0]]), "column": i[1]}


def _rank_of(s: Step, rank: Ints, token: Ints) -> Tensor | None:
    """Where each route was computed, if known: partial sums are rounded once per destination rank."""
    try:
        return torch.from_numpy(s.rank_of[rank, token])
    except (Missing, IndexError):
        return None
