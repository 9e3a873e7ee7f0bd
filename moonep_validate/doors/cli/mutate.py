"""Which commands choose their cases themselves? ``search``, ``mutate``, ``false-alarms``: loops of cases."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from moonep_validate import __version__
from moonep_validate.cases.case import CaseError
from moonep_validate.doors.cli.options import console, job_of, note, takes
from moonep_validate.pipeline.kinds import kind_of
from moonep_validate.pipeline.options import DECLARED, Options

if TYPE_CHECKING:
    from moonep_validate.studies.mutate import Matrix


@takes(*(set(DECLARED) - {"case", "profile", "ranks", "require", "require_cases", "world", "record"}))
def search(
    options: Options,
    seconds: Annotated[float, typer.Option("--time", min=1.0, help="Seconds to search.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Where to start; the same seed draws the same cases.")] = 0,
) -> None:
    """Generate cases toward planner stress, judge each, and print the worst as case lines; needs hypothesis."""
    if kind_of(options).layer_door:
        raise CaseError(f"search draws cases for a Buffer, most of which {options.subject} cannot run; use run")
    job = job_of(options)
    from moonep_validate.doors.report.summary import Summary
    from moonep_validate.pipeline.run import run_case
    from moonep_validate.studies.search import lines
    from moonep_validate.studies.search import search as search_cases

    target = job.target
    with console.status("searching"):
        result = search_cases(
            lambda one: run_case(job, one)[1], seconds, seed, target.generations, target.portable_only
        )
    console.print(
        f"{result.tried} cases in {result.seconds:.0f} s, {result.vacuous} of them vacuous", highlight=False
    )
    for line in lines(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for verdict in result.failures:
        console.print(verdict.diagnosis, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(Summary(result.tried, result.failures).exit_code if result.failures else 0)


@takes("subject", "experts", "engine_path", "world", "device")
def mutate(
    options: Options,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            "--fault", help="Only this fault, on one rank and on all, or only this text of it; may be repeated."
        ),
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option("--kind", help="Only faults that stand for this kind or bug, e.g. K08.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(min=0.1, help="See run [2 on the reference, 6 in processes, else 30].")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The matrix as JSON.")] = False,
    shrink_seconds: Annotated[float, typer.Option(help="Time to shrink each kill; 0 to leave it.")] = 0.0,
    killers: Annotated[
        int, typer.Option(min=1, help="Different cases that must kill each fault; fewer are a warning.")
    ] = 2,
    write: Annotated[
        Path | None,
        typer.Option(help="Also write the document (docs/faults.md); of some faults, merge their rows into it."),
    ] = None,
) -> None:
    """Seed every known fault, on one rank and on all, and see at which stage which check finds it."""
    from moonep_validate.doors.report import matrix as report
    from moonep_validate.studies import mutate as mutation

    job = job_of(options)
    quick = mutation.DEADLINE * (3 if options.world == "processes" else 1)
    job = replace(job, deadline=deadline or (quick if job.target.kind.embedded else job.deadline))
    if job.not_run:
        raise CaseError(job.not_run)
    chosen, whole = mutation.chosen(job, fault or (), kind or ()), not fault and not kind
    page = _page(write, whole, options.subject) if write else None
    trials, shown = [], Console(stderr=True) if json else console
    title = f"{len(chosen)} faults on {options.subject}"
    shown.print(f"[bold]moonep-validate {__version__}[/bold]: {title}", highlight=False)
    for trial in mutation.mutate(job, chosen, shrink_seconds, killers):
        trials.append(trial)
        shown.print(report.trial_line(trial), highlight=False, soft_wrap=True)
    result = mutation.Matrix(trials, mutation.needed_checks(job, whole))
    mutation.sharpen(job, result)
    if json:
        sys.stdout.write(dumps(result.to_json()) + "\n")
    else:
        report.show_matrix(console, result)
    if write and page:
        write.write_text(page(result))
    raise typer.Exit(result.exit_code)


def _page(path: Path, whole: bool, subject: str) -> Callable[[Matrix], str]:
    """What will make the document, known before a run of minutes: all rows anew, or some merged into it.

    Raises:
        CaseError: for another subject than the reference, or a part without a document to merge it into.
    """
    from moonep_validate.doors.report.faults_page import faults_page, merged_page

    if subject != "reference":
        raise CaseError("--write is of faults seeded into the reference: leave --subject out")
    if whole:
        return faults_page
    if not path.exists():
        raise CaseError(f"--write {path}: only a whole run writes it anew; leave --fault and --kind out")
    return partial(merged_page, path.read_text())


@takes("subject", "engine_path", "device", "deadline")
def false_alarms(
    options: Options,
    seconds: Annotated[float, typer.Option("--time", min=1.0, help="Seconds to run.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Where to start; the same seed draws the same cases.")] = 0,
) -> None:
    """Count false alarms: cases of real data on a subject that is right; how often does a bound fail?"""
    from moonep_validate.studies.false_alarms import false_alarms as count_alarms

    job = job_of(options)
    with console.status("running"):
        result = count_alarms(job, seconds, seed)
    for line in (*result.lines, result.summary):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(int(result.over_budget))


@wraps(false_alarms)
def nulls(**values: Any) -> None:
    """The name of ``false-alarms`` before 0.1.0."""
    note("the command nulls is now called false-alarms")
    false_alarms(**values)
