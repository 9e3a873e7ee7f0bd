"""How does a CI server read it? junit.xml, in the form that pytest writes: a suite a run, a testcase a case."""

from __future__ import annotations

import re
from xml.etree import ElementTree as Xml

from moonep_validate.doors.report.outcome import CaseTold, Outcome, RunTold

#: What XML 1.0 cannot hold, escaped or not.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SKIPPED = ("not_run", "not_applicable", "waived")


def junit(outcome: Outcome, tolerated: frozenset[tuple[str, str]] = frozenset()) -> bytes:
    """The whole file.

    Args:
        outcome: of a gate or of runs.
        tolerated: keys of cases whose failure the baseline has too; they are skipped, neither passes nor failures.
    """
    root = Xml.Element("testsuites", name="moonep-validate")
    for run in outcome.runs:
        cases = [case for case in outcome.cases if case.run == run.name]
        tests = [_case(case, case.key in tolerated) for case in cases]
        tests += [_problem(f"gate.{run.name}", line) for line in _unmet(run, cases)]
        _suite(root, run.name, tests, run.seconds)
    if gone := outcome.baseline.get("gone", []):  # new failures are tests that failed already
        _suite(root, "baseline", [_problem("gate.baseline", line) for line in gone], 0.0)
    Xml.indent(root)
    text = Xml.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'.encode()


def _unmet(run: RunTold, cases: list[CaseTold]) -> list[str]:
    """What failed beside the cases: demands, and a run in which nothing ran."""
    lines = list(run.unmet)
    if run.exit_code and not lines and not any(case.gates for case in cases):
        lines.append(f"run {run.name} ended with {run.status}, exit code {run.exit_code}")
    return lines


def _suite(root: Xml.Element, name: str, tests: list[Xml.Element], seconds: float) -> None:
    counts = {kind: sum(one.find(kind) is not None for one in tests) for kind in ("failure", "error", "skipped")}
    suite = Xml.SubElement(
        root,
        "testsuite",
        name=_legal(name),
        tests=str(len(tests)),
        failures=str(counts["failure"]),
        errors=str(counts["error"]),
        skipped=str(counts["skipped"]),
        time=f"{seconds:.3f}",
    )
    suite.extend(tests)


def _case(case: CaseTold, tolerated: bool) -> Xml.Element:
    test = Xml.Element(
        "testcase", classname=_legal(f"moonep.{case.run}"), name=_legal(case.case), time=f"{case.seconds:.3f}"
    )
    if case.status in _SKIPPED or tolerated:
        why = case.reason or case.headline + ", as in the baseline" * tolerated
        Xml.SubElement(test, "skipped", type=case.status, message=_legal(why))
    elif case.gates:
        kind = "error" if case.status == "error" else "failure"
        bad = Xml.SubElement(test, kind, type=case.status, message=_legal(case.headline))
        bad.text = _legal("\n".join(case.diagnosis))
    return test


def _problem(place: str, line: str) -> Xml.Element:
    test = Xml.Element("testcase", classname=_legal(place), name=_legal(line), time="0.000")
    Xml.SubElement(test, "failure", type="failed", message=_legal(line)).text = _legal(line)
    return test


def _legal(text: str) -> str:
    return _ILLEGAL.sub("?", text)
