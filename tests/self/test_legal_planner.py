"""Legal but different: the laws accept another planner, and X says so without failing the gate.

Why it matters: a build that improves on upstream's placement is right, and must not be called broken; one that
promises upstream's placement and does not keep it is.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moonep_validate.cases.case import Case
from moonep_validate.cases.layout import Layout
from moonep_validate.judge.oracle.plan import make_plan
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.judge import judge
from moonep_validate.pipeline.run import run_case
from moonep_validate.trace.trace import Trace
from tests.self.other_planner import (
    FEWEST_MOVES,
    OTHER,
    Policy,
    Quotas,
    many_donors,
    one_row_short,
    other_plan,
    other_subject,
    spare_donors,
    stay_at_home,
)
from tests.self.test_exhaustive import SMALL, Plans, broken_laws, number_of_routings, routings, shapes

SIZES = "genB+R4+E12+K3+S7+H24+I20+pad5"
CASES = [
    f"{SIZES}+hot:1+@slot_used+@duplicate+@padding",
    f"{SIZES}+hot:1+fill:real+@slot_used",
    f"{SIZES}+zipf:2.0+@slot_used",
    f"{SIZES}+chain+@slot_used+@two_slots",
    f"{SIZES}+balanced+@empty_plan",
    f"{SIZES}+tokens:7,0,5,1+@empty_rank",
    f"{SIZES}+hot_rank:2+@slot_used",
    f"{SIZES}+repeated+@slot_used+@triple",
    f"{SIZES}+hot:1+two_poisons",
    f"{SIZES}+hot:1+marked_slots+@slot_used",
    f"{SIZES}+hot:1+variants+@slot_used+@duplicate",
    f"{SIZES}+chain+dispatch_only+@odd_bits",
    f"{SIZES}+hot:1+packed+@slot_used",
    f"{SIZES}+chain+grads+@two_slots",
    f"{SIZES}+hot:1+life+@slot_used",
    "genB+R4+E12+K8+S6+H24+pad5+combine_only+zipf:1.0+@triple",
    "genB+R4+E12+K8+S8+H24+pad5+fill:cancel+combine_only+@order_visible",
    "genB+R3+E9+K2+S9+H24+I20+pad1+overflow+@two_slots",
    "genB+R8+E32+K3+S9+H24+I20+ties",
]

#: One trait at a time, and the drop-in checks that must see it (a slot's group moves rows as well).
TRAITS = {
    "upstream's own choices": (Policy(), set()),
    "spare_donors": (Policy(spare_donors), {"X1", "X2", "X3"}),
    "many_donors": (Policy(many_donors), {"X1", "X2", "X3", "L15"}),
    "small_experts": (Policy(small_experts=True), {"X1", "X2", "X3"}),
    "last_ranks": (Policy(last_ranks=True), {"X2"}),
    "backward_rows": (Policy(backward_rows=True), {"X2"}),
    "slots_down": (Policy(slots_down=True), {"X2", "X3"}),
}

#: Rank loads 14, 8, 2, 0 of S*K = 6: upstream's rank 0 fills rank 3 from two experts, then rank 2; rank 1 fills 0.
UNEVEN = "genB+R4+E12+K2+S3+H24+I20+pad5+table:" + ",".join(
    str(expert) for expert, load in enumerate([5, 5, 4, 4, 3, 1, 1, 1, 0, 0, 0, 0]) for _ in range(load)
)


def run(
    monkeypatch: pytest.MonkeyPatch, line: str, policy: Policy, promises: str = "legal"
) -> tuple[Trace, Verdict]:
    monkeypatch.setattr("moonep_validate.pipeline.target.REFERENCE", other_subject(policy, promises))
    return run_case(Job(), Case.parse(line))


def failed(verdict: Verdict, gates: bool) -> set[str]:
    return {r.check for r in verdict.results if r.status == "failed" and r.gates == gates}


@pytest.mark.parametrize("line", CASES)
@pytest.mark.parametrize("policy", [OTHER, FEWEST_MOVES], ids=["other", "fewest_moves"])
def test_laws_accept_another_planner(line: str, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, verdict = run(monkeypatch, line, policy)
    assert verdict.ok, verdict.diagnosis
    informed = failed(verdict, gates=False)
    assert informed <= {"X1", "X2", "X3", "L15"}
    if policy is OTHER:
        assert "X2" in informed
        assert "L15" not in informed

    trace.parts = {stage: replace(part, policy="upstream") for stage, part in trace.parts.items()}
    strict = judge(trace)
    assert failed(strict, gates=True) == informed
    if informed:
        assert strict.status == "failed"
        assert strict.first is not None
        assert (strict.first.stage, strict.first.check in informed) == ("plan", True)


@pytest.mark.parametrize("trait", TRAITS)
def test_each_trait_is_seen_by_its_drop_in_checks(trait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, seen = TRAITS[trait]
    _, verdict = run(monkeypatch, UNEVEN, policy)
    assert verdict.ok, verdict.diagnosis
    assert failed(verdict, gates=False) == seen
    _, strict = run(monkeypatch, UNEVEN, policy, "upstream")
    assert failed(strict, gates=True) == seen
    assert strict.ok == (not seen)


@pytest.mark.parametrize("policy", [OTHER, FEWEST_MOVES], ids=["other", "fewest_moves"])
def test_other_planners_keep_every_law_on_every_small_routing(policy: Policy) -> None:
    """The proof in other_planner.py, by exhaustion: all routings of the geometries that have at most 256."""
    for R, E, S, K in shapes(0, SMALL):
        layout = Layout("B", R, E, K, S, 2)
        topk = routings(layout, np.arange(number_of_routings(layout)))
        plans = Plans.of(layout, topk, [other_plan(routes, layout, policy) for routes in topk])
        broken = broken_laws(plans)
        if policy is FEWEST_MOVES:
            broken.pop("L15", None)
        assert not broken, {law: (layout, topk[number].tolist()) for law, number in broken.items()}


@pytest.mark.parametrize("policy", [OTHER, FEWEST_MOVES], ids=["other", "fewest_moves"])
def test_other_planners_keep_every_law_on_random_routings(policy: Policy) -> None:
    random = np.random.default_rng(20260729)
    moved = {"upstream": 0, "other": 0}
    several = 0
    for number in range(400):
        R, per_rank, K, S = (int(random.integers(1, high)) for high in (7, 5, 5, 7))
        layout = Layout("B", R, R * per_rank, K, S, int(random.integers(1, 5)))
        weight = random.lognormal(0, number % 4, layout.E)
        topk = random.choice(layout.E, (1, R, S, K), p=weight / weight.sum())
        plan = other_plan(topk[0], layout, policy)
        broken = broken_laws(Plans.of(layout, topk, [plan]))
        several += broken.pop("L15", None) is not None
        assert not broken, (layout, topk.tolist(), broken)
        moved["other"] += plan.quotas.sum()
        moved["upstream"] += make_plan(topk[0], layout).quotas.sum()
    assert (several > 0) == (policy is FEWEST_MOVES)
    assert moved["other"] < moved["upstream"]


@pytest.mark.parametrize("promises", ["legal", "upstream"])
@pytest.mark.parametrize(("quotas", "rows"), [(one_row_short, 7), (stay_at_home, 14)])
def test_an_unbalanced_planner_is_caught_by_l3(
    quotas: Quotas, rows: int, promises: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer is right and every row is in its place: only the balance is broken, and that gates everywhere."""
    _, verdict = run(monkeypatch, UNEVEN, Policy(quotas), promises)
    assert verdict.status == "failed"
    assert failed(verdict, gates=True) - {"X1", "X2", "X3"} == {"L3"}
    assert verdict.first is not None
    assert (verdict.first.stage, verdict.first.check) == ("plan", "L3")
    assert f"rows per rank at rank 0: expected 6, got {rows}" in str(verdict.first.findings[0])
    assert {r.status for r in verdict.results if r.check == "M1"} == {"passed"}
