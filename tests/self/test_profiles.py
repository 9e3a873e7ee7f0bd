"""The profiles, the witnesses and the pipeline from the outside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.cases.profiles import PROFILES, for_generations, profile
from moonep_validate.cases.vocabulary import VOCABULARY
from moonep_validate.faults import parse_fault
from moonep_validate.judge.checks import CHECKS
from moonep_validate.judge.witnesses import WITNESSES
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.record import record
from moonep_validate.pipeline.run import run_case
from moonep_validate.pipeline.target import Module
from moonep_validate.scenarios import SCENARIOS
from moonep_validate.sessions.rig import Rig
from moonep_validate.studies.mutate import case_list
from moonep_validate.trace.trace import Part

#: A case in which the event cannot occur.
WITHOUT = {
    "slot_used": "genB+R2+E4+K2+S3+H8+table:0,1,0,1,0,1,2,3,2,3,2,3",
    "two_slots": "genB+R2+E4+K2+S3+H8+hot:0",
    "duplicate": "genB+R4+E4+K1+S5+H8",
    "triple": "genB+R2+E4+K2+S3+H8",
    "padding": "genB+R2+E4+K2+S3+H8+pad1",
    "empty_expert": "genB+R2+E4+K4+S3+H8",
    "empty_rank": "genB+R2+E4+K2+S3+H8",
    "donor_receiver": "genB+R2+E4+K2+S3+H8+hot:0",
    "remote_read": "genA+R4+E16+K4+S9+H8+overflow",
    "empty_plan": "genB+R2+E4+K2+S3+H8+hot:0",
    "full_plan": "genB+R2+E4+K2+S3+H8+all_local",
    "buffer_full": "genB+R2+E4+K2+S3+H8+all_local",
    "odd_bits": "genB+R2+E4+K2+S3+H8",
    "slots_everywhere": "genB+R2+E4+K2+S3+H8+hot:0",
    "order_visible": "genB+R2+E4+K2+S3+H8+fill:cancel+combine_only",
    "wide_ids": "genB+R2+E4+K2+S3+H8",
    "wide_rows": "genB+R2+E4+K2+S3+H8",
    "rounding_visible": "genB+R2+E4+K2+S3+H8+combine_only",
}


@pytest.mark.parametrize("name", PROFILES)
def test_profile_lines_are_canonical_and_distinct(name: str) -> None:
    lines = [str(case) for case in profile(name)]
    assert len(set(lines)) == len(lines) >= 2
    assert all(str(Case.parse(line)) == line for line in lines)


def test_unknown_profile_is_refused() -> None:
    with pytest.raises(CaseError, match="unknown profile 'defualt'; known: default, engine, smoke"):
        profile("defualt")


def test_every_word_of_the_language_is_used_by_the_profiles() -> None:
    used: set[str] = set()
    for case in [*profile("default"), *profile("engine"), *profile("multigpu")]:
        used |= {case.routing.name, case.fill.name, case.model.name, case.format.name, case.scenario.name}
        used |= set(case.witnesses)
    unused = sorted(set(VOCABULARY) - used - {"sampled"})  # a served engine's own inputs: nothing runs them
    assert not unused, f"{unused}: add a case line with each to a profile in moonep_validate/cases/profiles.py"


@pytest.mark.parametrize("witness", WITNESSES)
def test_a_case_that_claims_an_absent_event_is_vacuous(witness: str) -> None:
    case = Case.parse(f"{WITHOUT[witness]}+@{witness}")
    _, verdict = run_case(Job(), case)
    assert verdict.status == "vacuous"
    assert verdict.vacuous == [f"the case claims @{witness}, but that event did not occur"]
    assert run_case(Job(), case.but(witnesses=()))[1].ok


def test_a_case_that_the_subject_cannot_run_is_not_run_and_no_pass() -> None:
    job = Job(Module("some_moonep", "B", Part("real", "some_moonep", "1.0")))
    for case, reason in (("genA+R2+E4+K2+S3", "API generation B"), ("genB+R2+E4+K2+S3+H8", "not portable")):
        _, verdict = run_case(job, Case.parse(case))
        assert verdict.status == "not_run"
        assert not verdict.ok
        assert reason in verdict.results[0].reason


def test_profile_is_portable_to_hardware_and_holds_the_geometry_of_kimi_k3() -> None:
    cases = for_generations(profile("default"), ("A", "B"))
    assert sum(case.portable for case in cases) >= 0.8 * len(cases)
    k3 = {(case.generation, case.R) for case in cases if (case.E, case.K) == (896, 16)}
    assert k3 == {("A", 8), ("A", 16), ("B", 8), ("B", 16)}
    assert {case.generation for case in for_generations(profile("default"), ("B",))} == {"B"}


def test_no_check_and_no_witness_is_idle_on_the_default_profile() -> None:
    """Each check compares something, each known event occurs, on some case of the profile; engines and GPUs aside."""
    idle, unseen = set(CHECKS), set(WITNESSES)
    elsewhere = {"I3", "I11", "I15", "V20", "W7"}  # of engines, see test_engines.py, and of GPUs
    short = case_list(Job())  # shows most of them in the first third of the time
    for case in (*short, *(case for case in for_generations(profile("default"), ("A", "B")) if case not in short)):
        if idle == elsewhere and not unseen:
            break
        _, verdict = run_case(Job(), case)
        idle -= {result.check for result in verdict.results if result.examined}
        unseen -= {name for name, count in verdict.witnesses.items() if count}
    assert (idle, unseen) == (elsewhere, set())


def test_recording_is_deterministic() -> None:
    case = Case.parse("genB+R4+E12+K3+S7+H24+I20+zipf:1.0+fill:real")
    digests = {run_case(Job(), case)[0].digest() for _ in range(3)}
    assert len(digests) == 1
    assert run_case(Job(), case.but(seed=1))[0].digest() not in digests


def test_verdicts_do_not_depend_on_the_order_of_cases() -> None:
    cases = [*profile("smoke"), Case.parse("genB+R3+E6+K2+S5+H16+zipf:1.0")]
    forward = {str(case): run_case(Job(), case)[1].to_json() for case in cases}
    backward = {str(case): run_case(Job(), case)[1].to_json() for case in reversed(cases)}
    assert forward == backward


def test_evidence_is_never_above_the_part_that_ran() -> None:
    _, verdict = run_case(Job(), profile("smoke")[0])
    assert verdict.level == "reference"
    assert {result.level for result in verdict.results} == {"reference"}
    assert {part["origin"] for part in verdict.to_json()["parts"].values()} == {"reference"}


def test_an_error_of_the_suite_is_no_finding_about_the_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(rig: Rig) -> None:
        raise KeyError("in the scenario")

    monkeypatch.setitem(SCENARIOS, "base", replace(SCENARIOS["base"], script=broken))
    _, verdict = run_case(Job(), profile("smoke")[0])
    assert verdict.status == "error"
    assert verdict.first is None
    assert verdict.errors[0].startswith("rank 0: KeyError: 'in the scenario'")


def test_a_hung_case_leaves_the_next_one_alone() -> None:
    hang = Job(faults=(parse_fault("rank-never-returns"),), deadline=0.3)
    clean = record(Job(), profile("smoke")[0]).digest()
    assert run_case(hang, profile("smoke")[0])[1].status == "hung"
    trace, verdict = run_case(Job(), profile("smoke")[0])
    assert verdict.ok
    assert trace.digest() == clean
