"""Routing and problem data: what each generator promises, and that faults would show on it."""

from __future__ import annotations

import pytest
import torch

from moonep_validate.cases.case import Case
from moonep_validate.data.problem import PROJECTIONS, batch, expert_weights
from moonep_validate.data.routing import topk_ids
from moonep_validate.hashing import below, hashed, normal, unit
from moonep_validate.judge.oracle.arithmetic import Arithmetic
from moonep_validate.judge.oracle.dense import dense_layer
from moonep_validate.reference.experts import grouped_experts

BASE = Case.parse("genB+R4+E24+K5+S41+H40+I56")


def ids_of(case: Case) -> torch.Tensor:
    return torch.stack([topk_ids(case, rank) for rank in range(case.R)])


def distinct_in_token(ids: torch.Tensor) -> bool:
    return all(len(set(token)) == len(token) for token in ids.flatten(0, 1).tolist())


def test_hash_is_pinned_and_spreads() -> None:
    """The same values in every version and on every device: a change would rename every recorded case."""
    assert hashed("hidden", 3, 1, torch.tensor([0, 1])).tolist() == PINNED
    values = hashed("x", 0, torch.arange(200)[:, None], torch.arange(200))
    assert len(values.unique()) == values.numel()
    uniform = unit(values)
    assert 0 < uniform.min() < 0.001
    assert 0.999 < uniform.max() < 1
    assert abs(uniform.mean().item() - 0.5) < 0.01
    assert abs(normal(values).std().item() - 1) < 0.01
    assert below(values, 3).unique().tolist() == [0, 1, 2]


PINNED = [8208100117965656577, -4052293533462462480]


def test_uniform_ids_are_distinct_and_differ_per_rank() -> None:
    ids = ids_of(BASE)
    assert ids.shape == (4, 41, 5)
    assert ids.dtype == torch.int32
    assert distinct_in_token(ids)
    assert len({tuple(rank.flatten().tolist()) for rank in ids}) == 4
    assert ids.flatten().long().bincount(minlength=24).min() > 0


def test_ids_repeat_in_turn_only_where_k_exceeds_the_experts() -> None:
    ids = ids_of(Case.parse("genB+R2+E4+K6+S3"))
    assert all(
        sorted(token[:4]) == [0, 1, 2, 3] and token[4:] == token[:2] for token in ids.flatten(0, 1).tolist()
    )


def test_hot_expert_gets_one_route_of_each_token() -> None:
    ids = ids_of(BASE.but(routing=Case.parse("genB+R4+E24+K5+S41+hot:17").routing))
    assert (ids == 17).sum(dim=2).eq(1).all()
    assert distinct_in_token(ids)
    assert (ids == 17).nonzero()[:, 2].unique().tolist() == [0, 1, 2, 3, 4]


def test_zipf_follows_its_exponent() -> None:
    case = Case.parse("genB+R2+E8+K1+S4000+zipf:1.0")
    share = ids_of(case).flatten().long().bincount(minlength=8).sort(descending=True).values / 8000
    harmonic = sum(1 / place for place in range(1, 9))
    expected = torch.tensor([1 / place / harmonic for place in range(1, 9)])
    assert (share - expected).abs().max() < 0.02


def test_all_remote_leaves_home() -> None:
    ids = ids_of(Case.parse("genB+R4+E24+K5+S41+all_remote"))
    assert (ids // 6 != torch.arange(4)[:, None, None]).all()
    assert distinct_in_token(ids)


def test_table_is_taken_as_it_is() -> None:
    ids = ids_of(Case.parse("genB+R2+E6+K2+S2+table:5,0,1,2,3,3,4,1"))
    assert ids.tolist() == [[[5, 0], [1, 2]], [[3, 3], [4, 1]]]


def test_padding_tokens_stay_local_with_zero_weight() -> None:
    case = Case.parse("genB+R3+E6+K3+S4+H8+tokens:4,0,1+hot:0")
    for rank, real in enumerate((4, 0, 1)):
        tokens = batch(case, rank)
        assert (tokens.topk_ids[real:] // 2 == rank).all()
        assert (tokens.topk_weights[real:] == 0).all()
        assert (tokens.hidden[real:] == 0).all()
        assert (tokens.topk_weights[:real] > 0).all()


def test_a_token_keeps_its_values_when_the_case_shrinks() -> None:
    whole, part = BASE, BASE.but(S=17)
    assert batch(whole, 2).hidden[:17].equal(batch(part, 2).hidden)
    assert batch(whole, 2).topk_weights[:17].equal(batch(part, 2).topk_weights)


def test_weights_differ_per_expert_and_projection_and_belong_to_the_expert() -> None:
    whole = torch.cat([expert_weights(BASE, rank)["gate"] for rank in range(4)])
    assert len({expert.view(torch.int16).numpy().tobytes() for expert in whole}) == 24
    other = Case.parse("genB+R2+E24+K5+S41+H40+I56")
    assert whole.equal(torch.cat([expert_weights(other, rank)["gate"] for rank in range(2)]))
    assert not expert_weights(BASE, 0)["gate"].equal(expert_weights(BASE, 0, layer=1)["gate"])
    assert not expert_weights(BASE, 0)["gate"].equal(expert_weights(BASE, 0)["up"])


@pytest.mark.parametrize("top_k", [1, 2, 16, 32])
@pytest.mark.parametrize(("hidden", "intermediate"), [(8, 1), (24, 40), (896, 64)])
def test_ints_are_exact_in_any_order(top_k: int, hidden: int, intermediate: int) -> None:
    """BF16 experts equal float64, and a token's sum is exact in forward, reverse and pairwise order."""
    case = Case("B", 2, 4, top_k, 3, H=hidden, I=intermediate)
    weights = {name: torch.cat([expert_weights(case, rank)[name] for rank in range(2)]) for name in PROJECTIONS}
    tokens = [batch(case, rank) for rank in range(2)]
    x = torch.stack([t.hidden for t in tokens])
    ids, scale = torch.stack([t.topk_ids for t in tokens]), torch.stack([t.topk_weights for t in tokens])
    want, _ = dense_layer(x, ids, scale, list(weights.values()), None, Arithmetic(exact=True))
    order = ids.flatten().argsort(stable=True)
    rows = x.flatten(0, 1).repeat_interleave(top_k, 0)[order]
    ends = ids.flatten().long().bincount(minlength=4).cumsum(0)
    out = torch.empty_like(rows)
    out[order] = grouped_experts(rows, scale.flatten()[order], ends, list(weights.values()))
    terms = out.view(2, 3, top_k, hidden)
    for sequence in (range(top_k), reversed(range(top_k))):
        total = torch.zeros(2, 3, hidden, dtype=torch.bfloat16)
        for k in sequence:
            total = total + terms[:, :, k]
        assert total.double().equal(want)
    assert terms.double().sum(2).equal(want)
    assert want.abs().max() <= 4096
    assert (want != 0).any() or intermediate == 1


def test_ints_weights_are_mxfp4_values() -> None:
    """Each nonzero weight is an E2M1 value times one power of two per projection."""
    weights = expert_weights(BASE, 1)
    assert weights["gate"].abs().unique().tolist() == [0.0, 32.0, 96.0]  # (0, 1, 3) * 2**5
    assert weights["up"].abs().unique().tolist() == [0.0, 1.0]
    assert weights["down"].abs().unique().tolist() == [0.0, 1.0]
