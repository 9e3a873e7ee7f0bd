"""What is known of one or several runs, small enough for ten thousand cases? What a gate writes and pages show.

It is made from ``report.json`` of a run, live or later; a gate's own ``report.json`` is this data, so that a later
gate compares with either (baseline.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from moonep_validate import __version__
from moonep_validate.judge.registry import said
from moonep_validate.judge.stages import PLACE
from moonep_validate.judge.verdict import EXIT_CODES, LEVELS, Finding, worst
from moonep_validate.trace.manifest import MAX_REPORT, REPORT
from moonep_validate.trace.schema import SchemaError, build, build_known, decoded, parsed, read_bytes, shown
from moonep_validate.trace.trace import Part, TraceError

SCHEMA, KIND = 1, "outcome"
GATES = ("failed", "hung", "unknown", "error", "vacuous", "not_exercised")
#: What is kept of a case that went wrong.
_PROBLEMS, _FINDINGS = 12, 8


@dataclass(frozen=True)
class Problem:
    """A result that gates and is no pass, or a waived one; ``findings`` as in ``report.json``."""

    check: str
    stage: str
    step: str
    status: str
    reason: str = ""
    findings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def promise(self) -> str:
        """The check with its promise."""
        return said(self.check)

    @property
    def lines(self) -> list[str]:
        """One line a finding, then the reason."""
        known = ("what", "place", "expected", "actual", "count")
        found = [str(Finding(**{name: one[name] for name in known if name in one})) for one in self.findings]
        return [*found, *filter(None, [self.reason])]


@dataclass(frozen=True)
class CaseTold:
    """One case of a run.

    Attributes:
        stage, check: the first broken stage and its check, or None.
        compared: check -> elements that it compared, of those that gate.
        stages: stage -> worst status of the checks that gate there.
        idle: checks that ran and compared nothing.
        events: known events that occurred.
        reason: why it was not run.
        more: vacuous reasons, errors of the suite, and lines of an autopsy.
        measures, balance: see judge/measures.py.
    """

    run: str
    case: str
    status: str
    level: str = "none"
    seconds: float = 0.0
    stage: str | None = None
    check: str | None = None
    command: str = ""
    compared: dict[str, int] = field(default_factory=dict)
    stages: dict[str, str] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    reason: str = ""
    more: list[str] = field(default_factory=list)
    measures: dict[str, float] = field(default_factory=dict)
    balance: dict[str, list[int]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from all others."""
        return self.run, self.case

    @property
    def gates(self) -> bool:
        """Whether it makes a run fail."""
        return self.status in GATES

    @property
    def first(self) -> Problem | None:
        """The problem at the first broken stage."""
        mine = [one for one in self.problems if (one.stage, one.check) == (self.stage, self.check)]
        return next(iter(mine), None)

    @property
    def headline(self) -> str:
        """One line: what is wrong."""
        if first := self.first:
            return f"{self.status} at stage {first.stage}, {first.promise}"
        return f"{self.status}: {next(iter([*self.more, self.reason]), '')}".rstrip(": ")

    @property
    def diagnosis(self) -> list[str]:
        """What is wrong, where, and how to see it again."""
        lines = list(self.first.lines) if self.first else []
        return [self.headline, *lines, *self.more, f"reproduce: {self.command}"]


@dataclass(frozen=True)
class Evidence:
    """A part that ran, the stages that it owned, what was replaced in it, and why it may not be what it says."""

    level: str
    text: str
    file: str
    stages: list[str]
    seams: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RunTold:
    """One target on a list of cases.

    Attributes:
        title: what was run, for people.
        planned: cases that were to run.
        unmet: demands that were not met; why cases were left out.
        evidence: who ran.
        smallest: how the first failure can be had again, tried; ``smallest_of`` is the case that failed.
    """

    name: str
    title: str
    status: str
    exit_code: int
    planned: int
    unmet: list[str] = field(default_factory=list)
    seconds: float = 0.0
    evidence: list[Evidence] = field(default_factory=list)
    smallest: str = ""
    smallest_of: str = ""

    @property
    def level(self) -> str:
        """The weakest level of its parts."""
        return next((level for level in LEVELS if level in {one.level for one in self.evidence}), "none")


