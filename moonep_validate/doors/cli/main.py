"""The command line. It only wires: every command is a prefix of the pipeline or a loop over it.

torch is imported inside the commands, so that help and usage errors come at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from moonep_validate import __version__
from moonep_validate.cases.case import Case, CaseError, Spec
from moonep_validate.cases.profiles import profile
from moonep_validate.cases.vocabulary import VOCABULARY
from moonep_validate.doors import interrupts
from moonep_validate.doors.cli import doctor as commands_doctor
from moonep_validate.doors.cli import formats as commands_formats
from moonep_validate.doors.cli import gate as commands_gate
from moonep_validate.doors.cli import history as commands_history
from moonep_validate.doors.cli import loaders as commands_loaders
from moonep_validate.doors.cli import mutate as commands_mutate
from moonep_validate.doors.cli import plan as commands_plan
from moonep_validate.doors.cli import report as commands_report
from moonep_validate.doors.cli import served as commands_served
from moonep_validate.doors.cli import soak as commands_soak
from moonep_validate.doors.cli import worlds as commands_worlds
from moonep_validate.doors.cli.loop import AllChecks, job_and_cases, judge_all, opened, profile_of, required
from moonep_validate.doors.cli.options import console, job_of, note, one_of, takes
from moonep_validate.doors.cli.output import patient_output
from moonep_validate.pipeline.options import DECLARED, Options

if TYPE_CHECKING:
    from moonep_validate.doors.report.summary import Summary
    from moonep_validate.judge.verdict import Verdict
    from moonep_validate.trace.manifest import Keeps
    from moonep_validate.trace.trace import Trace

# As pytest has them, so that a script need not ask which of the two ran.
USAGE = 4
INTERNAL = 3
INTERRUPTED = 2

app = typer.Typer(
    name="moonep-validate",
    help="Find out, with evidence, whether dispatch, prefetch, compute and combine of a MoonEP layer are right.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="Exit codes: 0 passed, 1 failed, 2 interrupted, 3 internal error, 4 usage, 5 nothing ran, 10 vacuous, "
    "11 fault not exercised, 12 unknown, 13 hung, 14 error of the suite.",
)


@app.command("parity", help=f"Like run, as one rank of torchrun: {commands_worlds.PARITY} [options of run]")
@app.command()
@takes(*DECLARED)
def run(
    options: Options,
    context: typer.Context,
    out: Annotated[Path | None, typer.Option(help="Folder for report.json and traces.")] = None,
    keep: Annotated[
        str, typer.Option(help="Traces to keep in --out: failed (whatever did not pass), all or none.")
    ] = "failed",
    shrink_seconds: Annotated[float, typer.Option(help="Time to shrink the first failure; 0 to leave it.")] = 10.0,
    all_checks: AllChecks = False,
    loader: Annotated[
        bool,
        typer.Option("--loader", help="Judge an engine's weight loaders, on small checkpoints of each format."),
    ] = False,
    soak: Annotated[
        str | None, typer.Option(help="Instead: random cases for so long (90s, 10m, 8h); leaks are failures.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of --soak: the same seed draws the same cases.")] = 0,
    resume: Annotated[Path | None, typer.Option(help="Go on with the interrupted --soak in this folder.")] = None,
) -> None:
    """Judge a subject on a profile, or on the cases given."""
    if loader:
        commands_loaders.judge_loader(options, out)
    if soak or resume:
        commands_soak.main(context.info_name, options, soak, seed, out, resume)
    commands_worlds.arrive(context.info_name)
    job, cases = job_and_cases(options)
    if options.require:
        required(job, options.require)
    one_of("--keep", keep, ("failed", "all", "none"))
    here = commands_worlds.joined(context.info_name, job, cases, lambda: opened(out) if out else None)
    job, cases, folder = here.job, here.cases, here.folder
    if folder:
        folder.plan(cases, cast("Keeps", keep))
    from moonep_validate.pipeline.run import run_case

    def record_and_judge(one: Case) -> tuple[Trace, Verdict]:
        trace, verdict = run_case(job, one)
        if folder:
            folder.note(trace, verdict)
        return trace, verdict

    title = f"{len(cases)} case{'s' * (len(cases) > 1)}" if options.case else f"profile {profile_of(options)}"
    one_case = here.judged(record_and_judge)
    summary = judge_all(cases, one_case, job, title, folder, shrink_seconds, all_checks, options)
    here.end(summary.exit_code)
    if folder and folder.lost:
        note(folder.lost)
        raise typer.Exit(summary.exit_code or USAGE)
    _finish(summary)


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="A folder that `run --out` wrote.")],
    all_checks: AllChecks = False,
) -> None:
    """Judge recorded traces again: are they what their cases make, and what do they say?"""
    from moonep_validate.doors.report.files import load_traces
    from moonep_validate.doors.report.recorded import judge_recorded, show_folder

    manifest, traces = load_traces(folder)
    entries = {entry.case: entry for entry in manifest.entries}
    cases = [trace.case for trace in traces.values()]
    show_folder(console, manifest, traces.values())
    summary = judge_all(
        cases,
        lambda one: judge_recorded(traces[str(one)], entries[str(one)]),
        None,
        f"recorded traces of {folder}",
        None,
        0.0,
        all_checks,
    )
    if any(entry.status is None for entry in manifest.entries):
        raise typer.Exit(INTERRUPTED)
    _finish(summary)


@app.command()
@takes(*(set(DECLARED) - {"case", "profile", "ranks", "require", "require_cases"}))
def shrink(
    options: Options,
    case: Annotated[str, typer.Option("--case", help="A failing case line.")],
    seconds: Annotated[float, typer.Option(min=1.0, help="Budget.")] = 60.0,
) -> None:
    """Find the smallest case that fails in the same way."""
    job, whole = job_of(options), Case.parse(case)
    from moonep_validate.pipeline.run import run_case
    from moonep_validate.studies.shrink import shrink as shrink_case

    verdict = run_case(job, whole)[1]
    if verdict.first is None:
        console.print(
            f"{verdict.status}: {whole} has no failing check, so there is nothing to shrink", highlight=False
        )
        raise typer.Exit(_exit_code(verdict))
    with console.status("shrinking"):
        smallest = shrink_case(whole, lambda one: run_case(job, one)[1], seconds)
    end = "no smaller case fails in this way" if smallest.complete else f"stopped after {seconds:g} s"
    console.print(f"{smallest.tried} candidates tried, {end}", highlight=False)
    verdict = run_case(job, smallest.case)[1]
    console.print(verdict.diagnosis, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(_exit_code(verdict))


app.command()(commands_plan.plan)


@app.command()
def edges(case: Annotated[str, typer.Option("--case", help="A case line; its routing does not matter.")]) -> None:
    """Print routings that reach the edges of a geometry: fullest buffer, worst padding, slots, planner ties."""
    from moonep_validate.cases.layout import Layout
    from moonep_validate.judge.oracle import edges as solver

    whole = Case.parse(case)
    layout = Layout.of(whole)
    worst = solver.worst_padding(layout)
    found: dict[str, Any] = {
        f"largest end of the last group, {solver.largest_end(layout)} of {layout.num_rows} rows": solver.fullest(
            layout
        ),
        f"most padding, {worst.value} rows{'' if worst.proven else ' (not proven to be the most)'}": worst.topk,
        f"exactly {layout.num_slots} remote experts on a rank": solver.slots_needed(layout, layout.num_slots),
        f"{layout.num_slots + 1} remote experts on a rank": solver.slots_needed(layout, layout.num_slots + 1),
        **{f"tie of {name.replace('_', ' ')}": topk for name, topk in solver.ties(layout).items()},
    }
    for what, topk in found.items():
        line = "impossible" if topk is None else whole.but(routing=Spec.parse(solver.to_table(topk)), tokens=None)
        console.print(f"{what}:\n  {line}", highlight=False, soft_wrap=True)


@app.command()
def repro(
    standalone: Annotated[str, typer.Option("--standalone", help="A case line.")],
    moonep_module: Annotated[str, typer.Option(help="Module that the script imports.")] = "moonep",
    out: Annotated[Path | None, typer.Option(help="File to write; else the script is printed.")] = None,
) -> None:
    """Write a script of at most 100 lines that needs only torch and the package under test."""
    from moonep_validate.doors.repro import standalone as write_script

    script = write_script(Case.parse(standalone), moonep_module)
    if out is None:
        sys.stdout.write(script)
        return
    out.write_text(script)
    ranks = Case.parse(standalone).R
    console.print(
        f"wrote {out}; run it with: torchrun --nproc-per-node {ranks} {out}", highlight=False, soft_wrap=True
    )


app.command()(commands_mutate.search)
app.command()(commands_mutate.mutate)
app.command()(commands_mutate.false_alarms)
app.command("nulls", hidden=True)(commands_mutate.nulls)
app.command()(commands_worlds.races)


@app.command()
def cases(
    profile_name: Annotated[str, typer.Option("--profile", help="Whose case lines to list.")] = "default",
) -> None:
    """List the words of a case line, and the cases of a profile."""
    lines = [str(case) for case in profile(profile_name)]
    console.print(
        "[bold]sizes[/bold]\n  genA or genB, R4 E8 K2 S9 (required), H128 I128 pad16 seed0 (defaults)",
        highlight=False,
    )
    console.print(
        "  slots2 (generation A, default E/R), tokens:9,0,3,9 (real tokens a rank, default S)", highlight=False
    )
    for field in dict.fromkeys(word.field for word in VOCABULARY.values()):
        console.print(f"[bold]{field}[/bold]")
        for word in VOCABULARY.values():
            if word.field == field:
                console.print(f"  {word.usage:16} {word.summary}", highlight=False)
    console.print(f"[bold]profile {profile_name}[/bold]")
    console.print("\n".join(f"  {line}" for line in lines), highlight=False, soft_wrap=True)


app.command()(commands_doctor.doctor)
app.command()(commands_gate.gate)
app.command()(commands_history.history)
app.command()(commands_report.report)
app.command()(commands_formats.checkpoint)
app.command()(commands_formats.memory)
app.command()(commands_served.compare)
app.command()(commands_worlds.bench)


@app.command()
def version() -> None:
    """Print the version."""
    sys.stdout.write(f"moonep-validate {__version__}\n")


def main() -> None:
    """Entry point; maps every end to a documented exit code."""
    with interrupts.as_one(), patient_output() as output:
        code = _run()
        interrupts.ending()
    if output.lost:
        note(output.lost)
    code = INTERRUPTED if interrupts.told() else code
    sys.exit(code or (USAGE if output.lost else 0))


def _run() -> int:
    try:
        return app(standalone_mode=False) or 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (CaseError, OSError) as error:
        return _usage(str(error))
    except Exception as error:
        if interrupts.told():  # an import that was interrupted may say anything
            return INTERRUPTED
        return _other(error)


def _usage(message: str) -> int:
    if not message:  # help was printed in place of a missing command
        return USAGE
    note(message)
    return USAGE


def _other(error: Exception) -> int:
    """Usage errors of click (typer brings its own copy, so they are known by their method), or a bug of ours."""
    if isinstance(error, typer.Abort):
        return INTERRUPTED
    if hasattr(error, "format_message"):
        return _usage(error.format_message())
    from moonep_validate.trace.trace import TraceError

    if isinstance(error, TraceError):
        return _usage(str(error))
    Console(stderr=True).print_exception()
    return INTERNAL


def _exit_code(verdict: Verdict) -> int:
    from moonep_validate.doors.report.summary import Summary

    return Summary(1, [verdict]).exit_code


def _finish(summary: Summary) -> None:
    raise typer.Exit(summary.exit_code)
