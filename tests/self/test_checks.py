"""Every check can fail: a corrupted trace that it catches at its own stage; and none alarms on a clean one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from moonep_validate.judge.checks import CHECKS, Compared
from moonep_validate.judge.facts import Step
from moonep_validate.judge.registry import register, step_checks
from moonep_validate.pipeline.judge import judge
from moonep_validate.trace.trace import Part, Trace
from tests.self.corruptions import CORRUPTIONS, EQUAL_LOADS, Corruption, call, moved_without_need, results, tensor
from tests.self.corruptions_experts import EXPERTS
from tests.self.corruptions_forms import FORMS
from tests.self.corruptions_moved import MOVED


@pytest.mark.parametrize(
    "corruption", CORRUPTIONS + EXPERTS + FORMS + MOVED, ids=lambda c: f"{c.check}-{c.change.__name__}"
)
def test_corruption_is_caught_at_its_stage(corruption: Corruption, recorded: Callable[..., Trace]) -> None:
    clean = judge(recorded(corruption.case))
    assert clean.ok, clean.diagnosis
    trace = recorded(corruption.case)
    corruption.change(trace)
    verdict = judge(trace)
    caught = [r for r in results(verdict, corruption.check) if r.status in ("failed", "hung")]
    assert caught, f"{corruption.check} missed it: {verdict.diagnosis}"
    assert {r.stage for r in caught} >= {corruption.stage}
    said = [str(finding) for r in caught for finding in r.findings]
    assert any(corruption.says in line for line in said), said
    assert verdict.first is not None
    assert verdict.first.stage == (corruption.first or corruption.stage)


def test_every_check_has_a_negative_control() -> None:
    assert {c.check for c in CORRUPTIONS + EXPERTS + FORMS + MOVED} == set(CHECKS)


def test_every_record_has_a_word_and_a_sentence_for_users() -> None:
    for check in CHECKS.values():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", check.name)
        assert len(check.promise.split()) >= 4, check
        assert check.promise == check.promise.strip(" .")
        assert (check.function is None) == (check.kind in ("relation", "returns"))


def test_two_checks_cannot_have_one_id_or_one_name() -> None:
    known = CHECKS["W1"]
    for taken in (known, replace(known, id="W99"), replace(known, name="another-word")):
        with pytest.raises(AssertionError, match="is taken"):
            register(taken)
    assert "W99" not in CHECKS


def test_a_failure_says_its_promise_in_text_and_in_json(recorded: Callable[..., Trace]) -> None:
    trace = recorded()
    slots = call(trace, "prefetch", 1).tensors["slot_gate"]
    slots += 1
    verdict = judge(trace)
    promise = "ach used slot holds the weights of its expert"
    said = f"failed at stage prefetch (check W1 slot-content: e{promise}, step base): {trace.case}"
    assert verdict.diagnosis.splitlines()[0] == said
    told = verdict.to_json()
    assert (told["check"], told["name"], told["promise"]) == ("W1", "slot-content", "E" + promise)


@pytest.mark.parametrize("check", [check.id for check in step_checks()])
def test_a_check_without_body_is_vacuous(check: str, recorded: Callable[..., Trace]) -> None:
    empty = replace(CHECKS[check], function=lambda s: iter(()))
    verdict = judge(recorded(), [empty])
    assert verdict.status == "vacuous"
    assert {r.status for r in results(verdict, check)} == {"vacuous"}


def test_a_crashing_check_is_unknown_and_no_pass(recorded: Callable[..., Trace]) -> None:
    def crash(s: Step) -> Iterator[Compared]:
        raise ZeroDivisionError("in the judge")

    verdict = judge(recorded(), [replace(CHECKS["L3"], function=crash)])
    assert verdict.status == "unknown"
    said = [r.reason for r in results(verdict, "L3")]
    assert "the checker raised ZeroDivisionError: in the judge" in said


def test_a_missing_tap_is_not_run_with_its_reason(recorded: Callable[..., Trace]) -> None:
    trace = recorded()
    del call(trace, "combine", 2).tensors["hidden"]
    missing = results(judge(trace), "C1")[0]
    assert missing.status == "not_run"
    assert missing.reason == "rank 2 has no combine.hidden in step 'base'"


def test_what_does_not_apply_says_why(recorded: Callable[..., Trace]) -> None:
    by_check = {r.check: r for r in judge(recorded()).results if r.step == "base"}
    assert by_check["A2"].status == "not_applicable"
    assert by_check["A2"].reason == "this step replays no plan"
    assert by_check["R1"].reason == "rank 0 made no reduce call in step 'base'"


def test_drop_in_checks_inform_where_upstream_policy_is_not_promised(recorded: Callable[..., Trace]) -> None:
    trace = recorded(EQUAL_LOADS)
    moved_without_need(trace)
    assert "X2" in {r.check for r in judge(trace).results if r.status == "failed" and r.gates}
    trace.parts["plan"] = Part("real", "other_moonep", "1.0", policy="legal")
    informed = results(judge(trace), "X2")[0]
    assert (informed.status, informed.gates, informed.level) == ("failed", False, "real")


def test_equal_payloads_on_two_ranks_are_vacuous(recorded: Callable[..., Trace]) -> None:
    trace = recorded()
    for rank in (1, 3):
        call(trace, "dispatch", rank).tensors["hidden"] = tensor(trace, "dispatch", "hidden", 0)
    verdict = judge(trace)
    assert "ranks 0 and 1 hold the same payload in step 'base'" in verdict.vacuous
    assert "ranks 0 and 3 hold the same payload in step 'base'" in verdict.vacuous