@dataclass(frozen=True)
class Outcome:
    """Some runs and their cases.

    Attributes:
        checks: id -> name, stage and promise, of the version that ran.
        times: what took so many seconds.
        baseline: what a comparison said, one sentence each, by kind; empty where nothing was compared.
        environment: see environment.py.
        folders: of a gate's runs, each with hashes of its manifest and report; see seals.py.
        digest: of the file that it was read from.
    """

    title: str
    status: str
    exit_code: int
    runs: list[RunTold] = field(default_factory=list)
    cases: list[CaseTold] = field(default_factory=list)
    checks: dict[str, dict[str, str]] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    baseline: dict[str, list[str]] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    folders: dict[str, dict[str, str]] = field(default_factory=dict)
    digest: str = ""
    version: str = __version__
    schema: int = SCHEMA
    kind: str = KIND

    @property
    def level(self) -> str:
        """The weakest level of all runs."""
        return next((level for level in LEVELS if level in {run.level for run in self.runs}), "none")

    @property
    def word(self) -> str:
        """The answer: a status, or that something was not reached, or what it is worth beside a baseline."""
        if self.status == "incomplete" or (EXIT_CODES[self.status] and self.exit_code):
            return self.status
        if self.exit_code:
            return "failed: worse than the baseline" if self.baseline else "failed: not all was reached"
        return "passed: no worse than the baseline" if EXIT_CODES[self.status] else self.status

    def to_text(self) -> str:
        """As JSON, one case a line."""
        data = asdict(replace(self, cases=[]))
        del data["cases"], data["digest"]
        lines = ",\n".join(json.dumps(asdict(case)) for case in self.cases)
        return f'{json.dumps(data)[:-1]}, "cases": [\n{lines}\n]}}\n'


def case_told(run: str, data: Mapping[str, Any]) -> CaseTold:
    """A case from what ``Verdict.to_json`` says of it."""
    results = [one for one in data["results"] if one["gates"]]
    stages: dict[str, list[str]] = {}
    compared: dict[str, int] = {}
    for one in results:
        stages.setdefault(one["stage"], []).append(one["status"])
        if one["examined"]:
            compared[one["check"]] = compared.get(one["check"], 0) + one["examined"]
    skipped = next((one["reason"] for one in results if one["status"] == "not_run"), "")
    return CaseTold(
        run=run,
        case=data["case"],
        status=data["status"],
        level=data["level"],
        seconds=data.get("seconds", 0.0),
        stage=data["stage"],
        check=data["check"],
        command=data["command"],
        compared=compared,
        stages={stage: worst(stages[stage]) for stage in PLACE if stage in stages},
        events=[name for name, count in data.get("witnesses", {}).items() if count],
        problems=_problems(data, results),
        reason=skipped if data["status"] == "not_run" else "",
        more=_more(data),
        measures=data["measures"],
        balance=dict(data.get("balance", {})),
    )


