"""Which commands choose their cases themselves? ``search``, ``mutate`` and ``nulls``: loops over the pipeline."""

from __future__ import annotations

import sys
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moonep_validate import __version__
from moonep_validate.cases.case import CaseError
from moonep_validate.doors.cli.options import console, job_of, takes
from moonep_validate.pipeline.kinds import kind_of
from moonep_validate.pipeline.options import DECLARED, Options


@takes(*(set(DECLARED) - {"case", "profile", "ranks", "require", "world", "record"}))
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
    fault: Annotated[list[str] | None, typer.Option("--fault", help="Only this fault; may be repeated.")] = None,
    kind: Annotated[
        list[str] | None, typer.Option("--kind", help="Only faults that stand for this kind or bug, e.g. K08.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(min=0.1, help="See run [2 on the reference, 6 in processes, else 30].")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The matrix as JSON.")] = False,
    shrink_seconds: Annotated[float, typer.Option(help="Time to shrink each kill; 0 to leave it.")] = 0.0,
    write: Annotated[Path | None, typer.Option(help="Also write the document (docs/faults.md).")] = None,
) -> None:
    """Seed every known fault, and see whether the suite finds it: at which stage, by which check."""
    from moonep_validate.doors.report import matrix as report
    from moonep_validate.studies import mutate as mutation

    job = job_of(options)
    quick = mutation.DEADLINE * (3 if options.world == "processes" else 1)
    job = replace(job, deadline=deadline or (quick if job.target.kind.embedded else job.deadline))
    if job.not_run:
        raise CaseError(job.not_run)
    chosen = [one.id for one in mutation.chosen(job, fault or (), kind or ())]
    outcomes, shown = [], Console(stderr=True) if json else console
    title = f"{len(chosen)} faults on {options.subject}"
    shown.print(f"[bold]moonep-validate {__version__}[/bold]: {title}", highlight=False)
    for outcome in mutation.mutate(job, chosen, shrink_seconds):
        outcomes.append(outcome)
        shown.print(report.outcome_line(outcome), highlight=False, soft_wrap=True)
    whole = not fault and not kind
    result = mutation.Matrix(outcomes, mutation.needed_checks(job, whole))
    mutation.sharpen(job, result)
    if json:
        sys.stdout.write(dumps(result.to_json()) + "\n")
    else:
        report.show_matrix(console, result)
    if write:
        write.write_text(report.faults_document(result))
    raise typer.Exit(result.exit_code)


@takes("subject", "engine_path", "device", "deadline")
def nulls(
    options: Options,
    seconds: Annotated[float, typer.Option("--time", min=1.0, help="Seconds to run.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Where to start; the same seed draws the same cases.")] = 0,
) -> None:
    """Count false alarms: cases of real data on a subject that is right; how often does a bound fail?"""
    from moonep_validate.studies.nulls import null_runs

    job = job_of(options)
    with console.status("running"):
        result = null_runs(job, seconds, seed)
    for line in (*result.lines, result.summary):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(int(result.over_budget))
