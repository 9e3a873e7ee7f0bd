"""No false alarm: the correct reference passes whatever valid case is generated."""

from __future__ import annotations

from collections import Counter

import pytest

from moonep_validate.cases.case import Case
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.run import run_case
from moonep_validate.studies.shrink import shrink
from tests.self.strategies import for_each_case

FAST, WHOLE = 120, 1000


def _judged(case: Case) -> Verdict:
    return run_case(Job(), case)[1]


def _quiet(verdict: Verdict) -> bool:
    """Passed, or vacuous only because two ranks drew the same payload, which tiny cases cannot always avoid."""
    equal = verdict.vacuous and all("hold the same payload" in reason for reason in verdict.vacuous)
    return verdict.ok or (verdict.status == "vacuous" and bool(equal))


def _alarm(verdict: Verdict) -> str:
    """What a person needs to see: the smallest case that alarms in the same way."""
    if verdict.first is None:
        return verdict.diagnosis
    smallest = shrink(verdict.case, _judged, seconds=30).case
    return f"{verdict.diagnosis}\nsmallest: {_judged(smallest).diagnosis}"


def _check(count: int, draw_seed: int) -> Counter[str]:
    """The statuses of so many cases; fails at the first alarm."""
    seen: Counter[str] = Counter()

    def visit(case: Case) -> None:
        verdict = _judged(case)
        seen[verdict.status] += 1
        if not _quiet(verdict):
            pytest.fail(_alarm(verdict))

    for_each_case(count, visit, draw_seed)
    return seen


def test_no_alarm_on_generated_cases() -> None:
    assert _check(FAST, draw_seed=1)["passed"] > FAST * 0.8


@pytest.mark.slow
def test_no_alarm_on_a_thousand_generated_cases() -> None:
    assert _check(WHOLE - FAST, draw_seed=2)["passed"] > (WHOLE - FAST) * 0.8
