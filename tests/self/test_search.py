"""Search: valid cases of every word, honest figures, seeded faults found and shrunk, inside the budget."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from moonep_validate.cases.case import Case, CaseError, Spec
from moonep_validate.cases.vocabulary import VOCABULARY
from moonep_validate.faults import parse_fault
from moonep_validate.judge.verdict import Result, Verdict
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.run import run_case
from moonep_validate.studies.search import SCENARIOS, case_strategy, lines, search, stress
from moonep_validate.trace.trace import Part
from tests.self.strategies import for_each_case

SMALL = Case.parse("genB+R2+E4+K2+S3+H8+I8+pad1")
PARTS = {"plan": Part("reference", "test", "0")}


def judge_with(*faults: str) -> Callable[[Case], Verdict]:
    job = Job(faults=tuple(parse_fault(fault) for fault in faults), deadline=5.0)
    return lambda case: run_case(job, case)[1]


def invented(status: str, check: str = "L1") -> Callable[[Case], Verdict]:
    """A judge that runs nothing."""
    return lambda case: Verdict(case, PARTS, [Result(check, "plan", "base", status, "reference", 1)])


Clock = Callable[..., Callable[[Case], Verdict]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Wraps a judge: each case that it judges takes so many seconds of a clock that only cases move."""
    now = [0.0]
    for module in ("search", "shrink"):
        monkeypatch.setattr(f"moonep_validate.studies.{module}.time", SimpleNamespace(monotonic=lambda: now[0]))

    def timed(judge: Callable[[Case], Verdict], cost: float = 1.0) -> Callable[[Case], Verdict]:
        def one(case: Case) -> Verdict:
            now[0] += cost
            return judge(case)

        return one

    return timed


def drawn(count: int, portable: bool = False, generations: str = "AB") -> list[Case]:
    found: list[Case] = []
    for_each_case(count, found.append, portable=portable, generations=generations)
    return found


def test_valid_cases_of_every_word_are_drawn() -> None:
    """Drawing filters nothing, so each draw is a case: 800 are 800."""
    cases = drawn(800)
    assert len(cases) >= 800
    assert all(Case.parse(str(case)) == case for case in cases)
    for field in ("routing", "fill", "scenario", "format", "model"):
        known = {name for name, word in VOCABULARY.items() if word.field == field}
        if field == "routing":  # whose ids a served engine was given, and no generator
            known -= {"sampled"}
        if field == "scenario":  # what engines are for, and what compares whole layers, says little of a plan
            known &= {*SCENARIOS, "grouped"}
        assert {getattr(case, field).name for case in cases} == known
    assert {case.R for case in cases} == set(range(1, 9))
    assert {case.generation for case in cases} == {"A", "B"}
    assert any(case.K > case.E for case in cases)
    assert any(case.slots for case in cases)
    assert any(case.tokens for case in cases)
    assert max(case.H for case in cases) == 128
    assert max(case.E for case in cases) == 896


def test_portable_cases_of_one_generation() -> None:
    cases = drawn(100, portable=True, generations="B")
    assert all(case.portable and case.generation == "B" for case in cases)
    assert any(case.R % 2 for case in cases)


@pytest.mark.parametrize(
    ("line", "figures"),
    [
        # One expert has all 12 rows: its rank keeps 6 and fills the other.
        (
            "genB+R2+E4+K2+S3+pad1+table:0,0,0,0,0,0,0,0,0,0,0,0",
            {"slots_used": 0.5, "rows_moved": 0.5, "imbalance": 2.0, "quotas": 1.0, "split": 2.0, "padding": 0.0},
        ),
        # Balanced, two equal experts a rank: nothing moves, so no tie matters. 3 + 1 rows are padded to 4 + 4.
        (
            "genB+R2+E4+K1+S4+pad4+table:0,0,0,1,2,2,2,3",
            {"slots_used": 0.0, "rows_moved": 0.0, "padding": 0.5, "ties": 0.0, "duplicates": 0.0},
        ),
        # Balances 3, -1, -1, -1 tie.
        ("genB+R4+E4+K1+S1+table:0,0,0,0", {"ties": 2.0, "quotas": 3.0, "split": 4.0, "donor_receivers": 0.0}),
        # All rows of a token on one rank.
        ("genB+R1+E4+K3+S2+table:0,1,2,0,1,2", {"duplicates": 2.0}),
        # Rank 0 fills the empty rank 2 completely, and is refilled by rank 1.
        (
            "genB+R3+E3+K1+S4+table:0,0,0,0,0,0,1,1,1,1,1,1",
            {"donor_receivers": 1.0, "rows_moved": 0.5, "quotas": 2.0},
        ),
        # Rank 1 lacks all its rows and needs both experts of rank 0 for them, and of generation A's slots has one.
        ("genA+R3+E6+K1+S4+slots1+overflow", {"remote_reads": 1.0, "slots_used": 1.0}),
    ],
)
def test_figures_by_hand(line: str, figures: dict[str, float]) -> None:
    found = stress(Case.parse(line))
    assert {figure: found[figure] for figure in figures} == pytest.approx(figures)


