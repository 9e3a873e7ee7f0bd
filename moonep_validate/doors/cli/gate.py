"""The command ``gate``: the reference and what is named are judged; it fails unless all of that was reached."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.cases.profiles import PROFILES
from moonep_validate.doors.cli.loop import AllChecks, Limits, job_and_cases, judge_all, opened, profile_of
from moonep_validate.doors.cli.options import console, note, one_of, takes
from moonep_validate.pipeline.options import DECLARED, REFERENCE, Options

if TYPE_CHECKING:
    from moonep_validate.doors.doctor.line import Line
    from moonep_validate.doors.report.baseline import Change
    from moonep_validate.doors.report.gate_files import GateFolder
    from moonep_validate.doors.report.outcome import CaseTold, Outcome, RunTold
    from moonep_validate.judge.verdict import Verdict
    from moonep_validate.pipeline.job import Job
    from moonep_validate.trace.manifest import Keeps
    from moonep_validate.trace.trace import Trace

#: The list of each target's own kind.
PRE_MERGE = "pre-merge"
_INCOMPLETE = 2


@dataclass(frozen=True)
class _Run:
    """One target, as it is about to run."""

    name: str
    title: str
    options: Options
    job: Job
    cases: list[Case]


@takes(*(set(DECLARED) - {"case", "profile"}))
def gate(
    options: Options,
    profile: Annotated[
        str, typer.Option(help=f"{PRE_MERGE} (each target's own list), or: {', '.join(PROFILES)}.")
    ] = PRE_MERGE,
    out: Annotated[Path, typer.Option(help="Folder for report.json, junit.xml and a folder a run.")] = Path(
        "gate"
    ),
    baseline: Annotated[
        Path | None, typer.Option(help="report.json of an earlier gate or run: fail on what is worse than it.")
    ] = None,
    save_baseline: Annotated[
        Path | None, typer.Option("--save-baseline", help="Keep what a later --baseline needs, if the gate ends.")
    ] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first case that fails.")] = False,
    time_budget: Annotated[
        float | None, typer.Option(min=1.0, help="Seconds for all; what is then not judged makes the gate fail.")
    ] = None,
    keep: Annotated[
        str, typer.Option(help="Traces to keep: failed (whatever did not pass), all or none.")
    ] = "failed",
    shrink_seconds: Annotated[float, typer.Option(help="Time to shrink a run's first failure; 0: none.")] = 10.0,
    all_checks: AllChecks = False,
) -> None:
    """Judge the reference, and what is named, for CI: fail unless everything asked for was reached."""
    begin = time.monotonic()
    one_of("--keep", keep, ("failed", "all", "none"))
    one_of("--profile", profile, (PRE_MERGE, *PROFILES))
    from moonep_validate.doors.report.baseline import pruned
    from moonep_validate.doors.report.gate_files import GateFolder
    from moonep_validate.doors.report.github import unheard
    from moonep_validate.doors.report.outcome import read_outcome

    base = read_outcome(baseline) if baseline else None
    folder = GateFolder(out)
    lines, blockers = _doctor(options)
    if blockers:
        _blocked(folder, options, lines, blockers)
    runs = _made(options, None if profile == PRE_MERGE else profile)
    limits = Limits(fail_fast, time_budget, begin + time_budget if time_budget else float("inf"))
    times = {"start": time.monotonic() - begin}
    told: list[RunTold] = []
    cases: list[CaseTold] = []
    with unheard(_line):
        for run in runs:
            started = time.monotonic()
            mine, its = _judged(run, out, keep, limits, (shrink_seconds, all_checks), told)
            told, cases = [*told, mine], [*cases, *its]
            times[run.name] = time.monotonic() - started
        outcome, change = _outcome(told, cases, base, {name: round(value, 3) for name, value in times.items()})
        _say(outcome)
    folder.write(outcome, change, lines)
    if save_baseline and outcome.status != "incomplete":
        save_baseline.write_bytes(pruned(outcome))
    _end(outcome, change, folder.path, time.monotonic() - begin)
    if folder.lost:
        note(folder.lost)
    raise typer.Exit(outcome.exit_code or (4 if folder.lost else 0))


def _doctor(options: Options) -> tuple[list[Line], list[str]]:
    """What doctor finds, and which demands cannot be met whatever runs; only demanded packages are imported.

    Raises:
        CaseError: for a demand that is not of the form STAGE=PACKAGE.
    """
    from moonep_validate.doors.doctor.findings import findings, gate_blockers
    from moonep_validate.doors.doctor.readings import read
    from moonep_validate.pipeline.require import demands

    wanted = [(demand, package) for demand, _, package in demands(options.require)]
    lines = findings(read(only=[package for _, package in wanted], path=options.engine_path))
    named = re.split(r"[.:]", f"{options.moonep_module}.{options.subject}.{options.experts}")
    known = ("vllm", "sglang")  # a module that is named itself is asked by its own option, and says more
    return lines, gate_blockers(lines, [one for one in wanted if one[1] in known or one[1] not in named])


def _blocked(folder: GateFolder, options: Options, lines: list[Line], blockers: list[str]) -> None:
    """End before anything starts: a report, and one line a demand.

    Raises:
        Exit: always, with code 1.
    """
    from moonep_validate.doors.report.baseline import Change
    from moonep_validate.doors.report.github import unheard
    from moonep_validate.doors.report.outcome import RunTold

    name = _name(options)
    outcome, _ = _outcome([RunTold(name, name, "not_run", 1, 0, blockers)], [], None, {})
    folder.write(outcome, Change(), lines)
    with unheard(_line):
        _say(outcome)
    _end(outcome, Change(), folder.path, 0.0)
    raise typer.Exit(1)


def _targets(options: Options, profile: str | None) -> Iterator[tuple[str, Options]]:
    """The reference, then the target that is named; options of a run are those of the last."""
    name = _name(options)
    if name != REFERENCE:
        yield REFERENCE, Options(profile=profile, deadline=options.deadline)
    yield name, replace(options, profile=profile)


def _name(options: Options) -> str:
    """What the options name, as a folder."""
    subject = options.subject if options.subject != REFERENCE else options.moonep_module
    experts = f"experts-{options.experts}" if options.experts != REFERENCE else None
    text = "-".join(filter(None, [subject, experts])) or REFERENCE
    return re.sub(r"[^\w.-]", "_", text)


def _made(options: Options, profile: str | None) -> list[_Run]:
    """All runs with their jobs: what cannot be meant is said before anything is judged, on GitHub too."""
    from moonep_validate.doors.report.github import usage

    runs = []
    for name, its in _targets(options, profile):
        try:
            runs.append(_Run(name, f"{name}, profile {profile_of(its)}", its, *job_and_cases(its)))
        except CaseError as error:
            if os.environ.get("GITHUB_ACTIONS") == "true":
                console.print(usage(str(error)), markup=False, highlight=False, soft_wrap=True)
            raise
    return runs


def _judged(
    run: _Run, out: Path, keep: str, limits: Limits, shown: tuple[float, bool], before: list[RunTold]
) -> tuple[RunTold, list[CaseTold]]:
    """A run and its cases; one that may not begin is one that failed."""
    from moonep_validate.doors.report.outcome import RunTold, read_outcome
    from moonep_validate.pipeline.require import unmet
    from moonep_validate.pipeline.run import run_case

    stopped = _stopped(limits, before)
    if missing := stopped or unmet(run.job, run.options.require):
        code = _INCOMPLETE if any(one.exit_code == _INCOMPLETE for one in before) else 1
        return RunTold(run.name, run.title, "not_run", code, len(run.cases), missing), []
    folder = opened(out / run.name)
    folder.plan(run.cases, cast("Keeps", keep))

    def one_case(case: Case) -> tuple[Trace, Verdict]:
        trace, verdict = run_case(run.job, case)
        folder.note(trace, verdict)
        return trace, verdict

    judge_all(run.cases, one_case, run.job, run.title, folder, *shown, run.options, limits)
    if folder.lost:
        raise CaseError(folder.lost)
    told = read_outcome(folder.path, run.name)
    return replace(told.runs[0], title=run.title), told.cases


def _stopped(limits: Limits, before: list[RunTold]) -> list[str]:
    """Why a run does not begin after those before it."""
    if any(one.exit_code == _INCOMPLETE for one in before):
        return ["interrupted before it began"]
    if limits.fail_fast and any(one.exit_code for one in before):
        return ["--fail-fast: it was left out, a run before it failed"]
    return []


def _outcome(
    runs: list[RunTold], cases: list[CaseTold], base: Outcome | None, times: dict[str, float]
) -> tuple[Outcome, Change]:
    """All of it, held against the baseline."""
    from moonep_validate.doors.report.baseline import Change, compare
    from moonep_validate.doors.report.outcome import Outcome, together
    from moonep_validate.judge.checks import CHECKS

    checks = {c.id: {"name": c.name, "stage": c.stage, "promise": c.promise} for c in CHECKS.values()}
    whole = Outcome(", ".join(run.name for run in runs), *together(runs), runs, cases, checks, times)
    if base is None or whole.status == "incomplete":
        return whole, Change()
    change = compare(base, whole)
    return replace(whole, baseline=change.lines, exit_code=_code(whole, change)), change


def _code(outcome: Outcome, change: Change) -> int:
    """The exit code beside a baseline: failures that it has too do not count, what is worse than it does."""
    bad = {case.run for case in outcome.cases if case.gates and case.key not in change.tolerated}
    known = {case.run for case in outcome.cases if case.key in change.tolerated} - bad
    codes = [run.exit_code for run in outcome.runs if run.unmet or run.name not in known]
    return outcome.exit_code if any(codes) else int(change.broken)


def _line(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _say(outcome: Outcome) -> None:
    """What became of each run, and against the baseline."""
    from moonep_validate.doors.report.baseline import KINDS

    for run in outcome.runs:
        line = f"run {run.name}: {run.status}, level {run.level}, {run.planned} cases, {run.seconds:.1f} s"
        _line("; ".join([line, *run.unmet]))
    for kind, lines in outcome.baseline.items():
        for line in lines:
            _line(f"{KINDS[kind]}: {line}")


def _end(outcome: Outcome, change: Change, folder: Path, seconds: float) -> None:
    """The job summary and annotations, where GitHub takes them, and the last lines."""
    from moonep_validate.doors.report.github import error_lines, summary

    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(summary(outcome))
    if os.environ.get("GITHUB_ACTIONS") == "true":
        workspace = os.environ.get("GITHUB_WORKSPACE")
        for line in error_lines(outcome, change.tolerated, Path(workspace) if workspace else None):
            _line(line)
    spent = ", ".join(f"{name} {value:.1f} s" for name, value in outcome.times.items())
    _line(f"report: {folder}; times: {spent}")
    _line(f"gate {outcome.word} in {seconds:.1f} s, exit code {outcome.exit_code}")
