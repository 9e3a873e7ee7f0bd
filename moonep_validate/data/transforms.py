"""Which inputs are the same problem from another side? Tokens that move, routes that split, weights that change.

What a scenario does with them it promises as data (``trace.Relation``), so that a wrong layer contradicts itself
and no oracle is needed: at the geometry of Kimi-K3, too. A place is a token's number ``rank * S + token``, or -1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.data.problem import PROJECTIONS, Batch, batch, expert_weights, shifted
from moonep_validate.hashing import hashed

Places = list[list[int]]
NOWHERE = -1


@dataclass(frozen=True)
class Weights:
    """A layer whose experts have the weights of another layer's experts, transformed.

    Attributes:
        layer: which layer's.
        origin: which expert's weights each of the E experts has; None leaves them in place.
        factors: what the down projection of each of the E experts is multiplied with, -1, 0 or 1; None is 1.
            Not 2: a sum of the fill ``ints`` may use all 8 bits of BF16, and only these factors let none grow.
    """

    layer: int = 0
    origin: tuple[int, ...] | None = None
    factors: tuple[int, ...] | None = None


def transformed_weights(case: Case, rank: int, weights: Weights) -> dict[str, Tensor]:
    """As ``problem.expert_weights``, of a layer with transformed weights."""
    factors = weights.factors or (1,) * case.E
    assert set(factors) <= {-1, 0, 1}, f"factors {sorted(set(factors))}: others than -1, 0, 1 may leave 8 bits"
    own = range(rank * case.experts_per_rank, (rank + 1) * case.experts_per_rank)
    origin = torch.tensor([weights.origin[expert] if weights.origin else expert for expert in own])
    mine = {name: whole[origin] for name, whole in _all_experts(case, weights.layer).items()}
    mine["down"] *= torch.tensor([factors[expert] for expert in own])[:, None, None]
    return mine


@lru_cache(maxsize=1)
def _all_experts(case: Case, layer: int) -> dict[str, Tensor]:
    """Weights of all ranks' experts, not to be changed."""
    parts = [expert_weights(case, rank, layer) for rank in range(case.R)]
    return {name: torch.cat([part[name] for part in parts]) for name in PROJECTIONS}


def in_place(case: Case) -> Places:
    """Each real token where it is."""
    return [_places(case, rank, range(case.token_count(rank))) for rank in range(case.R)]


def permuted(case: Case) -> Places:
    """The real tokens of each rank in another order."""
    return [
        _places(case, rank, _permutation("tokens", case, case.token_count(rank), rank)) for rank in range(case.R)
    ]


def rotated(case: Case) -> Places:
    """Each rank has the tokens of the next one."""
    places = in_place(case)
    return places[1:] + places[:1]


def half(case: Case, second: bool) -> Places:
    """The first or the second half of each rank's real tokens, and nothing else."""
    places = []
    for rank in range(case.R):
        count = case.token_count(rank)
        places.append(_places(case, rank, range(count // 2, count) if second else range(count // 2)))
    return places


def every_other(case: Case) -> Places:
    """Every other real token where it is, the first of even ranks among them."""
    return [
        [place if (token + rank) % 2 == 0 else NOWHERE for token, place in enumerate(places)]
        for rank, places in enumerate(in_place(case))
    ]


def _places(case: Case, rank: int, tokens: range | list[int]) -> list[int]:
    return [rank * case.S + token for token in tokens] + [NOWHERE] * (case.S - len(tokens))


def _permutation(name: str, case: Case, size: int, *index: int) -> list[int]:
    """Another order of ``range(size)``; the same one only where there is no other."""
    order: list[int] = hashed(name, case.seed, *index, torch.arange(size)).argsort().tolist()
    return order if order != list(range(size)) else order[::-1]


def taken(case: Case, rank: int, places: Places) -> Batch:
    """The tokens of some places, as a rank's batch; places of no token come last and are padding.

    Padding goes to experts of the rank itself, with route weight 0.
    """
    mine = torch.tensor([place for place in places[rank] if place != NOWHERE], dtype=torch.long)
    batches = [batch(case, other) for other in range(case.R)]
    own = rank * case.experts_per_rank + torch.arange(case.K) % case.experts_per_rank
    made = Batch(
        hidden=torch.zeros_like(batches[0].hidden),
        topk_ids=own.to(torch.int32).repeat(case.S, 1),
        topk_weights=torch.zeros_like(batches[0].topk_weights),
        tokens=len(mine),
    )
    for name in ("hidden", "topk_ids", "topk_weights"):
        everybody = torch.cat([getattr(given, name) for given in batches])
        getattr(made, name)[: len(mine)] = everybody[mine]
    return made


def labels(case: Case) -> list[int]:
    """A new number for each expert."""
    return _permutation("labels", case, case.E)


def relabelled(case: Case, rank: int) -> Batch:
    """The rank's tokens, routed to the experts' new numbers."""
    tokens = batch(case, rank)
    ids = torch.tensor(labels(case), dtype=torch.int32)[tokens.topk_ids.long()]
    return replace(tokens, topk_ids=ids)


def relabelled_weights(case: Case) -> Weights:
    """The experts' weights under their new numbers."""
    old = {new: expert for expert, new in enumerate(labels(case))}
    return Weights(origin=tuple(old[new] for new in range(case.E)))


def scaled_weights(case: Case, factor: int) -> Weights:
    """The down projection of every other expert times -1, 0 or 1."""
    return Weights(factors=tuple(factor if expert % 2 else 1 for expert in range(case.E)))


def others_changed(case: Case, rank: int, kept: Places) -> Batch:
    """Other hidden values and route weights for all real tokens but the kept ones; the routing stays."""
    tokens, others = batch(case, rank), shifted(case, rank)
    keep = torch.tensor(kept[rank])[:, None] != NOWHERE
    hidden = torch.where(keep, tokens.hidden, others.hidden)
    return replace(
        tokens,
        hidden=hidden,
        topk_weights=torch.where(keep, tokens.topk_weights, tokens.topk_weights.flip(1)),
    )


def some_routes(case: Case, rank: int, odd: bool, elsewhere: bool = False) -> Batch:
    """The rank's tokens with weight 0 for the routes of even k, or of odd k.

    Args:
        case, rank: whose.
        odd: which k keep their weights.
        elsewhere: send the routes of weight 0 to the next expert.
    """
    tokens = batch(case, rank)
    keep = torch.arange(case.K) % 2 == int(odd)
    ids = torch.where(keep, tokens.topk_ids, (tokens.topk_ids + 1) % case.E) if elsewhere else tokens.topk_ids
    weights = torch.where(keep, tokens.topk_weights, 0.0)
    return replace(tokens, topk_ids=ids.to(torch.int32), topk_weights=weights)


def first_expert(case: Case, rank: int, twice: bool) -> Batch:
    """The rank's tokens, which take their first expert twice with weight 1/2, or once with weight 1.

    The second route is the other one of these; once, it goes where it went, with weight 0.
    """
    tokens = batch(case, rank)
    ids, weights = tokens.topk_ids.clone(), tokens.topk_weights.clone()
    weights[: tokens.tokens, 0], weights[: tokens.tokens, 1] = 1.0, 0.0
    if twice:
        ids[:, 1] = ids[:, 0]
        weights[: tokens.tokens, :2] = 0.5
    return replace(tokens, topk_ids=ids, topk_weights=weights)
