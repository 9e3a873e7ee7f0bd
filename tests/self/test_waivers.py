"""Known defects of engines: a waiver covers exactly what it names, and fails once there is nothing left to cover."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.doors.report.summary import Summary
from moonep_validate.judge.checks import CHECKS
from moonep_validate.judge.stages import STAGES
from moonep_validate.judge.verdict import EXIT_CODES, Finding, Result, Verdict
from moonep_validate.judge.waivers import LOADED, SHIPPED, Waiver, read_waivers, waive
from moonep_validate.trace.trace import Part

FOUND = Path(__file__).parents[2] / "docs" / "found.md"
CASE = Case.parse("genA+R2+E8+K2+S16+abort")
ENGINE = Part("real", "vllm.model_executor", "0.32.1")
TODAY = date(2027, 1, 31)
LINK = "docs/found.md, vllm-plan-kept"
DIFFERENCE = Finding("layer call of step after", {"rank": 0}, "return", "AssertionError")

GOOD = {
    "subject": '"vllm"',
    "checks": '["F1"]',
    "case": '"*+abort*"',
    "step": '"after"',
    "versions": '">=0.32,<0.34"',
    "link": f'"{LINK}"',
    "expires": "2027-06-30",
}


def result(check: str, step: str, status: str, stage: str = "layer") -> Result:
    findings = (DIFFERENCE,) if status == "failed" else ()
    return Result(check, stage, step, status, "real", 4, findings)


def verdict(*results: Result, case: Case = CASE) -> Verdict:
    return Verdict(case, dict.fromkeys(STAGES, ENGINE), list(results))


def waiver(
    subject: str = "vllm",
    checks: tuple[str, ...] = ("F1",),
    case: str = "*+abort*",
    step: str = "after",
    versions: str = ">=0.32,<0.34",
    expires: date = date(2027, 6, 30),
) -> Waiver:
    return Waiver(subject, checks, LINK, expires, case, step, SpecifierSet(versions))


def waived(*waivers: Waiver, engine: Part = ENGINE, case: Case = CASE, today: date = TODAY) -> Verdict:
    """A case in which F1 and P1 passed in one step, and F1 failed in the next one."""
    steps = [
        result("F1", "base", "passed"),
        result("P1", "base", "passed", "experts"),
        result("F1", "after", "failed"),
    ]
    return waive(verdict(*steps, case=case), waivers, engine, today)


def write(folder: Path, text: str) -> Path:
    file = folder / "waivers.toml"
    file.write_text(text)
    return file


def entry(**changes: str | None) -> str:
    """One entry; None leaves a key out."""
    lines = {**GOOD, **changes}
    return "[[waiver]]\n" + "".join(f"{key} = {value}\n" for key, value in lines.items() if value is not None)


def test_a_covered_failure_is_waived_with_its_reason() -> None:
    got = waived(waiver())
    assert [r.status for r in got.results] == ["passed", "passed", "waived"]
    last = got.results[-1]
    assert (last.reason, last.findings) == (f"known: {LINK}", (DIFFERENCE,))
    assert (got.status, got.ok, got.first) == ("waived", True, None)


def test_a_hang_can_be_waived_too() -> None:
    got = waive(verdict(result("F1", "after", "hung")), [waiver()], ENGINE, TODAY)
    assert [r.status for r in got.results] == ["waived"]


def test_a_waived_case_is_not_counted_as_passed_and_exits_with_0() -> None:
    summary = Summary(2, [waived(waiver()), verdict(result("F1", "base", "passed"))])
    assert (summary.status, summary.exit_code) == ("waived", 0)
    assert dict(summary.counts) == {"waived": 1, "passed": 1}
    assert Summary(1, [waived(waiver())]).exit_code == EXIT_CODES["waived"] == 0
    row = next(row for row in summary.rows() if row.check.id == "F1" and row.statuses["waived"])
    assert row.status == "waived"


def test_a_new_failure_beside_a_known_one_still_fails() -> None:
    for status, code in (("failed", 1), ("unknown", 12), ("hung", 13)):
        both = verdict(result("F1", "after", "failed"), result("I8", "after", status, "load"))
        got = waive(both, [waiver()], ENGINE, TODAY)
        assert [r.status for r in got.results] == ["waived", status]
        assert (got.status, EXIT_CODES[got.status]) == (status, code)
        assert got.first is not None
        assert got.first.check == "I8"


@pytest.mark.parametrize("status", ["unknown", "vacuous", "not_run", "not_applicable", "passed"])
def test_only_failures_are_waived(status: str) -> None:
    """A checker that crashed, or compared nothing, is no known defect of an engine."""
    got = waive(
        verdict(result("F1", "after", status), result("I11", "after", "failed")),
        [waiver(checks=("F1", "I11"))],
        ENGINE,
        TODAY,
    )
    assert [r.status for r in got.results] == [status, "waived"]


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (waiver(subject="sglang"), "another engine"),
        (waiver(checks=("P1",), step="later"), "another step"),
        (waiver(checks=("I11",)), "another check, which did not judge this step"),
        (waiver(step="afte"), "a step is named as a whole"),
        (waiver(case="*+reload*"), "another case"),
        (waiver(case="genA+R2+E8"), "a case is named as a whole"),
        (waiver(versions=">=0.33"), "an older version"),
        (waiver(versions="<0.32"), "a newer version"),
        (waiver(expires=TODAY), "expired today"),
        (waiver(expires=date(2026, 12, 31)), "expired long ago"),
    ],
)  # fmt: skip
def test_what_a_waiver_does_not_name_still_fails(one: Waiver, why: str) -> None:
    got = waived(one)
    assert [r.status for r in got.results] == ["passed", "passed", "failed"], why
    assert (got.status, got.results[-1].reason) == ("failed", ""), why


def test_an_expired_waiver_of_a_mended_defect_does_nothing() -> None:
    passing = verdict(result("F1", "after", "passed"))
    assert waive(passing, [waiver(expires=TODAY)], ENGINE, TODAY).status == "passed"


def test_one_day_before_it_expires_it_counts() -> None:
    assert waived(waiver(expires=date(2027, 2, 1))).status == "waived"


@pytest.mark.parametrize(
    ("version", "versions", "status"),
    [
        ("0.32.0", ">=0.32,<0.34", "waived"),
        ("0.33.9", ">=0.32,<0.34", "waived"),
        ("0.34.0", ">=0.32,<0.34", "failed"),
        ("0.32.1+cpu", ">=0.32,<0.34", "waived"),
        ("unknown", ">=0.32,<0.34", "failed"),
        ("unknown", "", "waived"),
    ],
)
def test_the_version_that_runs_decides(version: str, versions: str, status: str) -> None:
    engine = Part("real", "vllm", version)
    assert waived(waiver(versions=versions), engine=engine).status == status


def test_a_waiver_that_covers_nothing_any_more_fails() -> None:
    got = waive(
        verdict(result("F1", "base", "passed"), result("F1", "after", "passed")), [waiver()], ENGINE, TODAY
    )
    assert [r.status for r in got.results] == ["passed", "failed"]
    assert (
        got.results[-1].reason
        == f"a waiver expects a failure here ({LINK}), and nothing failed: remove the waiver"
    )
    assert (got.status, got.ok) == ("failed", False)
    assert "remove the waiver" in got.diagnosis
    assert got.first is not None
    assert (got.first.check, got.first.step) == ("F1", "after")


def test_a_waiver_of_several_checks_needs_one_of_them_to_fail() -> None:
    """One defect shows as F1 where an engine raises, and as I11 where it goes on."""
    several = waiver(checks=("F1", "I11"))
    results = result("F1", "after", "passed"), result("I11", "after", "failed")
    got = waive(verdict(*results), [several], ENGINE, TODAY)
    assert [r.status for r in got.results] == ["passed", "waived"]


def test_a_waiver_is_no_demand_on_steps_that_did_not_run() -> None:
    """The case ended before the step: whatever ended it has a failure of its own."""
    got = waive(verdict(result("F1", "base", "failed")), [waiver()], ENGINE, TODAY)
    assert [(r.status, r.reason) for r in got.results] == [("failed", "")]


def test_a_verdict_is_not_changed_in_place() -> None:
    before = verdict(result("F1", "after", "failed"))
    waive(before, [waiver()], ENGINE, TODAY)
    assert before.results[0].status == "failed"


def test_a_file_is_read_as_written(tmp_path: Path) -> None:
    first, second = read_waivers(write(tmp_path, entry() + entry(case=None, step=None, versions=None)))
    assert first == waiver()
    assert (second.case, second.step, str(second.versions)) == ("*", "*", "")
    assert read_waivers(write(tmp_path, "")) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (entry(link=None), "entry 1 lacks link"),
        (entry(subject=None, expires=None), "entry 1 lacks expires, subject"),
        (entry() + entry(checks=None), "entry 2 lacks checks"),
        (entry(check='["F1"]'), "entry 1 has check; known: case, checks, expires, link, step, subject, versions"),
        (entry(versions='"0.32 or so"'), "entry 1: Invalid specifier: '0.32 or so'"),
        (entry(expires='"2027-06-30"'), "expires is '2027-06-30', a date such as 2027-06-30 is needed"),
        (entry(expires="3"), "expires is 3, a date such as 2027-06-30 is needed"),
        (entry(expires="2027-06-31"), "cannot be read: "),
        ("not TOML", "cannot be read: "),
        ("a = " + "[" * 900, "cannot be read: is nested too deep"),
        ("a." * 400 + "a = 1", "tables [[waiver]] are needed"),
        ("a." * 4000 + "a = 1", "has a line of more than 1000 characters"),
        ("# " + "x" * 900 + "\n" + "#\n" * 2**16, "has 131975 bytes, the limit is 131072"),
        ("a = " + "9" * 900, "tables [[waiver]] are needed"),
        (entry(checks="[1]"), "checks[0] is 1, a text is needed"),
        (entry(checks='["F1", "ZZ"]'), "checks has 'ZZ', ids of checks are needed"),
        (entry(subject="7"), "subject is 7, a text is needed"),
        ("waiver = 3", "tables [[waiver]] are needed"),
        ("waiver = [3]", "entry 1 is 3, an object is needed"),
    ],
)
def test_a_bad_file_gives_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(CaseError) as error:
        read_waivers(file)
    said = str(error.value)
    assert message in said
    assert said.startswith(f"waivers {file}")
    assert len(said.splitlines()) == 1


def test_an_old_case_word_covers_what_it_covered(tmp_path: Path) -> None:
    (one,) = read_waivers(write(tmp_path, entry(case='"*+answers*"')))
    assert one.case == "*+configurations*"


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"waivers .*nothing\.toml cannot be read: .*No such file"):
        read_waivers(tmp_path / "nothing.toml")


def test_what_we_ship_can_be_read_and_names_known_checks() -> None:
    for one in read_waivers(SHIPPED):
        assert set(one.checks) <= {*CHECKS, *LOADED}, one.link
        assert one.subject in ("vllm", "sglang"), one.link
        assert str(one.versions), f"{one.link}: a defect is known in some versions"


def test_what_we_ship_is_described() -> None:
    described = FOUND.read_text()
    for one in read_waivers(SHIPPED):
        place = re.fullmatch(r"docs/found\.md, ([a-z0-9-]+)", one.link)
        assert place, f"{one.link} is no place in docs/found.md"
        assert place[1] in described, f"docs/found.md does not describe {place[1]}"
