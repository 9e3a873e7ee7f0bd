"""The suite's own score: what is killed, what counts as an accident, and what turns the matrix red."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.doors.report.faults_page import merged_page
from moonep_validate.doors.report.matrix import trial_line
from moonep_validate.faults import FAULTS
from moonep_validate.judge.checks import CHECKS, Compared
from moonep_validate.judge.facts import Step
from moonep_validate.judge.stages import STAGES
from moonep_validate.pipeline.job import Job
from moonep_validate.studies import mutate as mutation
from moonep_validate.studies.mutate import MOST_CASES, Matrix, Trial, case_list, chosen, try_fault

Cli = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]
JOB = Job(deadline=mutation.DEADLINE)
CASE = Case.parse("genB+R4+E12+K3+S7+H24+I20+pad5+hot:1")


def killed(**changes: object) -> Trial:
    base = Trial("duplicates-dropped", "K09", "combine", "killed", "C1", "combine", ["C1", "M1"], 1)
    base.killers = ["genB+R4+E8+K2+S9", "genB+R4+E8+K2+S9+pad4"]
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_fault_is_killed_located_and_counted() -> None:
    trial = try_fault(JOB, "stats-count-own", [CASE])
    assert (trial.status, trial.check, trial.stage) == ("killed", "L13", "plan")
    assert (trial.checks, trial.cases, trial.case) == (["L13"], 1, str(CASE))
    assert trial.located
    assert not trial.late


def test_cases_are_tried_until_one_shows_the_fault() -> None:
    variants = Case.parse(f"{CASE}+variants")
    trial = try_fault(JOB, "replay-returns-copy", [CASE, variants])
    assert (trial.status, trial.check, trial.cases, trial.case) == ("killed", "A2", 2, str(variants))


def test_a_fault_that_one_case_alone_kills_is_thin() -> None:
    """Twins in the two generations count once; a case of the same scenario is tried first after a kill."""
    variants = Case.parse(f"{CASE}+variants")
    twin, other = variants.but(generation="A"), Case.parse("genB+R4+E12+K3+S7+H24+I20+pad4+hot:2+variants")
    thin = try_fault(JOB, "replay-returns-copy", [variants, twin, CASE])
    assert (thin.killers, thin.thin, thin.to_json()["thin"]) == ([str(variants)], True, True)
    twice = try_fault(JOB, "replay-returns-copy", [variants, twin, CASE, other])
    assert (twice.killers, twice.thin, twice.cases) == ([str(variants), str(other)], False, 1)
    once = try_fault(JOB, "replay-returns-copy", [variants, twin, CASE, other], enough=1)
    assert (once.killers, once.thin) == ([str(variants)], False)
    matrix = Matrix([thin, twice], [])
    assert ([one.id for one in matrix.thin], matrix.exit_code) == (["replay-returns-copy"], 0), "a warning"
    assert "; by 1 case only" in trial_line(thin)


def test_a_check_without_a_body_lets_its_fault_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    """L13 is the only check that sees this fault; without it the case is vacuous, which is no kill."""

    def nothing(step: Step) -> Iterator[Compared]:
        return iter(())

    monkeypatch.setitem(CHECKS, "L13", replace(CHECKS["L13"], function=nothing))
    trial = try_fault(JOB, "stats-count-own", [CASE])
    assert trial.status == "survived"
    assert Matrix([trial], []).exit_code == 1


def test_a_crash_is_no_kill_unless_crashing_is_the_fault() -> None:
    assert try_fault(JOB, "rank-raises", [CASE]).killed
    accident = replace(FAULTS["rank-raises"], crashes=False)
    FAULTS["rank-raises"], kept = accident, FAULTS["rank-raises"]
    try:
        assert try_fault(JOB, "rank-raises", [CASE]).status == "crashed"
    finally:
        FAULTS["rank-raises"] = kept


def test_a_fault_that_changes_no_byte_is_not_exercised() -> None:
    trial = try_fault(JOB, "row-of-another-token:rank=9", [CASE])
    assert (trial.status, trial.cases) == ("not_exercised", 1)
    assert Matrix([trial], []).exit_code == 1
    assert Matrix([replace(trial, optional=True)], []).exit_code == 0


@pytest.mark.parametrize(
    ("trial", "needed", "code"),
    [
        (killed(), ["C1"], 0),
        (killed(), ["C1", "L3"], 1),
        (killed(status="survived", check="", stage="", checks=[]), [], 1),
        (killed(status="crashed"), [], 1),
        (killed(stage="plan"), [], 0),  # found earlier than it happens: not located, but not missed
        (killed(stage="layer"), [], 1),
    ],
)
def test_what_turns_the_matrix_red(trial: Trial, needed: list[str], code: int) -> None:
    assert Matrix([trial], needed).exit_code == code


def test_score_and_median_are_of_what_counts() -> None:
    hidden = killed(id="rank-raises", status="not_exercised", optional=True)
    one, other = killed(shrunk="genB+R2+E2+K1+S1+H8"), killed(id="tokens-shifted", stage="plan", cases=7)
    matrix = Matrix([one, other, hidden], ["C1", "L3"])
    assert matrix.score == "2 of 2 faults killed, 1 at their own stage, within 7 cases; 1 of 2 checks kill one"
    assert matrix.median_shrunk == "2 ranks, 2 experts, 1 tokens, of 1 faults"
    assert matrix.blunt == ["L3"]


def test_the_case_list_is_short_and_shows_every_scenario_early() -> None:
    cases = case_list(JOB)
    kinds = [(case.scenario, case.format, case.model) for case in cases]
    assert len(cases) <= MOST_CASES
    assert len(set(kinds[: len(set(kinds))])) == len(set(kinds))
    assert {case.generation for case in cases} == {"A", "B"}


def test_choice_by_id_and_kind() -> None:
    assert chosen(JOB, ["slot-not-filled"]) == ["slot-not-filled", "slot-not-filled:rank=all"]
    assert chosen(JOB, ["slot-not-filled:rank=2"]) == ["slot-not-filled:rank=2"]
    assert "empty-plan-refused:rank=all" in chosen(JOB, kinds=["K11"])
    assert all("K11" in FAULTS[text.partition(":")[0]].bugs.split() for text in chosen(JOB, kinds=["K11"]))
    assert not any(FAULTS[text.partition(":")[0]].for_engine for text in chosen(JOB))
    with pytest.raises(CaseError, match="unknown fault 'slot'"):
        chosen(JOB, ["slot"])
    with pytest.raises(CaseError, match="--kind K99: no fault stands for it; known: B0"):
        chosen(JOB, kinds=["K99"])


def test_every_fault_names_its_stage_and_what_it_stands_for() -> None:
    assert len([fault for fault in FAULTS.values() if not fault.for_engine]) >= 50
    for fault in FAULTS.values():
        assert fault.stage in STAGES
        assert re.fullmatch(r"[KB]\d\d( [KB]\d\d)*", fault.bugs), fault.id
        assert fault.summary.endswith("."), fault.id


def test_command_line_prints_the_matrix_and_json(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("mutate", "--fault", "stats-count-own")
    assert (code, err) == (0, "")
    assert re.search(r"killed +stats-count-own +by L13 at plan, 1 cases, ", out)
    assert re.search(r"killed +stats-count-own:rank=all +by L13 at plan, 1 cases, ", out)
    assert "2 of 2 faults killed, 2 at their own stage, within 1 cases" in out
    code, out, err = cli("mutate", "--fault", "stats-count-own:rank=0", "--json")
    (fault,) = json.loads(out)["faults"]
    assert code == 0
    assert {name: fault[name] for name in ("id", "killed", "status", "stage", "located", "checks", "cases")} == {
        "id": "stats-count-own:rank=0",
        "killed": True,
        "status": "killed",
        "stage": "plan",
        "located": True,
        "checks": ["L13"],
        "cases": 1,
    }
    assert fault["bugs"] == FAULTS["stats-count-own"].bugs.split()
    assert fault["seconds"] > 0


def test_a_part_of_the_catalogue_is_merged_into_the_document(cli: Cli, tmp_path: Path) -> None:
    """Only the rows of the faults that ran change; a new one stands in its place in the catalogue."""
    path, doc = tmp_path / "faults.md", (ROOT / "docs" / "faults.md").read_text().splitlines()
    place = next(place for place, line in enumerate(doc) if line.startswith("| `stats-count-own` |"))
    path.write_text("\n".join([*doc[:place], "| `stats-count-own` | Out of date. |", *doc[place + 2 :], ""]))
    assert cli("mutate", "--fault", "stats-count-own", "--write", str(path))[0] == 0
    merged = path.read_text().splitlines()
    assert (merged[:place], merged[place + 2 :]) == (doc[:place], doc[place + 2 :])
    for line, text in zip(merged[place : place + 2], FAULTS["stats-count-own"].texts, strict=True):
        assert line.startswith(f"| `{text}` | ")
        assert " | plan | L13 at plan | `gen" in line


def test_what_is_no_whole_document_is_not_written(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "faults.md"
    code, _, err = cli("mutate", "--fault", "stats-count-own", "--write", str(path))
    assert (code, path.exists()) == (4, False)
    assert "only a whole run writes it anew" in err
    with pytest.raises(CaseError, match="no table of faults to merge into"):
        merged_page("# Something else", Matrix([killed()], []))


def test_the_document_is_of_this_catalogue() -> None:
    """docs/faults.md is written by `moonep-validate mutate --write`; here only that it is not out of date."""
    text = (ROOT / "docs" / "faults.md").read_text()
    for fault in FAULTS.values():
        row = re.search(rf"^\| `{fault.id}` \| (.*?) \| (\w+) \|", text, flags=re.MULTILINE)
        assert row, f"{fault.id} is not in docs/faults.md: run `moonep-validate mutate --write docs/faults.md`"
        assert row.groups() == (fault.summary, fault.stage), fault.id
    named = set(re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE))
    assert named == set(FAULTS) | set(chosen(JOB))
    assert "survived" not in text


def test_what_faults_stand_for_is_explained() -> None:
    text = (ROOT / "docs" / "bugs.md").read_text()
    explained = set(re.findall(r"^\| ([KB]\d\d) \|", text, flags=re.MULTILINE))
    assert {bug for fault in FAULTS.values() for bug in fault.bugs.split()} <= explained


@pytest.mark.slow
def test_the_whole_catalogue_is_killed_and_located() -> None:
    trials = list(mutation.mutate(JOB, chosen(JOB)))
    matrix = Matrix(trials, mutation.needed_checks(JOB, True))
    mutation.sharpen(JOB, matrix)
    assert matrix.exit_code == 0, matrix.score
    assert not matrix.thin, [one.id for one in matrix.thin]
    assert sum(one.located for one in trials) >= 0.9 * len(trials)
    assert max(one.cases for one in trials) <= MOST_CASES
