"""Relations that need no oracle: what moves where, which faults contradict themselves, and what only they can see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.data.problem import PROJECTIONS, batch, expert_weights
from moonep_validate.data.transforms import (
    NOWHERE,
    Weights,
    every_other,
    first_expert,
    half,
    in_place,
    labels,
    others_changed,
    permuted,
    relabelled,
    relabelled_weights,
    rotated,
    scaled_weights,
    some_routes,
    taken,
    transformed_weights,
)
from moonep_validate.faults import parse_fault
from moonep_validate.judge.checks import CHECKS
from moonep_validate.judge.verdict import Result
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.judge import judge
from moonep_validate.pipeline.record import record
from moonep_validate.pipeline.run import run_case
from moonep_validate.trace.trace import Relation, Trace

SIZES = "R4+E12+K3+S7+H24+I20+pad5"
METAMORPHIC = Case.parse(f"genB+{SIZES}+hot:1+metamorphic")
INDEPENDENT = Case.parse(f"genB+{SIZES}+hot:1+fill:real+independent")
LINEAR = Case.parse(f"genB+{SIZES}+hot:1+linear")
SLOT_COUNTS = Case.parse(f"genA+{SIZES}+hot:1+slot_counts")
UNEVEN = Case.parse("genB+R3+E6+K2+S4+H8+I8+tokens:4,0,3")
#: Every expert, token and route of Kimi-K3's routed part; only hidden sizes are small.
K3 = Case.parse("genA+R8+E896+K16+S8+H24+I8+slots1+zipf:1.5+metamorphic")
OURS = [f"V{number}" for number in range(9, 19)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As ``run_case`` has it: on tensors this small, several threads cost many times as much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def with_fault(fault: str, case: Case) -> Trace:
    return record(Job(faults=(parse_fault(fault),)), case)


def failed(trace: Trace, oracles: bool = True) -> set[str]:
    """Checks that fail, or only relations without any oracle."""
    verdict = judge(trace) if oracles else judge(trace, [])
    return {result.check for result in verdict.results if result.status == "failed"}


def relation(trace: Trace, id: str) -> list[Result]:
    return [result for result in judge(trace, []).results if result.check == id]


# What moves where.


def test_places_name_each_real_token_once() -> None:
    whole = [[0, 1, 2, 3], [NOWHERE] * 4, [8, 9, 10, NOWHERE]]
    assert in_place(UNEVEN) == whole
    assert rotated(UNEVEN) == [whole[1], whole[2], whole[0]]
    assert half(UNEVEN, second=False) == [[0, 1, -1, -1], [-1] * 4, [8, -1, -1, -1]]
    assert half(UNEVEN, second=True) == [[2, 3, -1, -1], [-1] * 4, [9, 10, -1, -1]]
    assert every_other(UNEVEN) == [[0, -1, 2, -1], [-1] * 4, [8, -1, 10, -1]]
    moved = permuted(UNEVEN)
    assert [sorted(places) for places in moved] == [sorted(places) for places in whole]
    assert moved[0] != whole[0]
    assert moved[2][-1] == NOWHERE


@pytest.mark.parametrize("seed", range(30))
def test_an_order_is_another_one_wherever_there_is_another(seed: int) -> None:
    case = Case.parse("genB+R2+E2+K1+S2+H8+tokens:2,1").but(seed=seed)
    assert permuted(case) == [[1, 0], [2, NOWHERE]]
    assert labels(case) == [1, 0]


def test_taken_tokens_are_those_of_their_places_and_then_padding() -> None:
    first = taken(UNEVEN, 0, rotated(UNEVEN))
    assert first.tokens == 0
    assert not first.hidden.any()
    assert first.topk_ids.tolist() == [[0, 1]] * 4
    last = taken(UNEVEN, 1, rotated(UNEVEN))
    assert last.tokens == 3
    for name in ("hidden", "topk_ids", "topk_weights"):
        assert getattr(last, name)[:3].equal(getattr(batch(UNEVEN, 2), name)[:3])
    assert last.topk_ids[3].tolist() == [2, 3]
    assert last.topk_weights[3].tolist() == [0, 0]


def test_renumbered_experts_keep_their_weights() -> None:
    case, new = METAMORPHIC, labels(METAMORPHIC)
    assert sorted(new) == list(range(12))
    weights = relabelled_weights(case)
    moved = {
        name: torch.cat([transformed_weights(case, rank, weights)[name] for rank in range(4)])
        for name in PROJECTIONS
    }
    for expert in range(12):
        own = expert_weights(case, expert // 3)
        for name in PROJECTIONS:
            assert moved[name][new[expert]].equal(own[name][expert % 3])
    ids = batch(case, 2).topk_ids
    assert relabelled(case, 2).topk_ids.tolist() == [[new[expert] for expert in token] for token in ids.tolist()]


def test_scaled_experts_are_the_odd_ones_and_no_sum_grows() -> None:
    for factor in (-1, 0):
        scaled = transformed_weights(LINEAR, 1, scaled_weights(LINEAR, factor))
        plain = expert_weights(LINEAR, 1)  # experts 3, 4, 5
        assert scaled["down"].equal(plain["down"] * torch.tensor([factor, 1, factor])[:, None, None])
        assert scaled["gate"].equal(plain["gate"])
        assert (scaled["down"].abs() <= plain["down"].abs()).all()
    with pytest.raises(AssertionError, match="others than -1, 0, 1 may leave 8 bits"):
        transformed_weights(LINEAR, 0, Weights(factors=(2,) * 12))
    assert expert_weights(LINEAR, 1)["down"].equal(plain["down"]), "the stored weights were changed"


def test_routes_are_split_sent_elsewhere_and_taken_twice() -> None:
    plain = batch(LINEAR, 1)
    even, odd = some_routes(LINEAR, 1, odd=False), some_routes(LINEAR, 1, odd=True)
    assert (even.topk_weights + odd.topk_weights).equal(plain.topk_weights)
    assert even.topk_weights[:, 1].tolist() == [0] * 7
    assert even.topk_ids.equal(plain.topk_ids)
    elsewhere = some_routes(LINEAR, 1, odd=False, elsewhere=True)
    assert elsewhere.topk_ids[:, ::2].equal(plain.topk_ids[:, ::2])
    assert elsewhere.topk_ids[:, 1].equal((plain.topk_ids[:, 1] + 1) % 12)
    twice, once = first_expert(LINEAR, 1, twice=True), first_expert(LINEAR, 1, twice=False)
    assert twice.topk_ids[:, 1].equal(plain.topk_ids[:, 0])
    assert once.topk_ids.equal(plain.topk_ids)
    assert twice.topk_weights[:, :2].tolist() == [[0.5, 0.5]] * 7
    assert once.topk_weights[:, :2].tolist() == [[1, 0]] * 7
    assert twice.topk_weights[:, 2].equal(plain.topk_weights[:, 2])


def test_every_other_token_changes_and_no_route_does() -> None:
    kept = every_other(INDEPENDENT)
    for rank in range(4):
        plain, other = batch(INDEPENDENT, rank), others_changed(INDEPENDENT, rank, kept)
        same = torch.tensor([place != NOWHERE for place in kept[rank]])
        assert other.topk_ids.equal(plain.topk_ids)
        assert (other.hidden == plain.hidden).all(dim=1).equal(same)
        assert (other.topk_weights == plain.topk_weights).all(dim=1).equal(same)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "genB+R2+E4+K2+S4+fill:real+metamorphic",
            "metamorphic needs fill:ints, not fill:real: another plan sums",
        ),
        ("genB+R2+E4+K2+S4+fill:ulp+linear", "only exact sums must agree; with real values there is independent"),
        ("genA+R2+E4+K2+S4+fill:real+slot_counts", "slot_counts needs fill:ints"),
        ("genB+R2+E4+K2+S4+slot_counts", "slot_counts needs genA: generation B has E/R slots always"),
        ("genB+R2+E4+K2+S1+metamorphic", "metamorphic needs S >= 2"),
        ("genB+R2+E4+K1+S4+linear", "linear needs K >= 2"),
        ("genB+R2+E4+K2+S4+fill:real+k3+independent", "scenario independent: model k3 runs base"),
    ],
)
def test_what_cannot_be_promised_is_refused(line: str, message: str) -> None:
    with pytest.raises(CaseError) as error:
        Case.parse(line)
    assert message in str(error.value)


# How they are judged.


@pytest.mark.parametrize(
    ("case", "ids"),
    [
        (METAMORPHIC, {"V9", "V10", "V11", "V12"}),
        (METAMORPHIC.but(generation="A", slots=1, tokens=(7, 0, 4, 1)), {"V9", "V10", "V11", "V12"}),
        (Case.parse("genB+R1+E3+K2+S3+H8+I8+metamorphic"), {"V9", "V10", "V11", "V12"}),
        (INDEPENDENT, {"V13"}),
        (INDEPENDENT.but(fill=METAMORPHIC.fill), {"V13"}),
        (LINEAR, {"V14", "V15", "V16", "V17"}),
        (LINEAR.but(generation="A", K=16, E=4, S=3), {"V14", "V15", "V16", "V17"}),
        (SLOT_COUNTS, {"V18"}),
        (SLOT_COUNTS.but(slots=2), {"V18"}),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else " ".join(sorted(value)),
)
def test_a_right_layer_keeps_them_all(case: Case, ids: set[str]) -> None:
    _, verdict = run_case(Job(), case)
    assert verdict.status == "passed", verdict.diagnosis
    ours = {result.check: result for result in verdict.results if result.check in OURS}
    assert set(ours) == ids
    assert all(result.examined >= case.H for result in ours.values())


@pytest.mark.parametrize("case", [METAMORPHIC, INDEPENDENT, LINEAR, SLOT_COUNTS], ids=lambda c: c.scenario.name)
def test_they_are_judged_from_outputs_alone(case: Case, recorded: Callable[..., Trace], tmp_path: Path) -> None:
    """Without weights, plans and inputs in the trace, and after a trip through a file."""
    trace = recorded(case)
    trace.calls = [[call for call in calls if call.op == "layer"] for calls in trace.calls]
    for calls in trace.calls:
        for call in calls:
            call.tensors = {"out": call.tensors["out"]}
    trace.save(tmp_path / "t.safetensors")
    loaded = Trace.load(tmp_path / "t.safetensors")
    assert loaded.relations == trace.relations
    results = [result for result in judge(loaded, []).results if result.check in OURS]
    assert {result.status for result in results} == {"passed"}
    assert len(results) == len(trace.relations)


def test_a_finding_names_both_places(recorded: Callable[..., Trace]) -> None:
    trace = recorded(METAMORPHIC)
    step = next(call for call in trace.calls[3] if (call.step, call.op) == ("rotated", "layer"))
    step.tensors["out"][2, 5] = 1.0
    (result,) = relation(trace, "V11")
    assert dict(result.findings[0].place) == {
        "rank": 3,
        "token": 2,
        "column": 5,
        "base_rank": 0,
        "base_token": 2,
    }
    base = next(call for call in trace.calls[0] if (call.step, call.op) == ("base", "layer"))
    assert float(result.findings[0].expected) == base.tensors["out"][2, 5].item()
    assert result.findings[0].actual == "1"


def test_nan_is_never_right_and_zeros_are_equal_by_value_only(recorded: Callable[..., Trace]) -> None:
    outs = {}
    trace = recorded(METAMORPHIC)
    for call in trace.calls[1]:
        if call.op == "layer":
            outs[call.step] = call.tensors["out"]
    token = permuted(METAMORPHIC)[1][0] - 7
    outs["base"][token, 0], outs["permuted"][0, 0] = 0.0, -0.0
    trace.relations = [r for r in trace.relations if r.id == "V9"]
    assert relation(trace, "V9")[0].status == "passed"
    by_bits = Relation("V9", "permuted", "base", ("layer.out",), trace.relations[0].tokens)
    trace.relations = [by_bits]
    (result,) = relation(trace, "V9")
    assert (result.status, result.findings[0].count) == ("failed", 1)
    outs["base"][token, 0] = outs["permuted"][0, 0] = float("nan")
    assert relation(trace, "V9")[0].status == "passed", "the same NaN has the same bits"
    trace.relations = [Relation("V9", "permuted", "base", ("layer.out",), by_bits.tokens, (("base", 1),))]
    assert relation(trace, "V9")[0].status == "failed"


def test_where_no_token_is_left_the_relation_does_not_apply() -> None:
    trace = record(Job(), METAMORPHIC.but(tokens=(1, 0, 0, 0)))
    first, second = relation(trace, "V12")
    assert (first.status, first.reason) == ("not_applicable", "no rank has a token to compare")
    assert (second.status, second.examined) == ("passed", 24)
    assert judge(trace).status == "passed"


def test_a_relation_of_another_shape_is_unknown(recorded: Callable[..., Trace]) -> None:
    trace = recorded(INDEPENDENT)
    trace.relations = [Relation("V13", "others_changed", "base", ("layer.out",), ((0,), (1,), (2,), (3,)))]
    (result,) = relation(trace, "V13")
    assert (result.status, result.reason) == ("unknown", "layer.out has 7 tokens a rank, the relation names 1")


def test_plans_with_another_slot_count_are_judged_as_such() -> None:
    trace = record(Job(), SLOT_COUNTS)
    slots = {
        call.step: len(call.tensors["experts_to_copy"][0]) for call in trace.calls[0] if call.op == "dispatch"
    }
    assert slots == {"base": 3, "one_slot": 1, "all_slots": 3}
    plan = {r.status for r in judge(trace).results if r.step == "one_slot" and r.check in ("L9", "X2", "X3", "O1")}
    assert plan == {"passed"}


# What they see.

#: Fault -> relations that see it without any oracle, on the four cases above.
SEEN = {
    "rounding-follows-batch": {"V13"},
    "weights-of-first-load": {"V10"},
    "output-follows-place": {"V9", "V11", "V12"},
    "output-follows-rank": {"V11"},
    "neighbour-added": {"V9", "V11", "V12"},
    "zero-weight-counts": {"V15", "V16", "V17"},
    "sign-lost": {"V9", "V10", "V11", "V12", "V14", "V16"},
    "duplicates-dropped": {"V9", "V10", "V11", "V12", "V16", "V17"},
    "source-row-for-slot": {"V9", "V10", "V11", "V12", "V16"},
    "slot-not-filled": {"V9", "V10", "V11", "V12", "V14", "V15", "V16", "V17", "V18"},
    "tokens-shifted": {"V9", "V11", "V12", "V13"},
}


@pytest.mark.parametrize("fault", SEEN)
def test_a_faulty_layer_contradicts_itself(fault: str) -> None:
    seen: set[str] = set()
    for case in (METAMORPHIC, INDEPENDENT, LINEAR, SLOT_COUNTS):
        seen |= failed(with_fault(fault, case), oracles=False)
    assert seen == SEEN[fault]


def test_each_relation_sees_a_fault() -> None:
    assert set().union(*SEEN.values()) == set(OURS) == {id for id in CHECKS if id in OURS}


@pytest.mark.parametrize("generation", ["A", "B"])
@pytest.mark.parametrize(
    ("fault", "case", "id"),
    [("rounding-follows-batch", INDEPENDENT, "V13"), ("weights-of-first-load", METAMORPHIC, "V10")],
)
def test_some_faults_are_seen_by_nothing_else(fault: str, case: Case, id: str, generation: str) -> None:
    """The one stays inside every bound; the other is computed rightly, with weights that are not those asked for."""
    trace = with_fault(fault, case.but(generation=generation))
    assert failed(trace) == {id}
    assert trace.digest() != record(Job(), case.but(generation=generation)).digest()
    plain = case.but(generation=generation, scenario=Case.parse(f"genB+{SIZES}").scenario)
    assert failed(with_fault(fault, plain)) == set()


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("weights-of-first-load", {"V10"}),
        ("output-follows-rank", {"V11"}),
        ("neighbour-added", {"V9", "V11", "V12"}),
    ],
)
def test_at_the_geometry_of_kimi_k3_too(fault: str, seen: set[str]) -> None:
    assert failed(with_fault(fault, K3), oracles=False) == seen
