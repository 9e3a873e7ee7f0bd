"""Who goes where? Expert ids of every token, as a pure function of a case.

Each generator fills ``[S, K]`` ids of one rank; padding tokens (index >= the rank's token count) then go to
experts of their own rank, so that they cost no redundant slot.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moonep_validate.case import Case
from moonep_validate.hashing import below, hashed, unit

_Generator = Callable[[Case, int], Tensor]


def topk_ids(case: Case, rank: int) -> Tensor:
    """Expert ids of one rank: int32 ``[S, K]`` on the CPU, each in ``[0, E)``.

    Ids of one token are distinct wherever the routing leaves at least K experts to choose from.
    """
    ids = _GENERATORS[case.routing.name](case, rank)
    count = case.token_count(rank)
    local = rank * case.experts_per_rank + torch.arange(case.K) % case.experts_per_rank
    ids[count:] = local
    return ids.to(torch.int32)


def _keys(case: Case, rank: int) -> Tensor:
    """A hash for each (token, expert) of a rank: int64 ``[S, E]``."""
    token = torch.arange(case.S)[:, None]
    return hashed("routing", case.seed, rank, token, torch.arange(case.E))


def _largest(scores: Tensor, top_k: int) -> Tensor:
    """Indices of the ``top_k`` largest scores per token; repeats in turn if there are fewer experts."""
    chosen = scores.topk(min(top_k, scores.shape[1]), dim=1).indices
    return chosen[:, torch.arange(top_k) % chosen.shape[1]]


def _uniform(case: Case, rank: int) -> Tensor:
    return _largest(unit(_keys(case, rank)), case.K)


def _hot(case: Case, rank: int) -> Tensor:
    expert = int(case.routing.args[0])
    scores = unit(_keys(case, rank))
    scores[:, expert] = 0.0
    ids = _largest(scores, case.K)
    position = below(hashed("hot", case.seed, rank, torch.arange(case.S)), case.K)
    ids[torch.arange(case.S), position] = expert
    return ids


def _zipf(case: Case, rank: int) -> Tensor:
    """Sample without replacement with P(expert) ~ place**-exponent, by the Gumbel top-k trick."""
    exponent = float(case.routing.args[0])
    place = hashed("zipf", case.seed, torch.arange(case.E)).argsort().argsort().double() + 1
    gumbel = -torch.log(-torch.log(unit(_keys(case, rank))))
    return _largest(gumbel - exponent * torch.log(place), case.K)


def _all_remote(case: Case, rank: int) -> Tensor:
    scores = unit(_keys(case, rank))
    first = rank * case.experts_per_rank
    remote = torch.ones(case.E, dtype=torch.bool)
    remote[first : first + case.experts_per_rank] = False
    return torch.arange(case.E)[remote][_largest(scores[:, remote], case.K)]


def _table(case: Case, rank: int) -> Tensor:
    size = case.S * case.K
    ids = case.routing.args[rank * size : (rank + 1) * size]
    return torch.tensor([int(expert) for expert in ids]).view(case.S, case.K)


_GENERATORS: dict[str, _Generator] = {
    "uniform": _uniform,
    "hot": _hot,
    "zipf": _zipf,
    "all_remote": _all_remote,
    "table": _table,
}
