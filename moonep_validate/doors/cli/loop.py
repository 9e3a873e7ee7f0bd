"""How are many cases judged? The one loop of ``run``, ``gate`` and ``check``, with a live display and its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from moonep_validate import __version__
from moonep_validate.cases.case import Case, CaseError
from moonep_validate.cases.profiles import for_generations, profile
from moonep_validate.doors import interrupts
from moonep_validate.doors.cli.options import console, job_of
from moonep_validate.pipeline.kinds import kind_of
from moonep_validate.pipeline.options import Options

if TYPE_CHECKING:
    from moonep_validate.doors.report.files import OutputFolder
    from moonep_validate.doors.report.summary import Summary
    from moonep_validate.pipeline.job import Job
    from moonep_validate.trace.trace import Trace

AllChecks = Annotated[bool, typer.Option("--all-checks", help="A row for each check, and the idle ones by name.")]


@dataclass(frozen=True)
class Limits:
    """When a run ends before its last case.

    Attributes:
        fail_fast: at the first case that gates.
        budget: after so many seconds of the whole command, of which ``until`` is the end by the monotonic clock;
            the case that runs then comes to its end.
    """

    fail_fast: bool = False
    budget: float | None = None
    until: float = float("inf")

    def reached(self, summary: Summary) -> str:
        """Why no other case is begun, or empty."""
        from moonep_validate.judge.verdict import EXIT_CODES

        left = summary.planned - len(summary.verdicts)
        if not left:
            return ""
        if self.fail_fast and EXIT_CODES[summary.status]:
            return f"--fail-fast: {left} of {summary.planned} cases were left out"
        if time.monotonic() > self.until:
            return f"--time-budget {self.budget:g}: it ended with {left} of {summary.planned} cases not judged"
        return ""


def profile_of(options: Options) -> str:
    """The profile that is named, else the one of the kind of target."""
    return options.profile or kind_of(options).profile


def job_and_cases(options: Options) -> tuple[Job, list[Case]]:
    """What a run judges, and on which cases: those given, else the profile's, by Buffer key."""
    lines, listed = [Case.parse(text) for text in options.case], profile(profile_of(options))
    job = job_of(options)
    from moonep_validate.pipeline.selection import select_cases

    cases = lines or for_generations(listed, job.target.generations)
    return job, select_cases(job, cases, options.ranks, keep_order=bool(lines))


def required(job: Job, wanted: Sequence[str]) -> None:
    """Stop where another part would run than the one that a gate asks for."""
    from moonep_validate.pipeline.require import unmet

    if missing := unmet(job, wanted):
        Console(stderr=True).print("\n".join(missing), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1)


def opened(path: Path) -> OutputFolder:
    """The folder of ``--out``.

    Raises:
        CaseError: if it cannot be used.
    """
    from moonep_validate.doors.report.files import OutputFolder

    try:
        return OutputFolder(path)
    except OSError as error:
        raise CaseError(f"--out {path} cannot be used: {error.strerror}") from None


def judge_all(
    cases: list[Case],
    one_case: Any,
    job: Job | None,
    title: str,
    folder: OutputFolder | None,
    shrink_seconds: float,
    all_checks: bool,
    options: Options = Options(),  # noqa: B008 - frozen
    limits: Limits = Limits(),
) -> Summary:
    """Loop over cases with a live display; a signal keeps what is known."""
    from moonep_validate.doors.report import terminal
    from moonep_validate.doors.report.summary import Summary

    console.print(f"[bold]moonep-validate {__version__}[/bold]: {title}", highlight=False)
    summary = Summary(len(cases), required=options.require_cases or 0, require=options.require)
    start, trace = time.monotonic(), None
    try:
        with terminal.progress_bar(console) as progress:
            task = progress.add_task("", total=len(cases))
            for one in cases:
                interrupts.check()
                if reason := limits.reached(summary):
                    summary.cut = reason
                    break
                progress.update(task, description=str(one))
                first, begin, (trace, verdict) = trace is None, time.monotonic(), one_case(one)
                verdict.seconds = time.monotonic() - begin
                if first:
                    terminal.show_evidence(progress.console, trace)
                summary.verdicts.append(verdict)
                progress.advance(task)
                _keep(folder, summary, trace)
                if not verdict.ok and verdict.status != "not_run":
                    terminal.show_problem(progress.console, verdict)
        summary.ended = True
        _keep(folder, summary, trace)
        if shrink_seconds and job:
            from moonep_validate.doors.cli.smallest import show_smallest

            show_smallest(summary, job, shrink_seconds)
            _keep(folder, summary, trace)
    except KeyboardInterrupt:
        interrupts.ending()
        summary.interrupted = True
        _keep(folder, summary, trace)
    terminal.show_table(console, summary, all_checks)
    terminal.show_verdict(console, summary, trace, time.monotonic() - start)
    return summary


def _keep(folder: OutputFolder | None, summary: Summary, trace: Trace | None) -> None:
    if folder:
        folder.write_report(summary, trace.subject if trace else "")