def _problems(data: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """The first broken stage's result first, then the others."""
    bad = [one for one in results if one["status"] in (*GATES, "waived")]
    first = [one for one in bad if (one["stage"], one["check"]) == (data["stage"], data["check"])]
    ordered = first + [one for one in bad if one not in first]
    return [
        Problem(
            one["check"],
            one["stage"],
            one["step"],
            one["status"],
            one["reason"],
            [_json(finding, place == 0) for finding in one["findings"][:_FINDINGS]],
        )
        for place, one in enumerate(ordered[:_PROBLEMS])
    ]


def _json(finding: Mapping[str, Any], whole: bool) -> dict[str, Any]:
    """A finding; the map of where it lies is kept of the first problem only."""
    kept = {name: value for name, value in finding.items() if value is not None and (whole or name != "spread")}
    return {**kept, "place": dict(finding["place"])}


def _more(data: Mapping[str, Any]) -> list[str]:
    ranks = [
        f"rank {one['rank']}: {one['state']}; last completed: {one['completed']}"
        for one in data.get("autopsy", {}).get("ranks", [])
    ]
    vacuous = [f"vacuous: {one}" for one in data["vacuous"]]
    return [*vacuous, *(f"error of the suite: {one}" for one in data["errors"]), *ranks[:8]]


def evidence_of(cases: Iterable[Mapping[str, Any]]) -> list[Evidence]:
    """Who ran, over all cases that did: each distinct part once."""
    from moonep_validate.trace.provenance import describe

    found: dict[str, Evidence] = {}
    for data in cases:
        for stage, fields in data["parts"].items() if data["status"] != "not_run" else ():
            if fields.get("origin") == "none":
                continue
            key = json.dumps(fields, sort_keys=True)
            if key not in found:
                part = Part.from_json(dict(fields))
                found[key] = Evidence(
                    part.level, describe(part), part.file, [], list(part.seams), list(part.doubts)
                )
            if stage not in found[key].stages:
                found[key].stages.append(stage)
    return list(found.values())


def run_told(name: str, title: str, report: Mapping[str, Any]) -> tuple[RunTold, list[CaseTold]]:
    """A run and its cases from its ``report.json``."""
    cases = [case_told(name, one) for one in report["cases"]]
    told = RunTold(
        name,
        title,
        report["status"],
        report["exit_code"],
        report["planned"],
        list(report.get("unmet", [])),
        round(sum(case.seconds for case in cases), 3),
        evidence_of(report["cases"]),
        *report.get("smallest", ("", "")),
    )
    return told, cases


def together(runs: Sequence[RunTold]) -> tuple[str, int]:
    """Status and exit code of several runs: the worst; one that is not met is worse than one that passed."""
    codes = [run.exit_code for run in runs]
    status = worst([run.status for run in runs if run.status in EXIT_CODES])
    if 2 in codes or any(run.status not in EXIT_CODES for run in runs):
        return "incomplete", 2
    return status, EXIT_CODES[status] or max(codes, default=5)


def read_outcome(path: Path, name: str = "") -> Outcome:
    """An outcome from a file that ``run --out`` or ``gate`` wrote, or from the folder that holds it.

    Args:
        path: ``report.json`` or its folder.
        name: of the run, where the file does not say.

    Raises:
        TraceError: if it cannot be read, or is none.
    """
    file = path / REPORT if path.is_dir() else path
    try:
        data = parsed(decoded(read_bytes(file, MAX_REPORT)))
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise SchemaError(f"is no report of a run or a gate with schema {SCHEMA}, but {shown(data)}")
        if data.get("kind") == KIND:
            return build(Outcome, data)
        return _of_run(file, build_known(_Report, data), name)
    except OSError as error:
        raise TraceError(f"{file} cannot be read: {error.strerror}") from None
    except SchemaError as error:
        raise TraceError(f"{file}: {error}") from None


@dataclass(frozen=True)
class _Report:
    """What is read of the ``report.json`` of a run."""

    version: str
    subject: str
    status: str
    exit_code: int
    planned: int
    cases: list[dict[str, Any]]
    checks: dict[str, dict[str, str]] = field(default_factory=dict)
    unmet: list[str] = field(default_factory=list)
    smallest: tuple[str, str] = ("", "")
    environment: dict[str, Any] = field(default_factory=dict)
    digest: str = ""


def _of_run(file: Path, report: _Report, name: str) -> Outcome:
    """One run as an outcome."""
    name = name or file.parent.resolve().name
    try:
        run, cases = run_told(name, report.subject or name, vars(report))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise SchemaError(
            f"a case is not of the form that a run writes ({type(error).__name__}: {error})"
        ) from None
    return Outcome(
        title=run.title,
        status=run.status,
        exit_code=run.exit_code,
        runs=[run],
        cases=cases,
        checks=report.checks,
        times={name: run.seconds},
        environment=report.environment,
        digest=report.digest,
        version=report.version,
    )
