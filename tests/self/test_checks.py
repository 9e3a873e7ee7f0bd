"""Every check can fail: a corrupted trace that it catches at its own stage; and none alarms on a clean one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from moonep_validate.cases.case import Case
from moonep_validate.judge.checks import CHECKS, Compared
from moonep_validate.judge.coverage import bare
from moonep_validate.judge.facts import Step
from moonep_validate.judge.registry import register, step_checks
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.judge import judge
from moonep_validate.trace.recording import Recording
from moonep_validate.trace.trace import Part, Trace
from tests.self.corruptions import CORRUPTIONS, EQUAL_LOADS, Corruption, call, moved_without_need, results, tensor
from tests.self.corruptions_experts import EXPERTS
from tests.self.corruptions_forms import FORMS
from tests.self.corruptions_moved import MOVED
from tests.self.corruptions_plan import PLAN

ALL = CORRUPTIONS + EXPERTS + FORMS + MOVED + PLAN


@pytest.fixture(scope="module")
def _verdicts() -> dict[str, Verdict]:
    return {}


@pytest.fixture
def clean(_verdicts: dict[str, Verdict], recorded: Callable[..., Trace]) -> Callable[[Case], Verdict]:
    """The verdict on the clean trace of a case, judged once for all of its corruptions."""

    def get(case: Case) -> Verdict:
        if str(case) not in _verdicts:
            _verdicts[str(case)] = judge(recorded(case))
        return _verdicts[str(case)]

    return get


@pytest.mark.parametrize("corruption", ALL, ids=lambda c: f"{c.check}-{c.change.__name__}")
def test_corruption_is_caught_at_its_stage(
    corruption: Corruption, recorded: Callable[..., Trace], clean: Callable[[Case], Verdict]
) -> None:
    assert clean(corruption.case).ok, clean(corruption.case).diagnosis
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


def test_what_nobody_promises_may_be_anything(recorded: Callable[..., Trace]) -> None:
    """Entries behind the duplicates that a plan lists, and sizes that a build's plan does not name."""
    trace = recorded()
    for rank in range(4):
        groups, count = (
            tensor(trace, "dispatch", "dup_groups", rank),
            tensor(trace, "dispatch", "dup_counts", rank),
        )
        groups[int(count[0]) :] = torch.tensor([0, 0, 1], dtype=torch.int32)
        tensor(trace, "dispatch", "dup_loffs", rank)[int(count[1]) :] = 1
        del call(trace, "dispatch", rank).info["sizes"]["NvS"]
    verdict = judge(trace)
    assert verdict.ok, verdict.diagnosis


def test_every_check_has_a_negative_control() -> None:
    controlled = {c.check for c in ALL}
    assert set(CHECKS) <= controlled, (
        f"{sorted(set(CHECKS) - controlled)}: add a corrupted trace that it must refuse, in tests/self/corruptions.py"
    )
    assert controlled <= set(CHECKS), f"{sorted(controlled - set(CHECKS))} is no check: remove its corruption"


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


def test_a_missing_tap_is_unknown_with_its_reason(recorded: Callable[..., Trace]) -> None:
    trace = recorded()
    del call(trace, "combine", 2).tensors["hidden"]
    verdict = judge(trace)
    missing = results(verdict, "C1")[0]
    assert missing.status == "unknown"
    assert missing.reason == "rank 2 has no combine.hidden in step 'base'"
    assert verdict.status == "failed"
    assert verdict.first is not None
    assert verdict.first.check == "O6", "a form that failed says more than values that are unknown"


def test_a_missing_load_is_unknown_with_its_reason(recorded: Callable[..., Trace]) -> None:
    trace = recorded()
    trace.calls[2] = [one for one in trace.calls[2] if one.op != "load"]
    judged = judge(trace)
    for check in ("I8", "M1"):
        told = {(one.status, one.reason) for one in results(judged, check)}
        assert told == {("unknown", "rank 2 made no load call in step 'base'")}


def test_an_unknown_answer_says_its_reason_in_the_diagnosis(recorded: Callable[..., Trace]) -> None:
    trace = recorded()
    del call(trace, "dispatch", 1).info["is_view"]
    verdict = judge(trace)
    first, reason = verdict.diagnosis.splitlines()[:2]
    assert first.startswith("unknown at stage dispatch (check A1 zero-copy-view: ")
    assert reason == "  dispatch says no is_view on ranks 1 of step 'base'"


def test_a_tap_of_another_shape_on_one_rank_is_no_pass(recorded: Callable[..., Trace]) -> None:
    trace = recorded()
    sums = call(trace, "combine", 1).tensors
    sums["hidden"] = sums["hidden"][:-1].clone()
    verdict = judge(trace)
    assert not verdict.ok
    assert {r.status for r in verdict.results if r.check in ("C1", "C3", "I16")} == {"unknown"}


def test_a_tap_that_some_ranks_lack_is_no_pass(recorded: Callable[..., Trace]) -> None:
    for op, name in (("dispatch", "topk_weights"), ("combine", "row_weights")):
        trace = recorded()
        del call(trace, op, 3).tensors[name]
        verdict = judge(trace)
        assert not verdict.ok
        assert f"{op}.{name} is missing on ranks 3 of step 'base'" in {r.reason for r in verdict.results}


def test_a_call_that_one_rank_left_out_is_no_pass(recorded: Callable[..., Trace]) -> None:
    for op in ("dispatch", "prefetch", "experts", "combine", "layer"):
        trace = recorded()
        trace.calls[2] = [one for one in trace.calls[2] if (one.step, one.op) != ("base", op)]
        assert not judge(trace).ok, op


def test_taps_of_a_call_that_raised_are_neutral_only_if_f1_says_so(recorded: Callable[..., Trace]) -> None:
    for peer, status in ((False, "not_run"), (True, "unknown")):
        trace = recorded()
        stopped = call(trace, "combine", 2)
        stopped.tensors.clear()
        stopped.error = {"type": "ValueError", "message": "no", "where": "x.py:1", "peer": peer}
        verdict = judge(trace)
        assert results(verdict, "C1")[0].status == status
        assert not verdict.ok


def test_a_stage_that_no_check_compared_is_vacuous(recorded: Callable[..., Trace]) -> None:
    trace = recorded()
    verdict = judge(trace)
    assert bare(trace.case, verdict.results, Recording()) == []
    kept = [r for r in verdict.results if r.stage != "combine" or r.check == "F1"]
    assert bare(trace.case, kept, Recording()) == ["combine"]
    assert bare(trace.case, kept, Recording("plan")) == [], "the recording does not reach"
    assert bare(trace.case, [replace(r, gates=r.check == "F1") for r in kept], Recording())[0] == "plan"


def test_a_layer_without_any_token_has_nothing_to_compare(recorded: Callable[..., Trace]) -> None:
    trace = recorded()
    rest = [r for r in judge(trace).results if r.stage != "layer" or r.check == "F1"]
    assert bare(trace.case, rest, Recording()) == ["layer"]
    assert bare(trace.case.but(tokens=(0,) * trace.case.R), rest, Recording()) == []


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
