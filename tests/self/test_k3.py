"""The model k3: data whose router gives the case's routing, an oracle that a plain loop confirms, and refusals."""

from __future__ import annotations

import math

import pytest
import torch

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.data.k3 import NORM_EPS, SCALING_FACTOR, model_hidden, model_weights, model_width
from moonep_validate.data.problem import batch
from moonep_validate.data.routing import topk_ids
from moonep_validate.doors.repro import standalone
from moonep_validate.judge.facts import Step
from moonep_validate.judge.oracle import k3 as oracle
from moonep_validate.judge.oracle.activation import SILU, SITU
from moonep_validate.judge.stages import owned_by
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.record import record
from moonep_validate.pipeline.run import run_case
from moonep_validate.reference import k3 as model
from moonep_validate.subjects import REFERENCE, module_subject
from moonep_validate.trace.trace import Part

SIZES = "genB+R4+E12+K3+S7+H24+I20+pad5+fill:real+k3"
CASE = Case.parse(f"{SIZES}+zipf:1.0")


@pytest.mark.parametrize("routing", ["uniform", "hot:1", "zipf:2.0", "balanced", "round_robin", "all_remote"])
def test_the_router_chooses_the_ids_of_the_routing_word_in_their_order(routing: str) -> None:
    case = Case.parse(f"{SIZES}+{routing}")
    weights = model_weights(case)
    for rank in range(case.R):
        ids, _ = model.route(model_hidden(case, rank, batch(case, rank)), weights.gate, weights.bias, case.K)
        assert torch.equal(ids, topk_ids(case, rank))


def test_widths_and_dtypes_of_the_data() -> None:
    assert model_width(CASE) == 48
    assert model_width(CASE.but(E=28)) == 24 + 32
    weights, hidden = model_weights(CASE), model_hidden(CASE, 1, batch(CASE, 1))
    assert (tuple(hidden.shape), hidden.dtype) == ((7, 48), torch.bfloat16)
    assert [tuple(matrix.shape) for matrix in weights.shared] == [(40, 48), (40, 48), (48, 40)]
    assert (tuple(weights.gate.shape), weights.bias.dtype) == ((12, 48), torch.float32)
    assert not torch.equal(model_weights(CASE, 1).bias, weights.bias)
    assert not torch.equal(model_weights(CASE.but(seed=1)).gate, weights.gate)


def test_a_rounded_or_forgotten_bias_changes_the_choice_for_most_tokens() -> None:
    case = Case.parse("genB+R2+E32+K4+S64+fill:real+k3")
    weights, hidden = model_weights(case), model_hidden(case, 0, batch(case, 0))
    right, _ = model.route(hidden, weights.gate, weights.bias, case.K)
    for bias in (torch.zeros_like(weights.bias), weights.bias.bfloat16().float()):
        wrong, _ = model.route(hidden, weights.gate, bias, case.K)
        assert (right.sort().values != wrong.sort().values).any(dim=1).float().mean() > 0.5
    shifted, same = model.route(hidden, weights.gate, weights.bias + 1, case.K)
    assert torch.equal(shifted, right)
    assert torch.equal(same, model.route(hidden, weights.gate, weights.bias, case.K)[1])


def test_oracle_of_the_router_equals_a_plain_loop() -> None:
    weights, hidden = model_weights(CASE), model_hidden(CASE, 2, batch(CASE, 2))
    score, error = oracle.scores(hidden, weights.gate)
    ids, clear = oracle.chosen(score, error, weights.bias, CASE.K)
    got, bound = oracle.route_weights(score, error, ids, SCALING_FACTOR)
    assert bool(clear.all())
    for token, row in enumerate(hidden.double().tolist()):
        scores = [
            1 / (1 + math.exp(-sum(x * g for x, g in zip(row, gate, strict=True))))
            for gate in weights.gate.double().tolist()
        ]
        order = sorted(range(CASE.E), key=lambda e: -(scores[e] + float(weights.bias[e])))
        chosen = sorted(order[: CASE.K])
        assert ids[token].tolist() == chosen
        want = [SCALING_FACTOR * scores[e] / sum(scores[i] for i in chosen) for e in chosen]
        assert got[token].tolist() == pytest.approx(want, rel=1e-12)
    assert 1e-7 < float((bound / got).max()) < 1e-5


def test_a_choice_that_float32_cannot_make_is_not_judged() -> None:
    score = torch.tensor([[0.5, 0.4, 0.4 - 1e-9, 0.1], [0.5, 0.4, 0.3, 0.1]], dtype=torch.float64)
    ids, clear = oracle.chosen(score, torch.full_like(score, 1e-7), torch.zeros(4), 2)
    assert ids.tolist() == [[0, 1], [0, 1]]
    assert clear.tolist() == [False, True]
    assert oracle.chosen(score, score, torch.zeros(4), 4)[1].tolist() == [True, True]  # nothing to choose


def test_situ_has_its_published_values_and_slopes() -> None:
    points = torch.tensor([4.0, 1.0, -1.219, 0.0], dtype=torch.float64)
    gate, _ = SITU.gate(points)
    assert gate.tolist() == pytest.approx([2.9916, 0.7162, -0.2698, 0.0], abs=5e-5)
    assert SILU.gate(points)[0][:2].tolist() == pytest.approx([3.9281, 0.7311], abs=5e-5)
    assert float(SITU.up(torch.tensor([25.0], dtype=torch.float64))[0]) == pytest.approx(25 * math.tanh(1))
    for factor in (SITU.gate, SITU.up, SILU.gate, SILU.up):
        x = torch.linspace(-30, 30, 61, dtype=torch.float64)
        slope = (factor(x + 1e-6)[0] - factor(x - 1e-6)[0]) / 2e-6
        assert torch.allclose(factor(x)[1], slope, atol=1e-8)
    g, u = torch.linspace(-9, 9, 50), torch.linspace(-60, 60, 50)
    want = SITU.gate(g.double())[0] * SITU.up(u.double())[0]
    assert torch.allclose(model.situ(g, u).double(), want, rtol=1e-5, atol=1e-5)


