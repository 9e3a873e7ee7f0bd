"""Who goes where? Expert ids of every token, as a pure function of a case.

Each generator fills the ids of one rank, at least those of its real tokens; padding tokens (index >= the rank's
token count) then go to experts of their own rank, so that they cost no redundant slot. What a generator promises
about the loads of the experts is asserted each time it runs: a routing that is not what its name says would make
the case around it mean something else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.hashing import below, hashed, normal, unit

_Generator = Callable[[Case, int], Tensor]  # [S, K] or only the real tokens, [token_count, K]
_Promise = Callable[[Case, int, Tensor], bool]  # of [E], the routes of one rank's real tokens to each expert

#: Under a log-normal law of this sigma the most popular tenth draws three quarters: each rank has favourites.
_PER_RANK_SIGMA = 2.0
#: 1024 / 2**36 is far below what changes a single choice.
_BISECTIONS = 36
_MAX_SIGMA = 1024.0  # each token takes the most popular experts, whatever its Gumbel noise


def topk_ids(case: Case, rank: int) -> Tensor:
    """Expert ids of one rank: int32 ``[S, K]`` on the CPU, each in ``[0, E)``.

    Ids of one token are distinct wherever the routing leaves at least K experts to choose from; ``repeated``,
    ``ties``, ``chain`` and ``overflow`` do not promise that, ``balanced`` only without padding tokens.
    """
    name, count = case.routing.name, case.token_count(rank)
    real = _GENERATORS[name](case, rank)[:count]
    loads = real.flatten().bincount(minlength=case.E)
    assert len(loads) == case.E, f"{case.routing}, rank {rank}: id {len(loads) - 1} is outside 0..{case.E - 1}"
    assert int(loads.sum()) == count * case.K, f"{case.routing}, rank {rank}: not K={case.K} ids for each token"
    assert _PROMISES[name](case, rank, loads), f"{case.routing}, rank {rank}: promise broken by {loads.tolist()}"
    local = rank * case.experts_per_rank + torch.arange(case.K) % case.experts_per_rank
    return torch.cat([real, local.expand(case.S - count, case.K)]).to(torch.int32)


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
    others = torch.arange(case.E) != expert
    if not others.any():
        return torch.full((case.S, case.K), expert)
    ids = torch.arange(case.E)[others][_largest(unit(_keys(case, rank))[:, others], case.K)]
    position = below(hashed("hot", case.seed, rank, torch.arange(case.S)), case.K)
    ids[torch.arange(case.S), position] = expert
    return ids


def _zipf(case: Case, rank: int) -> Tensor:
    """Sample without replacement with P(expert) ~ place**-exponent, by the Gumbel top-k trick."""
    exponent = float(case.routing.args[0])
    place = hashed("zipf", case.seed, torch.arange(case.E)).argsort().argsort().double() + 1
    return _largest(_gumbel(case, rank) - exponent * torch.log(place), case.K)


def _gumbel(case: Case, rank: int) -> Tensor:
    """Gumbel noise of each (token, expert) of a rank: float64 ``[S, E]``."""
    return -torch.log(-torch.log(unit(_keys(case, rank))))


def _log_popularity(name: str, case: Case, *indices: int) -> Tensor:
    """Normal values, one per expert: float64 ``[E]``."""
    return normal(hashed(name, case.seed, *indices, torch.arange(case.E))).double()


def _lognormal(case: Case, rank: int) -> Tensor:
    """Sample without replacement with P(expert) ~ exp(sigma * normal)."""
    sigma = float(case.routing.args[0])
    return _largest(_gumbel(case, rank) + sigma * _log_popularity("lognormal", case), case.K)


def _maxvio(case: Case, rank: int) -> Tensor:
    return _largest(_gumbel(case, rank) + _sigma(case) * _log_popularity("maxvio", case), case.K)


@lru_cache(maxsize=64)
def _sigma(case: Case) -> float:
    """The sigma whose log-normal popularity brings MaxVio of the case's real tokens nearest to the asked value.

    MaxVio is largest load / mean load - 1 over all ranks. It steps by E / routes and cannot fall below the noise
    of the uniform routing (sigma 0), so a smaller value yields that routing.
    """
    wanted = float(case.routing.args[0])
    gumbel = torch.cat([_gumbel(case, rank)[: case.token_count(rank)] for rank in range(case.R)])
    if not len(gumbel):
        return 0.0
    popularity = _log_popularity("maxvio", case)
    step = case.E / (len(gumbel) * case.K)

    def max_vio(sigma: float) -> float:
        chosen = _largest(gumbel + sigma * popularity, case.K)
        return int(chosen.flatten().bincount().max()) * step - 1

    low, high = 0.0, _MAX_SIGMA
    seen = {low: max_vio(low), high: max_vio(high)}
    bracketed = seen[low] <= wanted <= seen[high]
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        seen[middle] = max_vio(middle)
        low, high = (middle, high) if seen[middle] < wanted else (low, middle)
    best = min(seen, key=lambda sigma: abs(seen[sigma] - wanted))
    assert not bracketed or abs(seen[best] - wanted) <= step, f"{case.routing}: MaxVio is {seen[best]}"
    return best


def _per_rank(case: Case, rank: int) -> Tensor:
    """As ``lognormal``, with other popular experts on each rank."""
    return _largest(_gumbel(case, rank) + _PER_RANK_SIGMA * _log_popularity("per_rank", case, rank), case.K)


def _all_remote(case: Case, rank: int) -> Tensor:
    scores = unit(_keys(case, rank))
    first = rank * case.experts_per_rank
    remote = torch.ones(case.E, dtype=torch.bool)
    remote[first : first + case.experts_per_rank] = False
    return torch.arange(case.E)[remote][_largest(scores[:, remote], case.K)]


def _at_home(case: Case, rank: int, home: int) -> Tensor:
    """Uniform among the experts of one home rank."""
    first = home * case.experts_per_rank
    return first + _largest(unit(_keys(case, rank))[:, first : first + case.experts_per_rank], case.K)


def _empty_experts(case: Case, rank: int) -> Tensor:
    kept = torch.arange(case.E)[~_emptied(case)]
    return kept[_largest(unit(_keys(case, rank))[:, kept], case.K)]


def _emptied(case: Case) -> Tensor:
    """Which experts no real token is routed to: bool ``[E]``."""
    order = hashed("empty_experts", case.seed, torch.arange(case.E)).argsort()
    empty = torch.zeros(case.E, dtype=torch.bool)
    empty[order[: int(case.routing.args[0])]] = True
    return empty


def _repeated(case: Case, rank: int) -> Tensor:
    expert = below(hashed("repeated", case.seed, rank, torch.arange(case.S)), case.E)
    return expert[:, None].expand(case.S, case.K)


def _round_robin(case: Case, rank: int) -> Tensor:
    size = case.S * case.K
    return ((rank * size + torch.arange(size)) % case.E).view(case.S, case.K)


def _ties(case: Case, rank: int) -> Tensor:
    """Deal the real routes of all ranks in blocks of E, each a permutation of the experts."""
    first, count = _first_route(case, rank), case.token_count(rank)
    begin, end = first // case.E, -(-(first + count * case.K) // case.E)
    block = torch.arange(begin, end)[:, None]
    experts = hashed("ties", case.seed, block, torch.arange(case.E)).argsort(dim=1).flatten()
    start = first - begin * case.E
    return experts[start : start + count * case.K].view(count, case.K)


def _balanced(case: Case, rank: int) -> Tensor:
    return _inside_homes(case, rank, _dealt(case, rank, _own_loads(case)))


def _own_loads(case: Case) -> tuple[int, ...]:
    """Real routes that each home gets to hold S*K, since its own padding tokens take the rest: R values."""
    return tuple(case.token_count(home) * case.K for home in range(case.R))


def _chain(case: Case, rank: int) -> Tensor:
    """One starved rank. What it lacks is more than any donor can spare, so the next donor must refill that one."""
    return _inside_homes(case, rank, _dealt(case, rank, _starving_loads(case)))


def _overflow(case: Case, rank: int) -> Tensor:
    """As ``chain``, but even inside a home: no expert alone has the rows that the starved rank lacks.

    With all routes on one rank, an expert would have R*S*K / (E/R) rows, and one would do unless E/R > R.
    """
    return _shuffled(case, rank, _dealt(case, rank, _overflow_loads(case)))


def _starving_loads(case: Case) -> tuple[int, ...]:
    """Real routes to each home (R values): one rank has none, the others, with padding tokens, equally many.

    The starved rank is the last of those with the most real tokens, since its padding tokens stay with it.
    """
    counts = [case.token_count(rank) for rank in range(case.R)]
    starved = max(range(case.R), key=lambda rank: (counts[rank], rank))
    others = [home for home in range(case.R) if home != starved]
    routes = case.R * case.S * case.K - (case.S - counts[starved]) * case.K
    loads = dict(zip(others, _split(routes, len(others)), strict=True))
    return tuple(loads[home] - (case.S - counts[home]) * case.K if home in loads else 0 for home in range(case.R))


def _overflow_loads(case: Case) -> tuple[int, ...]:
    """Real routes to each expert: E values."""
    return tuple(load for home in _starving_loads(case) for load in _split(home, case.experts_per_rank))


def _split(total: int, parts: int) -> list[int]:
    """As equal as possible, the larger parts first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def _first_route(case: Case, rank: int) -> int:
    """Place of a rank's first real route among those of all ranks, in order of rank, token, k."""
    return sum(case.token_count(earlier) for earlier in range(rank)) * case.K


