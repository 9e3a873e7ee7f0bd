"""The gate: what it runs, what makes it fail, what CI servers read of it, and what it says of a baseline."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest

from moonep_validate.cases.profiles import for_generations, profile
from moonep_validate.doors.report.baseline import compare, pruned
from moonep_validate.doors.report.files import sealed
from moonep_validate.doors.report.github import error_lines, summary
from moonep_validate.doors.report.junit import junit
from moonep_validate.doors.report.outcome import (
    CaseTold,
    Evidence,
    Outcome,
    Problem,
    RunTold,
    read_outcome,
    together,
)
from moonep_validate.judge.checks import CHECKS
from moonep_validate.trace.trace import TraceError

Cli = Callable[..., tuple[int, str, str]]
SMOKE = ("--profile", "smoke", "--shrink-seconds", "0")


@pytest.fixture(autouse=True)
def _no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a gate that passed."""
    import sys
    from unittest.mock import patch

    from moonep_validate.doors.cli.main import main

    out = tmp_path_factory.mktemp("gate")
    arguments = ["moonep-validate", "gate", *SMOKE, "--out", str(out)]
    with patch.object(sys, "argv", arguments), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    return out


def edited(folder: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A changed copy of a gate's report."""
    data = json.loads((folder / "report.json").read_text())
    change(data)
    path = to / "base.json"
    path.write_text(json.dumps(data))
    return path


def told(case: str = "c", status: str = "passed", run: str = "r", **more: Any) -> CaseTold:
    return CaseTold(run, case, status, "reference", **more)


def failed(case: str = "c", stage: str = "prefetch", check: str = "W1", run: str = "r") -> CaseTold:
    finding = {"what": "gate weight bits", "place": {"rank": 1}, "expected": "1", "actual": "2", "count": 3}
    problem = Problem(check, stage, "base", "failed", "", [finding])
    return told(case, "failed", run, stage=stage, check=check, command="run it", problems=[problem])


def outcome(
    *cases: CaseTold, planned: int | None = None, unmet: tuple[str, ...] = (), level: str = "real"
) -> Outcome:
    worst = next((case.status for case in cases if case.gates), "passed")
    code = {"failed": 1, "hung": 13, "error": 14}.get(worst, 1 if unmet else 0)
    part = Evidence(level, "moonep 1", "/repo/src/moonep/__init__.py", ["prefetch"])
    run = RunTold("r", "r", worst, code, len(cases) if planned is None else planned, list(unmet), 1.0, [part])
    return Outcome("r", *together([run]), [run], list(cases))


def test_a_gate_runs_the_reference_and_leaves_what_ci_reads(passed: Path) -> None:
    found = read_outcome(passed)
    assert (found.status, found.exit_code, found.level, found.word) == ("passed", 0, "reference", "passed")
    assert [(run.name, run.planned, run.status) for run in found.runs] == [("reference", 4, "passed")]
    assert found.runs[0].seconds > 0
    assert {"start", "reference"} == set(found.times)
    case = next(case for case in found.cases if case.case == "genB+R4+E8+K2+S9+hot:5+@slot_used")
    assert case.compared["W1"] > 0
    assert case.stages["prefetch"] == "passed"
    assert sum(case.balance["before"]) == sum(case.balance["rows"]) == 4 * 2 * 9
    assert max(case.balance["rows"]) == 18, "the plan evens the ranks out"
    assert max(case.balance["before"]) > 18
    root = Xml.parse(passed / "junit.xml").getroot()
    assert [(suite.get("name"), suite.get("tests"), suite.get("failures")) for suite in root] == [
        ("reference", "4", "0")
    ]


def test_a_named_module_runs_beside_the_reference(cli: Cli, tmp_path: Path) -> None:
    code, out, _ = cli(
        "gate",
        *SMOKE,
        "--out",
        str(tmp_path),
        "--moonep-module",
        "moonep_validate.reference.moonep_b",
        "--ranks",
        "4",
    )
    assert code == 0, out
    assert [run.name for run in read_outcome(tmp_path).runs] == ["reference", "moonep_validate.reference.moonep_b"]
    assert "run moonep_validate.reference.moonep_b: passed, level reference, 2 cases" in out


def test_a_subject_that_cannot_run_makes_the_gate_fail(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    code, out, err = cli("gate", *SMOKE, "--out", str(tmp_path), "--moonep-module", "no_such_moonep")
    assert code == 4
    assert "--moonep-module no_such_moonep cannot be imported" in err
    assert out.startswith("::error title=moonep-validate gate::--moonep-module no_such_moonep cannot be imported")
    assert json.loads((tmp_path / "report.json").read_text())["exit_code"] == 2
    assert not (tmp_path / "junit.xml").exists()


def test_a_part_that_is_not_the_one_demanded_makes_the_gate_fail(cli: Cli, tmp_path: Path) -> None:
    module = "moonep_validate.reference.moonep_b"
    code, out, _ = cli(
        "gate", *SMOKE, "--out", str(tmp_path), "--moonep-module", module, "--require", "transport=moonep"
    )
    assert code == 1, out
    assert f"run {module}: not_run" in out
    assert "--require transport=moonep is not met" in out
    failures = Xml.parse(tmp_path / "junit.xml").getroot().findall(".//failure")
    assert [one.get("message", "").partition(" is not met")[0] for one in failures] == [
        "--require transport=moonep"
    ]


def test_a_failure_is_told_to_github_and_junit(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    code, out, _ = cli("gate", *SMOKE, "--out", str(tmp_path / "out"), "--fault", "slot-not-filled:rank=all")
    assert code == 1
    (line,) = [line for line in out.splitlines() if line.startswith("::error")]
    assert line.startswith(
        "::error title=reference%3A failed at stage prefetch%2C W1 slot-content%3A each used slot"
    )
    assert "%0Agate weight bits at rank " in line
    assert "%0Areproduce: moonep-validate run --case" in line
    text = (tmp_path / "summary.md").read_text()
    assert "## moonep-validate: failed, exit code 1" in text
    assert "| reference | failed | reference | 4 failed of 4 |" in text
    first = Xml.parse(tmp_path / "out" / "junit.xml").getroot().find(".//failure")
    assert first is not None
    assert (first.get("message") or "").startswith(
        "failed at stage prefetch, W1 slot-content: each used slot holds"
    )
    assert "reproduce: moonep-validate run --case" in (first.text or "")


def test_fail_fast_and_a_budget_leave_cases_out_and_fail(cli: Cli, tmp_path: Path) -> None:
    out = str(tmp_path)
    code, said, _ = cli("gate", *SMOKE, "--out", out, "--fault", "slot-not-filled", "--fail-fast")
    assert (code, len(read_outcome(tmp_path).cases)) == (1, 1)
    assert "--fail-fast: 3 of 4 cases were left out" in said
    code, said, _ = cli("gate", *SMOKE, "--out", out, "--time-budget", "1e-9")
    assert (code, "not in the range" in said or "Invalid value" in said) in ((4, False), (4, True))


def test_what_the_budget_leaves_is_a_failure(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moonep_validate.doors.cli.loop import Limits

    budget = Limits.reached

    def late(self: Limits, summary: Any) -> str:
        return budget(Limits(False, 1.0, -1.0 if summary.verdicts else float("inf")), summary)

    monkeypatch.setattr(Limits, "reached", late)
    code, said, _ = cli("gate", *SMOKE, "--out", str(tmp_path), "--time-budget", "1")
    assert code == 1
    assert "--time-budget 1: it ended with 3 of 4 cases not judged" in said
    assert "gate failed: not all was reached" in said
    (failure,) = Xml.parse(tmp_path / "junit.xml").getroot().findall(".//failure")
    assert failure.get("message") == "--time-budget 1: it ended with 3 of 4 cases not judged"


def test_an_interrupted_gate_is_incomplete(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moonep_validate.doors.cli.loop import Limits

    def interrupt(self: Limits, summary: Any) -> str:
        if summary.verdicts:
            raise KeyboardInterrupt
        return ""

    monkeypatch.setattr(Limits, "reached", interrupt)
    module = "moonep_validate.reference.moonep_b"
    code, said, _ = cli("gate", *SMOKE, "--out", str(tmp_path), "--moonep-module", module)
    found = read_outcome(tmp_path)
    assert (code, found.status, found.exit_code, len(found.cases)) == (2, "incomplete", 2, 1)
    assert f"run {module}: not_run" in said
    assert "interrupted before it began" in said
    assert "It was interrupted" in (tmp_path / "report.html").read_text()


def test_a_subject_that_is_not_run_makes_the_gate_fail(cli: Cli, tmp_path: Path) -> None:
    code, said, _ = cli("gate", *SMOKE, "--out", str(tmp_path), "--experts", "deep_gemm", "--ranks", "4")
    assert code == 5, said
    assert read_outcome(tmp_path).word == "failed: not all was reached"
    assert {case.status for case in read_outcome(tmp_path).cases if case.run == "experts-deep_gemm"} == {"not_run"}
    failures = Xml.parse(tmp_path / "junit.xml").getroot().findall(".//failure")
    assert [one.get("message") for one in failures] == ["run experts-deep_gemm ended with not_run, exit code 5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "smok"], "--profile is 'smok'; known: pre-merge, default"),
        (["--baseline", "absent.json"], "absent.json cannot be read: No such file"),
        (["--keep", "some"], "--keep is 'some'; known: failed, all, none"),
        (["--time-budget", "0"], "--time-budget"),
        (["--case", "genB+R2+E4+K2+S3"], "No such option"),
    ],
)
def test_wrong_usage_is_one_line(cli: Cli, tmp_path: Path, arguments: list[str], message: str) -> None:
    code, _, err = cli("gate", "--out", str(tmp_path / "out"), *arguments)
    assert code == 4
    assert message in err


def test_a_folder_of_somebody_else_stays(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"mine": 1}')
    code, _, err = cli("gate", *SMOKE, "--out", str(tmp_path))
    assert code == 4
    assert "report.json was not written by a run, and stays" in err
    assert (tmp_path / "report.json").read_text() == '{"mine": 1}'


def test_the_same_again_is_no_worse_than_its_baseline(cli: Cli, passed: Path, tmp_path: Path) -> None:
    code, out, _ = cli("gate", *SMOKE, "--out", str(tmp_path), "--baseline", str(passed / "report.json"))
    assert code == 0
    for word in ("new failures:", "no longer judged:", "moved: run reference: plan"):
        assert word not in out
    code, out, _ = cli("gate", *SMOKE, "--out", str(tmp_path), "--baseline", str(passed / "reference"))
    assert code == 0, "the report of a run is a baseline too"


def test_a_failure_that_the_baseline_has_is_known(cli: Cli, passed: Path, tmp_path: Path) -> None:
    bad = ("gate", *SMOKE, "--fault", "slot-not-filled:rank=all")
    code, out, _ = cli(*bad, "--out", str(tmp_path / "one"), "--baseline", str(passed / "report.json"))
    assert code == 1
    assert len(re.findall("^new failures: reference gen", out, re.M)) == 4
    code, out, _ = cli(*bad, "--out", str(tmp_path / "two"), "--baseline", str(tmp_path / "one"))
    assert code == 0
    assert len(re.findall("^failures that the baseline has too: reference gen", out, re.M)) == 4
    assert "gate passed: no worse than the baseline" in out
    root = Xml.parse(tmp_path / "two" / "junit.xml").getroot()
    assert [len(root.findall(f".//{kind}")) for kind in ("failure", "skipped")] == [0, 4]


def test_a_check_that_went_idle_fails_the_gate(cli: Cli, passed: Path, tmp_path: Path) -> None:
    def more(data: dict[str, Any]) -> None:
        data["cases"][0]["compared"]["Z1"] = 7

    base = edited(passed, tmp_path, more)
    code, out, _ = cli("gate", *SMOKE, "--out", str(tmp_path / "out"), "--baseline", str(base))
    assert code == 1
    assert "no longer judged: run reference: check Z1 compared something, and compares nothing now, in gen" in out
    assert "gate failed: worse than the baseline" in out


def test_a_saved_baseline_is_small_and_says_as_much(cli: Cli, passed: Path, tmp_path: Path) -> None:
    saved = tmp_path / "base.json"
    assert cli("gate", *SMOKE, "--out", str(tmp_path / "out"), "--save-baseline", str(saved))[0] == 0
    text = saved.read_text()
    assert len(text) < 10_000
    for word in (str(tmp_path), "environment", "command", "findings"):
        assert word not in text
    assert len(text.splitlines()) == 4 + 3
    assert compare(read_outcome(saved), read_outcome(passed)).lines == {}
    idle = replace(read_outcome(passed).cases[0], compared={})
    now = replace(read_outcome(passed), cases=[idle, *read_outcome(passed).cases[1:]])
    assert len(compare(read_outcome(saved), now).lines["gone"]) > 40


def test_the_committed_baseline_names_cases_and_checks_of_today() -> None:
    base = read_outcome(Path(__file__).parents[1] / "baseline.json")
    assert base.status == "passed"
    today = {str(case) for case in for_generations(profile("default"), ("A", "B"))}
    advice = "write it anew: moonep-validate gate --save-baseline tests/baseline.json"
    assert {case.case for case in base.cases} <= today, advice
    assert {check for case in base.cases for check in case.compared} <= set(CHECKS), advice


def test_a_case_that_is_gone_fails_the_gate(cli: Cli, passed: Path, tmp_path: Path) -> None:
    base = edited(passed, tmp_path, lambda data: data["cases"].append({**data["cases"][0], "case": "genB+gone"}))
    code, out, _ = cli("gate", *SMOKE, "--out", str(tmp_path / "out"), "--baseline", str(base))
    assert code == 1
    assert "no longer judged: reference genB+gone: the case is gone; it was passed" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(schema=2), "is no report of a run or a gate with schema 1"),
        (lambda data: data["cases"][0].pop("status"), "cases[0] lacks status"),
        (lambda data: data["cases"][0].update(compared=3), "cases[0].compared is 3, an object is needed"),
        (lambda data: data.update(status="incomplete"), "the baseline is of a run that was interrupted"),
        (
            lambda data: data["runs"][0].update(name="other"),
            "the baseline has runs other, this gate has reference",
        ),
    ],
)
def test_a_bad_baseline_is_one_line(cli: Cli, passed: Path, tmp_path: Path, change: Any, message: str) -> None:
    base = edited(passed, tmp_path, change)
    code, _, err = cli("gate", *SMOKE, "--out", str(tmp_path / "out"), "--baseline", str(base))
    assert code == 4
    assert message in err
    assert len(err.splitlines()) == 1


def lines(base: Outcome, now: Outcome) -> dict[str, list[str]]:
    return compare(base, now).lines


def test_each_kind_of_change_is_told() -> None:
    assert lines(outcome(told()), outcome(told())) == {}
    (new,) = lines(outcome(told()), outcome(failed()))["new"]
    assert new.startswith("r c: failed at stage prefetch, W1 slot-content: ")
    assert new.endswith("; it was passed")
    (other,) = lines(outcome(failed(check="I6")), outcome(failed()))["new"]
    assert "; it was failed at stage prefetch, I6 " in other
    assert lines(outcome(told("d")), outcome(told("d"), failed()))["new"][0].endswith(
        "the baseline does not have it"
    )
    assert set(lines(outcome(failed()), outcome(told()))) == {"mended"}
    assert lines(outcome(told(status="waived")), outcome(told()))["mended"] == [
        "r c: it was waived, and passes; its waiver no longer applies"
    ]
    assert lines(outcome(told()), outcome(told(status="not_run", reason="no GPU")))["gone"] == [
        "r c: not run (no GPU); it was passed"
    ]
    assert lines(outcome(told()), outcome(told(), level="stand-in"))["gone"] == [
        "run r: the level of prefetch fell from real to stand-in"
    ]
    assert lines(outcome(told()), outcome(told(), told("e"))) == {"added": ["r e"]}


def test_the_level_of_each_stage_is_compared() -> None:
    """A part that became a stand-in is seen beside one that always was."""
    weak = Evidence("stand-in", "moonep 1", "", ["plan", "combine"])
    base = outcome(told())
    base = replace(
        base, runs=[replace(base.runs[0], evidence=[weak, Evidence("real", "e", "", ["layer", "load"])])]
    )
    now = replace(
        base, runs=[replace(base.runs[0], evidence=[weak, Evidence("patched", "e", "", ["layer", "load"])])]
    )
    assert base.level == now.level == "stand-in"
    assert lines(base, now) == {"gone": ["run r: the level of load, layer fell from real to patched"]}
    assert lines(now, base) == {}


def test_cases_that_a_cut_left_out_are_told_by_the_cut_alone() -> None:
    assert lines(outcome(told(), told("d")), outcome(told(), planned=2, unmet=("--fail-fast: 1 of 2",))) == {}
    assert lines(outcome(told(), told("d")), outcome(told()))["gone"] == ["r d: the case is gone; it was passed"]


def test_an_event_that_is_seen_no_more_fails_the_gate() -> None:
    base, now = outcome(told(events=["slot_used", "padding"])), outcome(told(events=["padding", "chain"]))
    assert lines(base, now) == {"gone": ["run r: event @slot_used was seen, and is not seen now, in c"]}
    assert compare(base, now).broken
    assert lines(now, base)["gone"] == ["run r: event @chain was seen, and is not seen now, in c"]
    # A case that fails says why by itself; a baseline from before knows no events.
    assert set(lines(base, outcome(failed()))) == {"new"}
    assert lines(outcome(told()), now) == {}


def test_events_are_told_and_saved(passed: Path, cli: Cli, tmp_path: Path) -> None:
    found = read_outcome(passed)
    assert all(case.events for case in found.cases)
    for case in found.cases:
        assert set(re.findall(r"@(\w+)", case.case)) <= set(case.events)
    (tmp_path / "base.json").write_bytes(pruned(found))
    assert [case.events for case in read_outcome(tmp_path / "base.json").cases] == [c.events for c in found.cases]


HOSTILE = (
    "</td><script>alert(1)</script>\n::error file=a.py,line=1::mine\n  ::stop-commands::x\n##[error]old\x1b[31mred"
)


def test_what_a_subject_says_is_no_command_and_no_markup(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_moonep.py").write_text(
        "from moonep_validate.reference import moonep_b\n"
        "from moonep_validate.reference.moonep_b import MoonEPCommPlan\n"
        "class Buffer(moonep_b.Buffer):\n"
        "    def combine(self, *args, **kwargs):\n"
        f"        raise RuntimeError({HOSTILE!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    out = tmp_path / "out"
    module = ("--moonep-module", "hostile_moonep", "--fail-fast")
    code, said, _ = cli("gate", *SMOKE, *module, "--out", str(out))
    assert code == 1
    # GitHub reads a command wherever a line begins with one, after any blanks.
    token = re.search(r"^::stop-commands::(\w{32})$", said, re.M)
    assert token
    before, _, rest = said.partition(token[0])
    shielded, _, after = rest.partition(f"\n::{token[1]}::\n")
    assert "::error" not in before
    assert "::error file=a.py,line=1::mine" in shielded
    commands = [line for line in after.splitlines() if re.match(r"\s*(::|##\[)", line)]
    assert len(commands) == 2
    assert all(line.startswith("::error ") for line in commands)
    assert any(
        line.startswith("::error file=hostile_moonep.py,line=5,title=hostile_moonep%3A") for line in commands
    )
    assert "\x1b" not in shielded
    page = (out / "report.html").read_text()
    assert "alert(1)" in page
    assert "<script" not in page
    assert "<script" not in (tmp_path / "summary.md").read_text()
    assert not re.search(r"^\s*::", (tmp_path / "summary.md").read_text(), re.M)
    bad = Xml.parse(out / "junit.xml").getroot().find(".//failure")
    assert bad is not None
    assert "<script>alert(1)</script>" in str(bad.text)


def test_an_unknown_or_an_error_is_never_tolerated() -> None:
    for status in ("unknown", "error", "vacuous", "not_exercised"):
        change = compare(outcome(told(status=status)), outcome(told(status=status)))
        assert change.tolerated == frozenset()
        assert change.broken


def test_plans_and_times_that_moved_are_told_and_no_failure() -> None:
    one = told(balance={"rows": [9, 9], "moved": [1, 2]}, measures={"padding_ratio": 0.5})
    two = told(balance={"rows": [8, 10], "moved": [1, 2]}, measures={"padding_ratio": 0.25})
    change = compare(outcome(one), outcome(two))
    assert change.lines == {
        "moved": ["run r: padding ratio from 0.5 to 0.25 in 1 cases", "run r: plan rows from 9 to 10 in 1 cases"]
    }
    assert not change.broken


def test_a_baseline_of_another_gate_is_refused() -> None:
    with pytest.raises(TraceError, match="none in common"):
        compare(outcome(told()), Outcome("", "passed", 0))


def test_an_annotation_is_at_the_file_of_the_part_that_broke() -> None:
    bad = outcome(failed(), failed("d"), failed("e", stage="plan", check="L1"))
    first, second = error_lines(bad, frozenset(), Path("/repo"))
    assert first.startswith("::error file=src/moonep/__init__.py,line=1,title=r%3A failed at stage prefetch")
    assert second.startswith("::error title=r%3A failed at stage plan")
    assert "file=" not in error_lines(bad, frozenset(), Path("/elsewhere"))[0]
    raised = replace(
        failed(), problems=[Problem("W1", "prefetch", "base", "failed", "KeyError (__init__.py:10 in f)")]
    )
    assert error_lines(outcome(raised), frozenset(), Path("/repo"))[0].startswith(
        "::error file=src/moonep/__init__.py,line=10,title="
    )
    assert error_lines(bad, frozenset({("r", "c"), ("r", "d"), ("r", "e")}), None) == []
    assert (
        len(error_lines(outcome(*(failed(str(i), check=f"L{i}") for i in range(1, 20))), frozenset(), None)) == 10
    )


def test_text_from_outside_breaks_no_format() -> None:
    bad = told("a|b`c<d", "error", more=["error of the suite: \x00\x1b[31m|`<script>\n::error::x"])
    found = junit(outcome(bad))
    error = Xml.fromstring(found).find(".//error")
    assert error is not None
    assert "??" not in (error.get("type") or "")
    assert "?[31m" not in found.decode().replace("??[31m", "")
    (line,) = error_lines(outcome(bad), frozenset(), None)
    assert "\n" not in line
    assert "<script>" not in summary(outcome(bad))


def test_a_run_that_was_cut_or_interrupted_is_never_a_pass() -> None:
    run = RunTold("r", "r", "incomplete", 2, 3)
    assert together([run, RunTold("s", "s", "failed", 1, 3)]) == ("incomplete", 2)
    assert together([RunTold("s", "s", "not_run", 5, 3), RunTold("r", "r", "passed", 0, 3)]) == ("passed", 5)
    assert Outcome("", "passed", 5).word == "failed: not all was reached"


def test_a_report_has_one_case_a_line_and_reads_back(passed: Path) -> None:
    data = (passed / "report.json").read_bytes()
    assert sealed(read_outcome(passed).to_text()) == data
    run = (passed / "reference" / "report.json").read_bytes()
    for text in (data, run):
        lines = text.decode().splitlines()
        assert (len(lines), lines[-2], lines[-1].startswith('"digest": ')) == (4 + 3, "],", True)
        assert len(json.loads(text)["cases"]) == 4


def assert_junit(data: bytes) -> Xml.Element:
    """What Jenkins' and pytest's JUnit schema ask for: elements, attributes, their types, and counts that add up."""
    root = Xml.fromstring(data)
    assert root.tag == "testsuites"
    for suite in root:
        assert suite.tag == "testsuite"
        assert suite.attrib["name"]
        assert float(suite.attrib["time"]) >= 0
        tests = list(suite)
        assert int(suite.attrib["tests"]) == len(tests)
        for kind, counted in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            assert int(suite.attrib[counted]) == sum(one.find(kind) is not None for one in tests)
        for test in tests:
            assert (test.tag, set(test.attrib)) == ("testcase", {"classname", "name", "time"})
            assert float(test.attrib["time"]) >= 0
            assert len(test) <= 1
            for told in test:
                assert told.tag in ("failure", "error", "skipped")
                assert set(told.attrib) == {"type", "message"}
        assert len({(one.attrib["classname"], one.attrib["name"]) for one in tests}) == len(tests)
    return root


def test_junit_of_ten_thousand_cases_and_of_any_text_keeps_to_the_schema() -> None:
    kinds = ("passed", "failed", "hung", "error", "waived", "not_run", "vacuous", "unknown", "not_exercised")
    evil = f"{HOSTILE}\x00\ud800]]>&<failure/>"
    cases = [
        told(f"genB+R4+table:{'7,' * 400}{at}", kinds[at % 9], more=[evil], reason=evil, command=evil)
        for at in range(10_000)
    ]
    whole = replace(outcome(*cases, unmet=(evil,)), baseline={"gone": [evil]})
    begin = time.process_time()
    data = junit(whole, frozenset({cases[1].key}))
    root = assert_junit(data)
    assert time.process_time() - begin < 20
    assert [(suite.get("name"), suite.get("tests")) for suite in root] == [("r", "10001"), ("baseline", "1")]
    assert [root[0].get(name) for name in ("failures", "errors", "skipped")] == ["5555", "1111", "2223"]
    assert root[0][9999].get("name") == cases[9999].case, "a long name is whole"
    assert "\x1b" not in data.decode()
    assert "<script>alert(1)</script>" in str(root[0][3][0].text)