def test_a_routed_part_of_zero_leaves_the_shared_expert_alone() -> None:
    weights, hidden = model_weights(CASE), model_hidden(CASE, 0, batch(CASE, 0))
    shared = model.shared_expert(hidden, weights.shared)
    normed = model.rms_norm(torch.zeros(7, 24, dtype=torch.bfloat16), weights.norm)
    up, out = model.output(normed, weights.up, shared)
    assert not up.any()
    assert torch.equal(out, shared)


def test_norm_sits_where_its_eps_matters() -> None:
    """With the mean square of the sum near eps, a tenth of the eps or a doubled sum changes the normed values."""
    s = Step(record(Job(), CASE), "base")
    summed, weight = s.tap("norm", "routed"), s.tap("norm", "weight")[0]
    assert 0.1 < float((summed.double() ** 2).mean(dim=-1).median()) / NORM_EPS < 10
    right = oracle.rms_norm(summed, weight, NORM_EPS)[0]
    for x, eps in ((summed, NORM_EPS / 10), (summed * 2, NORM_EPS)):
        other = oracle.rms_norm(x, weight, eps)[0]
        assert float((other - right).norm() / right.norm()) > 0.05


def test_activations_reach_the_caps() -> None:
    """A SiLU in place of SiTU must show: gates beyond 2 and ups beyond 25 are usual."""
    s = Step(record(Job(), CASE), "base")
    x = s.tap("dispatch", "hidden").flatten(0, 1).double()
    for name, limit in (("gate", 2.0), ("up", 25.0)):
        weight = s.tap("load", f"local_{name}").flatten(0, 1)[0].double()
        assert 0.05 < float(((x @ weight.T).abs() > limit).double().mean()) < 0.6


def test_errors_of_the_reference_are_as_large_as_the_variances_say() -> None:
    """The median of |error| / sigma is 0.67 for a normal error and 0.87 for one rounding; the bound is at 6."""
    s = Step(record(Job(), Case.parse("genB+R4+E16+K4+S17+zipf:1.0+fill:real+k3")), "base")
    shared = [s.tap("shared", name)[0] for name in ("gate", "up", "down")]
    judged = {
        ("latent", "out"): oracle.projected(s.tap("latent", "hidden"), s.tap("latent", "weight")[0]),
        ("norm", "out"): oracle.rms_norm(s.tap("norm", "routed"), s.tap("norm", "weight")[0], NORM_EPS),
        ("shared", "out"): oracle.shared_expert(s.tap("shared", "hidden").flatten(0, 1), shared),
        ("output", "up"): oracle.projected(s.tap("output", "normed"), s.tap("output", "weight")[0]),
    }
    for (op, name), (want, variance) in judged.items():
        sigmas = (s.tap(op, name).double().view(want.shape) - want).abs() / variance.sqrt()
        assert 0.6 < float(sigmas[variance > 0].median()) < 0.95, op
        assert float(sigmas[variance > 0].max()) < 5, op


@pytest.mark.parametrize("scenario", ["two_poisons", "marked_slots", "layers"])
def test_scenarios_of_the_model_pass(scenario: str) -> None:
    _, verdict = run_case(Job(), CASE.but(scenario=Case.parse(f"{SIZES}+{scenario}").scenario))
    assert verdict.ok, verdict.diagnosis
    assert verdict.level == "reference"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "fill:real+variants",
            "scenario variants: model k3 runs base, two_poisons, marked_slots, layers, grouped; use one",
        ),
        ("fill:ints", "fill:ints: model k3 needs fill:real"),
        ("fill:real+tokens:7,0,1,2", "model k3 has S real tokens on every rank; leave tokens out"),
        ("fill:real+repeated", "routing repeated: model k3 needs K distinct experts a token"),
        (
            "fill:real+hot_rank:1+K4",
            "K=4: model k3 chooses K distinct experts of 3 (hot_rank); lower K or raise E",
        ),
        ("fill:real+empty_experts:10", "of 2 (empty_experts)"),
        ("fill:real+K13", "K=13: model k3 chooses K distinct experts of 12 (uniform)"),
    ],
)
def test_what_the_model_cannot_run_is_refused(words: str, message: str) -> None:
    sizes = "genB+R4+E12+S7" + ("" if "+K" in words else "+K3")
    with pytest.raises(CaseError) as error:
        Case.parse(f"{sizes}+k3+{words}")
    assert message in str(error.value)


def test_a_table_needs_distinct_ids() -> None:
    assert str(Case.parse("genB+R1+E4+K2+S2+fill:real+k3+table:0,1,2,1"))
    with pytest.raises(CaseError, match="table: token 1 has ids 2, 2; model k3 needs K=2 distinct ones"):
        Case.parse("genB+R1+E4+K2+S2+fill:real+k3+table:0,1,2,2")


def test_other_subjects_and_scripts_say_that_they_do_not_run_it() -> None:
    subject = module_subject("moonep", "B", Part("real", "moonep", "1.0"), relaxed=True, destructive=False)
    assert subject.supports(CASE) == "model k3 runs on the embedded reference; leave --moonep-module out"
    assert {subject.parts[stage].level for stage in owned_by("model")} == {"none"}
    assert REFERENCE.supports(CASE) is None
    with pytest.raises(CaseError, match="model k3: a script holds MoonEP's path only"):
        standalone(CASE, "moonep")
