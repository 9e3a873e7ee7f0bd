"""Which commands choose their cases themselves? ``search``, ``mutate`` and ``nulls``: loops over the pipeline."""

from __future__ import annotations

import sys
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moonep_validate import __version__
from moonep_validate.cases.case import CaseError
from moonep_validate.doors.cli.options import (
    NO_OPTIONS,
    ApiOption,
    DeadlineOption,
    DestructiveOption,
    DeviceOption,
    ExpertsOption,
    FaultOption,
    ModuleOption,
    PathOption,
    PolicyOption,
    RelaxedOption,
    SubjectOption,
    WaiversOption,
    WorldOption,
    console,
    job_of,
)


def search(
    context: typer.Context,
    seconds: Annotated[float, typer.Option("--time", min=1.0, help="Seconds to search.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Where to start; the same seed draws the same cases.")] = 0,
    subject: SubjectOption = "reference",
    sglang_path: PathOption = None,
    device: DeviceOption = None,
    waivers: WaiversOption = None,
    moonep_module: ModuleOption = None,
    experts: ExpertsOption = "reference",
    api: ApiOption = None,
    policy: PolicyOption = None,
    relaxed: RelaxedOption = False,
    destructive: DestructiveOption = False,
    fault: FaultOption = None,
    deadline: DeadlineOption = 30.0,
) -> None:
    """Generate cases toward planner stress, judge each, and print the worst as case lines; needs hypothesis."""
    if subject != "reference":
        raise CaseError(f"search draws cases for a Buffer, most of which {subject} cannot run; use run")
    job = job_of(context.params)
    from moonep_validate.doors.report.summary import Summary
    from moonep_validate.pipeline.run import run_case
    from moonep_validate.studies.search import lines
    from moonep_validate.studies.search import search as search_cases

    generations = (job.generation,) if job.generation else ("A", "B")
    portable = job.module is not None and not relaxed
    with console.status("searching"):
        result = search_cases(lambda one: run_case(job, one)[1], seconds, seed, generations, portable)
    console.print(
        f"{result.tried} cases in {result.seconds:.0f} s, {result.vacuous} of them vacuous", highlight=False
    )
    for line in lines(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for verdict in result.failures:
        console.print(verdict.diagnosis, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(Summary(result.tried, result.failures).exit_code if result.failures else 0)


def mutate(
    context: typer.Context,
    fault: Annotated[list[str] | None, typer.Option("--fault", help="Only this fault; may be repeated.")] = None,
    kind: Annotated[
        list[str] | None, typer.Option("--kind", help="Only faults that stand for this kind or bug, e.g. K08.")
    ] = None,
    subject: SubjectOption = "reference",
    experts: ExpertsOption = "reference",
    sglang_path: PathOption = None,
    world: WorldOption = None,
    device: DeviceOption = None,
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

    quick = mutation.DEADLINE * (3 if world == "processes" else 1)
    deadline = deadline or (quick if subject == "reference" else 30.0)
    job = job_of({**NO_OPTIONS, **context.params, "fault": None, "deadline": deadline})
    if job.not_run:
        raise CaseError(job.not_run)
    chosen = [one.id for one in mutation.chosen(job, fault or (), kind or ())]
    outcomes, shown = [], Console(stderr=True) if json else console
    shown.print(f"[bold]moonep-validate {__version__}[/bold]: {len(chosen)} faults on {subject}", highlight=False)
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


def nulls(
    context: typer.Context,
    seconds: Annotated[float, typer.Option("--time", min=1.0, help="Seconds to run.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Where to start; the same seed draws the same cases.")] = 0,
    subject: SubjectOption = "reference",
    sglang_path: PathOption = None,
    device: DeviceOption = None,
    deadline: DeadlineOption = 30.0,
) -> None:
    """Count false alarms: cases of real data on a subject that is right; how often does a bound fail?"""
    from moonep_validate.studies.nulls import null_runs

    job = job_of({**NO_OPTIONS, **context.params})
    with console.status("running"):
        result = null_runs(job, seconds, seed)
    for line in (*result.lines, result.summary):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(int(result.over_budget))
