"""Routing generators: each keeps exactly what its name promises, and refuses what it cannot keep."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.cases.layout import Ints, Layout
from moonep_validate.data import routing
from moonep_validate.data.routing import topk_ids
from moonep_validate.judge.oracle.plan import ExpectedPlan, make_plan

GEOMETRIES = (
    "genB+R4+E8+K2+S9",
    "genB+R4+E16+K4+S17",
    "genB+R3+E12+K5+S11+seed7",
    "genB+R4+E8+K11+S6",
    "genB+R5+E5+K3+S7",
    "genB+R2+E12+K12+S3",
    "genB+R4+E12+K3+S11+tokens:11,0,5,1",
    "genB+R3+E6+K8+S5+tokens:2,5,5",
    "genB+R3+E6+K2+S4+tokens:0,0,0",
)
ALONE = ("genB+R1+E4+K2+S9", "genB+R1+E3+K7+S5+tokens:4", "genB+R1+E1+K1+S1")
EVERYWHERE = pytest.mark.parametrize("geometry", GEOMETRIES + ALONE)
SEVERAL_RANKS = pytest.mark.parametrize("geometry", GEOMETRIES)


def case_of(geometry: str, routing: str) -> Case:
    return Case.parse(f"{geometry}+{routing}")


def ids_of(case: Case) -> torch.Tensor:
    """``[R, S, K]``, padding tokens included."""
    ids = torch.stack([topk_ids(case, rank) for rank in range(case.R)])
    assert ids.dtype == torch.int32
    assert ids.shape == (case.R, case.S, case.K)
    assert ids.min() >= 0
    assert ids.max() < case.E
    for rank in range(case.R):
        assert (ids[rank, case.token_count(rank) :] // case.experts_per_rank == rank).all()
    return ids.long()


def real_ids(case: Case) -> list[torch.Tensor]:
    """Per rank ``[token_count, K]``."""
    return [ids[: case.token_count(rank)] for rank, ids in enumerate(ids_of(case))]


def real_loads(case: Case) -> torch.Tensor:
    """Routes of real tokens to each expert: ``[E]``."""
    return torch.cat(real_ids(case)).flatten().bincount(minlength=case.E)


def home_loads(case: Case) -> list[int]:
    """Routes to each home as the planner sees them, padding tokens included: R values."""
    return (ids_of(case) // case.experts_per_rank).flatten().bincount(minlength=case.R).tolist()


def plan_of(case: Case) -> ExpectedPlan:
    return make_plan(ids_of(case).numpy(), Layout.of(case))


def chosen_twice(ids: torch.Tensor) -> int:
    """Tokens with an expert twice."""
    return sum(len(set(token)) < len(token) for token in ids.reshape(-1, ids.shape[-1]).tolist())


def in_turn(ids: torch.Tensor, pool: int) -> bool:
    """Whether tokens have distinct experts of a pool, then the same ones again in the same order."""
    size = min(pool, ids.shape[1])
    return not chosen_twice(ids[:, :size]) and ids.equal(ids[:, torch.arange(ids.shape[1]) % size])


@EVERYWHERE
def test_balanced_gives_every_home_exactly_s_times_k(geometry: str) -> None:
    """Padding tokens count for their home, so it holds for any token counts, and the planner moves nothing."""
    case = case_of(geometry, "balanced")
    assert home_loads(case) == [case.S * case.K] * case.R
    assert not plan_of(case).quotas.any()
    if case.tokens is None and case.K <= case.E:
        assert chosen_twice(ids_of(case)) == 0


def test_balanced_uses_all_experts_and_all_orders() -> None:
    ids = ids_of(case_of("genB+R4+E16+K4+S64", "balanced"))
    assert ids.flatten().bincount(minlength=16).min() > 0
    homes = ids // 4
    assert len(homes[..., 0].unique()) == 4
    assert len({tuple(token) for token in homes.flatten(0, 1).tolist()}) == 24


@SEVERAL_RANKS
def test_hot_rank_gets_everything(geometry: str) -> None:
    for home in (0, Case.parse(geometry).R - 1):
        case = case_of(geometry, f"hot_rank:{home}")
        for ids in real_ids(case):
            assert (ids // case.experts_per_rank == home).all()
            assert in_turn(ids, case.experts_per_rank)


def test_hot_rank_is_uniform_inside_the_home() -> None:
    loads = real_loads(case_of("genB+R2+E8+K1+S4000", "hot_rank:1"))
    assert loads[:4].tolist() == [0] * 4
    assert (loads[4:] / 8000 - 0.25).abs().max() < 0.02


@EVERYWHERE
def test_all_local_stays_at_home(geometry: str) -> None:
    case = case_of(geometry, "all_local")
    for rank, ids in enumerate(real_ids(case)):
        assert (ids // case.experts_per_rank == rank).all()
        assert in_turn(ids, case.experts_per_rank)
    assert home_loads(case) == [case.S * case.K] * case.R


@EVERYWHERE
def test_round_robin_counts_through_the_experts(geometry: str) -> None:
    case = case_of(geometry, "round_robin")
    size = case.S * case.K
    for rank, ids in enumerate(real_ids(case)):
        assert ids.flatten().tolist() == [(rank * size + i) % case.E for i in range(ids.numel())]


@EVERYWHERE
@pytest.mark.parametrize("routing", ["lognormal:0", "lognormal:1.5", "lognormal:100", "per_rank", "maxvio:0"])
def test_samples_are_without_replacement(geometry: str, routing: str) -> None:
    case = case_of(geometry, routing)
    assert all(in_turn(ids, case.E) for ids in real_ids(case))


def test_lognormal_sigma_is_the_spread_of_the_log_loads() -> None:
    for sigma in (0.0, 0.5, 1.0):
        loads = real_loads(case_of("genB+R2+E64+K1+S30000", f"lognormal:{sigma}"))
        assert abs(loads.double().log().std().item() - sigma) < 0.15 * sigma + 0.05


def test_lognormal_of_a_huge_sigma_is_the_same_for_all_tokens() -> None:
    ids = ids_of(case_of("genB+R2+E8+K1+S40", "lognormal:100"))
    assert len(ids.unique()) == 1


@pytest.mark.parametrize(
    "geometry",
    ["genB+R4+E16+K4+S64", "genB+R2+E64+K1+S300", "genB+R3+E12+K5+S40+tokens:40,0,21", "genB+R2+E4+K6+S50"],
)
def test_maxvio_is_met_to_one_route(geometry: str) -> None:
    """From the noise of the uniform routing to the limit, of the real tokens."""

    def max_vio(case: Case) -> float:
        loads = real_loads(case).double()
        return (loads.max() / loads.mean() - 1).item()

    case = Case.parse(geometry)
    lowest = max_vio(case_of(geometry, "maxvio:0"))
    highest = case.E * -(-case.K // case.E) / case.K - 1
    one_route = case.E / real_loads(case).sum().item()
    assert lowest < 0.8 * highest
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        wanted = lowest + share * (highest - lowest)
        assert abs(max_vio(case_of(geometry, f"maxvio:{wanted!r}")) - wanted) <= one_route * (1 + 1e-9)
    assert max_vio(case_of(geometry, "maxvio:1e-9")) == lowest


def test_maxvio_is_solved_once_per_case_at_the_largest_shape() -> None:
    case = case_of("genB+R16+E896+K16+S32", "maxvio:8.0")
    routing._sigma.cache_clear()
    ids_of(case)
    assert routing._sigma.cache_info().misses == 1


def test_maxvio_does_not_depend_on_the_cache() -> None:
    case = case_of("genB+R4+E16+K4+S17", "maxvio:1.5")
    first = ids_of(case)
    routing._sigma.cache_clear()
    assert topk_ids(case, 3).long().equal(first[3])


def test_per_rank_has_other_hot_experts_on_each_rank() -> None:
    case = case_of("genB+R8+E64+K1+S500", "per_rank")
    assert len({int(ids.flatten().bincount(minlength=64).argmax()) for ids in real_ids(case)}) >= 6
    together = real_loads(case).double()
    alone = real_ids(case)[0].flatten().bincount(minlength=64).double()
    assert alone.max() / alone.mean() > 2 * together.max() / together.mean()


@SEVERAL_RANKS
def test_empty_experts_get_no_real_token(geometry: str) -> None:
    experts = Case.parse(geometry).E
    for count in {1, experts // 2, experts - 1}:
        case = case_of(geometry, f"empty_experts:{count}")
        assert int((real_loads(case) == 0).sum()) >= count
        assert all(in_turn(ids, experts - count) for ids in real_ids(case))


def test_exactly_the_asked_number_of_experts_is_empty() -> None:
    empty = set()
    for seed, count in product((0, 2), (1, 5, 15)):
        case = case_of(f"genB+R4+E16+K4+S100+seed{seed}", f"empty_experts:{count}")
        assert int((real_loads(case) == 0).sum()) == count
        empty.add((count, tuple(real_loads(case).eq(0).tolist())))
    assert len(empty) == 6


@EVERYWHERE
def test_repeated_sends_a_token_to_one_expert(geometry: str) -> None:
    case = case_of(geometry, "repeated")
    assert all((ids == ids[:, :1]).all() for ids in real_ids(case))


def test_repeated_differs_between_tokens() -> None:
    assert real_loads(case_of("genB+R4+E8+K2+S50", "repeated")).min() > 0


@EVERYWHERE
def test_ties_deals_every_block_of_e_routes_to_each_expert_once(geometry: str) -> None:
    case = case_of(geometry, "ties")
    routes = torch.cat(real_ids(case)).flatten()
    for start in range(0, len(routes), case.E):
        block = routes[start : start + case.E].tolist()
        assert len(set(block)) == len(block)
        assert len(block) == case.E or start + case.E > len(routes)
    assert len(set(real_loads(case).tolist())) <= 1 + (len(routes) % case.E > 0)


def test_ties_orders_differ_between_blocks() -> None:
    routes = ids_of(case_of("genB+R4+E8+K2+S9", "ties")).flatten().view(-1, 8)
    assert len({tuple(block) for block in routes.tolist()}) == len(routes)


def test_ties_meet_the_planner_where_the_routes_do_not_divide() -> None:
    """Otherwise nothing moves, and no choice is ever made."""
    assert not plan_of(case_of("genB+R4+E8+K2+S9", "ties")).quotas.any()
    case = case_of("genB+R8+E32+K3+S9", "ties")
    surplus = np.array(home_loads(case)) - case.S * case.K
    assert (surplus == surplus.max()).sum() >= 2
    assert (surplus == surplus.min()).sum() >= 2
    assert plan_of(case).quotas.any()


def donors_that_receive(quotas: Ints) -> int:
    return int((quotas.any(axis=1) & quotas.any(axis=0)).sum())


@pytest.mark.parametrize("ranks", range(3, 9))
@pytest.mark.parametrize(
    ("per_rank", "top_k", "tokens"), [(1, 1, 2), (1, 2, 1), (2, 2, 9), (4, 8, 17), (2, 32, 5)]
)
def test_chain_makes_donors_that_receive(ranks: int, per_rank: int, top_k: int, tokens: int) -> None:
    case = Case.parse(f"genB+R{ranks}+E{ranks * per_rank}+K{top_k}+S{tokens}+chain")
    loads, size = home_loads(case), tokens * top_k
    assert loads[-1] == 0
    assert max(loads[:-1]) - min(loads[:-1]) <= 1
    assert sum(loads) == ranks * size
    links = donors_that_receive(plan_of(case).quotas)
    assert links >= 1
    if size >= ranks - 1:
        assert links == ranks - 2  # each donor but the last overdraws


@pytest.mark.parametrize(
    "sizes",
    ["R4+E12+K3+S11+tokens:11,0,5,1", "R3+E6+K8+S5+tokens:2,5,5", "R5+E5+K1+S9+tokens:0,0,2,0,1", "R8+E8+K2+S4"],
)
def test_chain_holds_with_padding_tokens(sizes: str) -> None:
    case = Case.parse(f"genB+{sizes}+chain")
    counts = [case.token_count(rank) for rank in range(case.R)]
    starved = case.R - 1 - counts[::-1].index(max(counts))
    loads = home_loads(case)
    assert loads.pop(starved) == (case.S - counts[starved]) * case.K
    assert max(loads) - min(loads) <= 1
    assert donors_that_receive(plan_of(case).quotas) >= 1


def test_chain_holds_in_both_generations() -> None:
    a, b = (Case.parse(f"gen{generation}+R4+E8+K2+S9+chain") for generation in "AB")
    assert np.array_equal(plan_of(a).quotas, plan_of(b).quotas)


@pytest.mark.parametrize(
    ("sizes", "remote"),
    [
        ("R2+E6+K2+S9", 2),
        ("R2+E16+K4+S17", 4),
        ("R3+E6+K2+S9", 2),
        ("R4+E8+K2+S9", 2),
        ("R4+E16+K4+S17", 3),
        ("R4+E8+K11+S6", 2),
        ("R8+E64+K8+S16", 7),
    ],
)
def test_overflow_needs_more_remote_experts_than_slots(sizes: str, remote: int) -> None:
    """With R-1 equal homes, ``E/R * (R-1)/R`` experts, rounded up, make the S*K rows of the starved rank."""
    case = Case.parse(f"genA+{sizes}+slots1+overflow")
    plan = plan_of(case)
    assert plan.remote_stats[:, 0].max() == plan.remote_stats[-1, 0] == remote > plan.layout.num_slots
    loads = real_loads(case)
    assert loads[-case.experts_per_rank :].sum() == 0
    assert loads[: -case.experts_per_rank].max() - loads[: -case.experts_per_rank].min() <= 1


@pytest.mark.parametrize("routing", ["chain", "overflow", "balanced"])
def test_dealt_routings_stay_legal_without_real_tokens(routing: str) -> None:
    geometry = "genB+R3+E12+K2+S4+tokens:0,0,0"
    if routing == "chain":
        with pytest.raises(CaseError, match="chain needs a rank with 2 real routes, not 0"):
            case_of(geometry, routing)
    else:
        assert home_loads(case_of(geometry, routing)) == [8, 8, 8]


@pytest.mark.parametrize("geometry", [GEOMETRIES[1], GEOMETRIES[6]])
@pytest.mark.parametrize(
    "word",
    ["balanced", "hot_rank:2", "all_local", "lognormal:1", "maxvio:1", "per_rank", "empty_experts:3", "repeated",
     "ties", "chain", "overflow"],
)  # fmt: skip
def test_ids_are_pure_and_follow_the_seed(geometry: str, word: str) -> None:
    case = case_of(geometry, word)
    assert ids_of(case).equal(ids_of(case))
    assert not ids_of(case).equal(ids_of(case.but(seed=1)))


def _always(ids: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    return ids


def test_a_broken_promise_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each generator but ``table`` is replaced by one whose loads are wrong."""
    words = ["uniform", "hot:5", "zipf:1", "all_remote", "balanced", "hot_rank:1", "all_local", "round_robin"]
    words += ["lognormal:1", "maxvio:1", "per_rank", "empty_experts:1", "repeated", "ties", "chain", "overflow"]
    for word in words:
        case = case_of("genB+R4+E16+K4+S17", word)
        empty = routing._emptied(case).nonzero()[0, 0] if word.startswith("empty") else 0
        wrong = torch.zeros(17, 4, dtype=torch.int64) + empty
        if word == "repeated":
            wrong[0, 0] = 1
        monkeypatch.setitem(routing._GENERATORS, case.routing.name, partial(_always, wrong))
        with pytest.raises(AssertionError, match=f"{case.routing}, rank 0: promise broken"):
            topk_ids(case, 0)
    assert {Case.parse(f"genB+R4+E16+K4+S17+{word}").routing.name for word in words} | {
        "table",
        "sampled",  # promises nothing: the ids are what an engine was given
    } == set(routing._GENERATORS)
    assert set(routing._PROMISES) == set(routing._GENERATORS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("R4+E8+K2+S9+hot_rank:4", "hot_rank: rank 4 is outside 0..3; raise R"),
        ("R4+E8+K2+S9+hot_rank:-1", "hot_rank: rank -1 is outside 0..3"),
        ("R4+E8+K2+S9+hot_rank", "'hot_rank' has 0 arguments; usage: hot_rank:RANK"),
        ("R4+E8+K2+S9+hot_rank:x", "'hot_rank:x' has an argument that is not a number"),
        ("R4+E8+K2+S9+balanced:1", "'balanced:1' has 1 arguments; usage: balanced"),
        ("R4+E8+K2+S9+lognormal:-1", "lognormal sigma -1.0: must be 0 to 100"),
        ("R4+E8+K2+S9+lognormal:nan", "lognormal sigma nan: must be 0 to 100"),
        ("R4+E8+K2+S9+maxvio:3.5", "maxvio 3.5: must be 0 to 3, where every token takes the same of E=8 experts"),
        ("R4+E8+K2+S9+maxvio:-0.1", "maxvio -0.1: must be 0 to 3"),
        ("R4+E8+K2+S9+maxvio:nan", "maxvio nan: must be 0 to 3"),
        ("R4+E8+K8+S9+maxvio:0.1", "maxvio 0.1: must be 0 to 0"),
        ("R4+E8+K12+S9+maxvio:0.4", "maxvio 0.4: must be 0 to 0.333333"),
        ("R4+E8+K2+S9+empty_experts:0", "empty_experts: 0 experts, must be 1 to E-1=7"),
        ("R4+E8+K2+S9+empty_experts:8", "empty_experts: 8 experts, must be 1 to E-1=7"),
        ("R1+E1+K2+S9+empty_experts:1", "empty_experts: 1 experts, must be 1 to E-1=0"),
        ("R2+E8+K2+S9+chain", "chain needs R >= 3, not R=2"),
        ("R3+E3+K1+S1+chain", "chain needs a rank with 2 real routes, not 1"),
        ("R3+E3+K1+S4+tokens:1,1,0+chain", "chain needs a rank with 2 real routes, not 1"),
        ("R1+E8+K2+S9+overflow", "overflow needs R >= 2 and E/R >= 2, not R=1 and E/R=8"),
        ("R4+E4+K2+S9+overflow", "overflow needs R >= 2 and E/R >= 2, not R=4 and E/R=1"),
        ("R2+E4+K2+S9+overflow", "one expert has 18 rows, as many as the S*K=18 that a rank receives"),
        ("R3+E6+K2+S1+overflow", "one expert has 2 rows, as many as the S*K=2 that a rank receives"),
    ],
)
def test_what_cannot_be_kept_is_refused(text: str, message: str) -> None:
    with pytest.raises(CaseError) as error:
        Case.parse(f"genB+{text}")
    assert message in str(error.value)
