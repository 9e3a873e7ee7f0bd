"""Seeded faults: each is killed by the right check at its own stage; one that did nothing is no pass."""

from __future__ import annotations

import time

import pytest

from moonep_validate.case import Case, CaseError, Spec
from moonep_validate.engine import Job, run_case
from moonep_validate.faults import FAULTS, parse_fault
from moonep_validate.shrink import shrink
from tests.self.conftest import CASE

KILLED_BY = {
    "row-of-another-token": ("failed", "dispatch", "D1"),
    "slot-not-filled": ("failed", "prefetch", "W1"),
    "duplicates-dropped": ("failed", "combine", "C1"),
    "rank-raises": ("failed", "prefetch", "F1"),
    "rank-never-returns": ("hung", "combine", "F1"),
    "rank-skips-prefetch": ("hung", "prefetch", "F1"),
}


def job_with(fault: str) -> Job:
    return Job(faults=(parse_fault(fault),), deadline=0.5)


@pytest.mark.parametrize("fill", ["ints", "real"])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_killed_at_its_stage(fault: str, fill: str) -> None:
    _, verdict = run_case(job_with(fault), CASE.but(fill=Spec(fill)))
    status, stage, check = KILLED_BY[fault]
    first = verdict.first
    assert first is not None
    assert (verdict.status, first.stage, first.check) == (status, stage, check), verdict.diagnosis
    assert FAULTS[fault].stage == stage
    assert f"--fault {fault}" in verdict.command


def test_fault_on_another_rank_is_found_there() -> None:
    _, verdict = run_case(job_with("row-of-another-token:rank=3,row=1"), CASE)
    assert verdict.first is not None
    assert verdict.first.findings[0].place["rank"] == 3
    assert verdict.first.findings[0].place["row"] == 1


def test_fault_that_changes_nothing_is_not_exercised() -> None:
    """Rank 9 does not exist; and in a case without slots there is no slot to leave unfilled."""
    assert run_case(job_with("row-of-another-token:rank=9"), CASE)[1].status == "not_exercised"
    no_slots = Case.parse("genB+R2+E4+K2+S3+H8+table:0,1,0,1,0,1,2,3,2,3,2,3")
    assert run_case(Job(), no_slots)[1].witnesses["slot_used"] == 0
    # The slot pool is poisoned before every prefetch, so the recorded bytes are the same.
    assert run_case(job_with("slot-not-filled"), no_slots)[1].status == "not_exercised"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slot-not-filed", "unknown fault 'slot-not-filed'; did you mean 'slot-not-filled'?"),
        ("slot-not-filled:rnk=1", "has no parameter 'rnk=1'; did you mean 'rank'?"),
        ("slot-not-filled:rank=x", "rank is 'x', a whole number is needed"),
        ("slot-not-filled:1", "has no parameter '1'; known: rank"),
    ],
)
def test_bad_fault_ids_are_refused(text: str, message: str) -> None:
    with pytest.raises(CaseError) as error:
        parse_fault(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fault", "limits"),
    [
        ("row-of-another-token", {"R": 2, "E": 2, "K": 1, "S": 1}),
        ("slot-not-filled", {"R": 2, "E": 2, "K": 1, "S": 1}),
        ("duplicates-dropped", {"R": 2, "E": 2, "K": 2, "S": 1}),
        ("rank-raises", {"R": 2, "E": 2, "K": 1, "S": 1}),
    ],
)
def test_shrinks_to_a_smallest_case_that_still_fails_in_the_same_way(fault: str, limits: dict[str, int]) -> None:
    job = job_with(fault)
    whole = Case.parse("genB+R4+E16+K4+S9+fill:real+two_poisons+hot:1+tokens:9,9,9,3+seed3")
    result = shrink(whole, lambda case: run_case(job, case)[1], seconds=60)
    assert result.complete
    assert {name: getattr(result.case, name) for name in limits} == limits, str(result.case)
    assert (result.case.H, result.case.I, str(result.case.fill)) == (8, 8, "ints")
    verdict = run_case(job, Case.parse(str(result.case)))[1]
    assert verdict.first is not None
    assert (verdict.first.stage, verdict.first.check) == KILLED_BY[fault][1:]


def test_shrinking_twice_gives_the_same_case() -> None:
    job = job_with("duplicates-dropped")
    whole = Case.parse("genB+R3+E9+K3+S5+zipf:1.0")
    first = shrink(whole, lambda case: run_case(job, case)[1], seconds=60)
    again = shrink(first.case, lambda case: run_case(job, case)[1], seconds=60)
    assert again.case == first.case


def test_shrinker_keeps_its_budget_and_refuses_a_passing_case() -> None:
    start = time.monotonic()
    result = shrink(CASE, lambda case: run_case(job_with("slot-not-filled"), case)[1], seconds=0)
    assert (result.case, result.complete) == (CASE, False)
    assert time.monotonic() - start < 5
    with pytest.raises(CaseError, match="there is nothing to shrink"):
        shrink(CASE, lambda case: run_case(Job(), case)[1], seconds=1)
