"""False alarms: a right subject raises no alarm, a bound that is too tight is noticed, and the interval is exact."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.faults import parse_fault
from moonep_validate.judge.oracle import bounds
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.run import run_case
from moonep_validate.studies import false_alarms as study
from moonep_validate.studies.false_alarms import BUDGET, Alarms, drawn_cases, false_alarms, upper_bound


def test_the_reference_raises_no_alarm() -> None:
    result = false_alarms(Job(), seconds=120, seed=1, most=30)
    assert (result.cases, result.alarms, result.outside, result.lines) == (30, 0, 0, []), result.summary
    assert result.examined > 100_000
    assert result.rate == 0
    assert result.upper == pytest.approx(1 - 0.05 ** (1 / 30))
    assert not result.over_budget
    assert result.summary.startswith("0 false alarms in 30 cases: below 0.095 a case (95%), ")
    assert "the budget of 0.001 is not yet shown" in result.summary


def test_a_bound_that_is_too_tight_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SIGMAS", 2.0)
    result = false_alarms(Job(), seconds=120, seed=1, most=12)
    assert result.alarms > 8
    assert result.outside / result.examined == pytest.approx(0.03, abs=0.03), "a normal error has 4.6% there"
    assert result.over_budget
    assert len(result.lines) == result.alarms
    line, why = result.lines[0].split(" ", 1)
    assert Case.parse(line).fill.name == "real"
    assert why == "(P1 at experts)"
    assert "the budget of 0.001 is exceeded" in result.summary


def test_cases_are_the_same_for_a_seed_and_differ_in_everything() -> None:
    cases = list(islice(drawn_cases(Job(), seed=3), 600))
    assert cases[:50] == list(islice(drawn_cases(Job(), seed=3), 50))
    assert cases[:50] != list(islice(drawn_cases(Job(), seed=4), 50))
    assert {case.fill.name for case in cases} == {"real", "scales"}
    assert {case.R for case in cases} == {1, 2, 3, 4, 6, 8}
    assert {case.generation for case in cases} == {"A", "B"}
    assert {case.model.name for case in cases} == {"moe", "k3"}
    assert {case.scenario.name for case in cases} == {
        "base",
        "marked_slots",
        "layers",
        "combine_only",
        "replayed_plan",
    }
    assert {case.format.name for case in cases} == {"bf16", "mxfp4", "fp8"}
    assert max(case.E for case in cases) >= 384
    for name, least in [
        ("seed", 550),
        ("E", 12),
        ("S", 5),
        ("H", 6),
        ("I", 6),
        ("K", 6),
        ("pad", 4),
        ("tokens", 50),
    ]:
        assert len({getattr(case, name) for case in cases}) >= least, name


def test_the_time_is_kept_and_nothing_is_claimed_without_a_case() -> None:
    result = false_alarms(Job(), seconds=0)
    assert (result.cases, result.rate, result.upper, result.over_budget) == (0, 0.0, 1.0, False)


def test_a_faulty_or_missing_subject_is_refused() -> None:
    with pytest.raises(CaseError, match="leave --fault out"):
        false_alarms(Job(faults=(parse_fault("slot-not-filled"),)), seconds=1)
    with pytest.raises(CaseError, match="no such engine"):
        false_alarms(Job(not_run="no such engine"), seconds=1)


@pytest.mark.parametrize(
    ("events", "trials", "upper"),
    [
        (0, 10, 0.2588656),
        (0, 1000, 0.0029912),
        (0, 2995, 0.00099974),
        (1, 1000, 0.0047349),
        (3, 50, 0.1478397),
        (5, 5, 1.0),
    ],
)
def test_upper_bounds_are_those_of_clopper_and_pearson(events: int, trials: int, upper: float) -> None:
    assert upper_bound(events, trials) == pytest.approx(upper, rel=1e-4)


def test_the_budget_is_exceeded_only_beyond_chance() -> None:
    assert BUDGET == 1 / 1000
    assert not Alarms(cases=1000, alarms=3).over_budget
    assert Alarms(cases=1000, alarms=4).over_budget
    assert Alarms(cases=3000).upper < BUDGET


def test_an_interrupt_keeps_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def run_then_stop(job: Job, case: Case) -> tuple[object, Verdict]:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise KeyboardInterrupt
        return run_case(job, case)

    monkeypatch.setattr(study, "run_case", run_then_stop)
    result = false_alarms(Job(), 60.0)
    assert (calls, result.cases, result.alarms) == (3, 2, 0)
    assert result.seconds < 60


def test_the_old_name_of_the_command_works_and_says_so(cli: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = cli("nulls", "--time", "1", "--seed", "1")
    assert code == 0, err
    assert "the command nulls is now called false-alarms" in err
    assert cli("false-alarms", "--time", "1", "--seed", "1")[2] == ""