def _dealt(case: Case, rank: int, loads: tuple[int, ...]) -> Tensor:
    """The bin (a home or an expert) of each real route of a rank, so that bin b gets ``loads[b]`` over all ranks.

    Returns:
        int64 ``[token_count, K]``.
    """
    first, count = _first_route(case, rank), case.token_count(rank)
    return _deal(loads)[first : first + count * case.K].view(count, case.K).long()


@lru_cache(maxsize=2)  # the ranks of a case ask one after the other
def _deal(loads: tuple[int, ...]) -> Tensor:
    """Each bin b ``loads[b]`` times, spread evenly; equal loads give 0, 1, 2, ... in turn.

    Returns:
        int32 ``[sum(loads)]``.
    """
    size = torch.tensor(loads)
    bins = torch.arange(len(loads)).repeat_interleave(size)
    turn = torch.arange(len(bins)) - (size.cumsum(0) - size)[bins]
    order = ((turn + 0.5).double() / size[bins]).argsort(stable=True)
    dealt = bins[order].to(torch.int32)
    assert dealt.bincount(minlength=len(loads)).equal(size), f"dealt routes do not add up to {loads}"
    return dealt


def _inside_homes(case: Case, rank: int, home: Tensor) -> Tensor:
    """An expert of each given home, distinct in a token while a home has enough: int64 ``[token_count, K]``.

    Args:
        home: ``[token_count, K]``.
    """
    token = torch.arange(len(home))[:, None]
    start = below(hashed("inside", case.seed, rank, token, home), case.experts_per_rank)
    earlier = torch.ones(case.K, case.K, dtype=torch.bool).tril(-1)
    met = ((home[:, :, None] == home[:, None, :]) & earlier).sum(dim=2)
    return _shuffled(case, rank, home * case.experts_per_rank + (start + met) % case.experts_per_rank)