def test_seeded_fault_is_found_and_shrunk(clock: Clock) -> None:
    result = search(clock(judge_with("slot-not-filled")), seconds=300)
    prefetch = [v for v in result.failures if v.first and (v.first.stage, v.first.check) == ("prefetch", "W1")]
    assert len(prefetch) == 1
    case = prefetch[0].case
    assert case.R <= 2, str(case)
    assert case.E <= 4, str(case)
    assert case.S <= 4, str(case)
    assert judge_with("slot-not-filled")(Case.parse(str(case))).status == "failed"
    assert result.statuses["failed"] >= 1


def test_nothing_is_found_on_the_reference_and_the_worst_cases_can_be_had_again(clock: Clock) -> None:
    exact = lambda case: judge_with()(case.but(fill=Spec("ints"), scenario=Spec("base")))  # noqa: E731
    result = search(clock(exact), seconds=50, seed=1)
    assert result.failures == []
    assert result.tried == sum(result.statuses.values()) == 50
    assert set(result.statuses) <= {"passed", "vacuous"}
    assert set(result.worst) == set(stress(SMALL))
    for line in lines(result):
        figure, value, case = line.split(" ")
        assert stress(Case.parse(case))[figure] == pytest.approx(float(value), rel=1e-5)


def test_budget_is_kept_also_while_shrinking(clock: Clock) -> None:
    """A judge that fails in ever new ways has a shrink under way whenever time ends."""
    ways = iter(range(10_000))
    result = search(clock(lambda case: invented("failed", f"X{next(ways) // 7}")(case)), seconds=40)
    assert 40 <= result.seconds <= 41
    assert result.failures
    assert next(ways) == result.seconds, "cases judged"


def test_case_too_slow_to_shrink_is_kept_as_it_is(clock: Clock) -> None:
    result = search(clock(invented("hung"), cost=4.0), seconds=10)
    assert result.tried == result.statuses["hung"] == 3
    assert [v.status for v in result.failures] == ["hung"]


def test_same_seed_draws_the_same_first_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(seed: int) -> list[Case]:
        seen: list[Case] = []

        def judge(case: Case) -> Verdict:
            seen.append(case)
            return invented("passed")(case)

        # A clock on which each case takes one second.
        monkeypatch.setattr("moonep_validate.studies.search.time", SimpleNamespace(monotonic=lambda: len(seen)))
        assert search(judge, seconds=60, seed=seed).tried == 60
        return seen

    cases = first(3)
    assert len({case.R for case in cases[:10]}) == 1
    assert len({case.R for case in cases}) >= 2  # the batches of 40 have other ranks each
    assert first(3) == cases
    assert first(4)[:20] != cases[:20]


def test_each_way_to_fail_is_reported_once_and_vacuous_cases_are_counted(clock: Clock) -> None:
    def judge(case: Case) -> Verdict:
        if case.generation == "A":
            return replace(invented("passed")(case), vacuous=["ranks 0 and 1 hold the same payload"])
        if case.pad == 1:
            return replace(invented("passed")(case), errors=["rank 0: RuntimeError: out of cheese"])
        return invented("failed", "L1" if case.pad < 8 else "L2")(case)

    result = search(clock(judge), seconds=1000)
    assert sorted((v.status, v.first.check if v.first else "") for v in result.failures) == [
        ("error", ""),
        ("failed", "L1"),
        ("failed", "L2"),
    ]
    assert result.vacuous == result.statuses["vacuous"] > 0
    assert {v.case.R for v in result.failures if v.first} == {1}


def test_without_hypothesis_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(CaseError, match="pip install hypothesis"):
        search(invented("passed"), seconds=1)
    with pytest.raises(CaseError, match="pip install hypothesis"):
        case_strategy()