def _shuffled(case: Case, rank: int, ids: Tensor) -> Tensor:
    """The ids ``[token_count, K]`` of each token in hashed order, so that choice k is not tied to a home."""
    token = torch.arange(len(ids))[:, None]
    return ids.gather(1, hashed("order", case.seed, rank, token, torch.arange(case.K)).argsort(dim=1))


def _table(case: Case, rank: int) -> Tensor:
    size = case.S * case.K
    ids = case.routing.args[rank * size : (rank + 1) * size]
    return torch.tensor([int(expert) for expert in ids]).view(case.S, case.K)


def _sampled(case: Case, rank: int) -> Tensor:
    raise CaseError(f"{case.routing}: {case.refusal}")


def _no_expert_twice(case: Case, rank: int, loads: Tensor, pool: int | None = None) -> bool:
    """No expert has more routes than if each token takes distinct ones of ``pool`` experts, or all in turn."""
    return int(loads.max()) <= case.token_count(rank) * -(-case.K // (pool or case.E))


def _only_home(case: Case, rank: int, loads: Tensor, home: int) -> bool:
    """All routes go to one home, to no expert of it twice."""
    routes = _home_loads(case, loads)[home]
    return bool(routes == loads.sum()) and _no_expert_twice(case, rank, loads, case.experts_per_rank)


def _home_loads(case: Case, loads: Tensor) -> Tensor:
    """``[R]``."""
    return loads.view(case.R, -1).sum(dim=1)


def _as_dealt(case: Case, rank: int, loads: Tensor, dealt: tuple[int, ...]) -> bool:
    """The loads, of experts or homes as ``dealt``, are this rank's part of what was dealt over all ranks."""
    return loads.equal(_dealt(case, rank, dealt).flatten().bincount(minlength=len(dealt)))


def _spread(loads: Tensor) -> int:
    return int(loads.max() - loads.min())


_GENERATORS: dict[str, _Generator] = {
    "uniform": _uniform,
    "hot": _hot,
    "zipf": _zipf,
    "all_remote": _all_remote,
    "table": _table,
    "balanced": _balanced,
    "hot_rank": lambda case, rank: _at_home(case, rank, int(case.routing.args[0])),
    "all_local": lambda case, rank: _at_home(case, rank, rank),
    "round_robin": _round_robin,
    "lognormal": _lognormal,
    "maxvio": _maxvio,
    "per_rank": _per_rank,
    "empty_experts": _empty_experts,
    "repeated": _repeated,
    "ties": _ties,
    "chain": _chain,
    "overflow": _overflow,
    "sampled": _sampled,
}

_PROMISES: dict[str, _Promise] = {
    "uniform": _no_expert_twice,
    "hot": lambda case, rank, loads: int(loads[int(case.routing.args[0])]) >= case.token_count(rank),
    "zipf": _no_expert_twice,
    "all_remote": lambda case, rank, loads: int(_home_loads(case, loads)[rank]) == 0,
    "table": lambda case, rank, loads: True,  # the ids are the case itself
    "balanced": lambda case, rank, loads: _as_dealt(case, rank, _home_loads(case, loads), _own_loads(case)),
    "hot_rank": lambda case, rank, loads: _only_home(case, rank, loads, int(case.routing.args[0])),
    "all_local": lambda case, rank, loads: _only_home(case, rank, loads, rank),
    "round_robin": lambda case, rank, loads: _spread(loads) <= 1,
    "lognormal": _no_expert_twice,
    "maxvio": _no_expert_twice,  # MaxVio itself needs all ranks: _sigma asserts it
    "per_rank": _no_expert_twice,
    "empty_experts": lambda case, rank, loads: int(loads[_emptied(case)].sum()) == 0,
    "repeated": lambda case, rank, loads: bool((loads % case.K == 0).all()),
    "ties": lambda case, rank, loads: _spread(loads) <= 2,  # a part of a block at either end
    "chain": lambda case, rank, loads: _as_dealt(case, rank, _home_loads(case, loads), _starving_loads(case)),
    "overflow": lambda case, rank, loads: _as_dealt(case, rank, loads, _overflow_loads(case)),
    "sampled": lambda case, rank, loads: True,
}
