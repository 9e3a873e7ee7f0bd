"""Which commands are about worlds? ``parity``, which is ``run`` as a rank of torchrun, ``races`` and ``bench``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.doors.cli.bench_ep import bench_ep
from moonep_validate.doors.cli.options import console, job_of, one_of, takes
from moonep_validate.pipeline.options import Options
from moonep_validate.worlds.place import place, tie

if TYPE_CHECKING:
    from moonep_validate.doors.report.files import OutputFolder
    from moonep_validate.pipeline.job import Job

PARITY = "torchrun --nproc-per-node N -m moonep_validate parity"


@dataclass
class Alone:
    """The one process of a ``run``; with ``parity``, a ``Parity`` is in its place."""

    job: Job
    cases: list[Case]
    folder: OutputFolder | None

    def judged(self, one_case: Callable[[Case], Any]) -> Callable[[Case], Any]:
        """``one_case`` itself."""
        return one_case

    def end(self, code: int) -> None:
        """Nobody waits."""


def arrive(command: str | None) -> None:
    """First of all, a rank of ``parity`` ties its life to torchrun's; no other command has ranks of its own."""
    if command == "parity" and place():
        tie()


def joined(command: str | None, job: Job, cases: list[Case], folder: Callable[[], OutputFolder | None]) -> Any:
    """The process that runs the cases; of the ranks of ``parity`` only rank 0 comes back from here.

    Raises:
        CaseError: see ``parity.join``.
    """
    if command != "parity":
        return Alone(job, cases, folder())
    from moonep_validate.doors.torchrun import join

    return join(job, cases, folder)


@takes("world", "ranks", "device", "fault", "deadline")
def races(
    options: Options,
    seconds: Annotated[float, typer.Option("--time", min=1.0, help="Seconds to run.")] = 60.0,
    seed: Annotated[int, typer.Option(min=0, help="Where to start; a seed is the same schedule again.")] = 0,
    seeds: Annotated[int | None, typer.Option(min=1, help="Stop after so many seeds.")] = None,
) -> None:
    """Run batches in flight at a time in seeded orders and delays: does any schedule break the reference?"""
    from moonep_validate.doors.report.summary import Summary
    from moonep_validate.pipeline.run import run_case
    from moonep_validate.pipeline.selection import too_few_gpus
    from moonep_validate.studies import races as seeded

    job = job_of(options)
    ranks = options.ranks or (2 if options.device == "cuda" else None)
    if reason := too_few_gpus(job, ranks or 1):
        raise CaseError(reason)
    lines = seeded.cases(seed, ranks)
    result = seeded.races(lambda case: run_case(job, case, exercised=False)[1], lines, seconds, seeds)
    for verdict in result.failures[:3]:
        console.print(verdict.diagnosis, markup=False, highlight=False, soft_wrap=True)
    console.print(result.line, highlight=False)
    raise typer.Exit(Summary(result.tried, result.failures).exit_code if result.failures else 0)


def bench(
    what: Annotated[str, typer.Argument(help="core, worlds, k3 or ep")] = "core",
    device: Annotated[str, typer.Option(help="Of k3: cpu or cuda.")] = "cuda",
    naive: Annotated[Path | None, typer.Option(help="Naive loop planner to compare with.")] = Path(
        "tests/self/naive_plan.py"
    ),
    case: Annotated[str | None, typer.Option("--case", help="Of ep: sizes; tokens and routing are swept.")] = None,
    max_vio: Annotated[str, typer.Option(help="Of ep: values of MaxVio, with commas.")] = "0,1,3",
    tokens: Annotated[str, typer.Option(help="Of ep: tokens of a rank, with commas.")] = "16,256",
    repeats: Annotated[int, typer.Option(min=2, help="Of ep: passes of each way.")] = 9,
    thresholds: Annotated[
        Path | None, typer.Option(help="Of ep: TOML file of ratios agreed beforehand; exit code 1 beyond them.")
    ] = None,
) -> None:
    """Print speed ratios measured in one run."""
    one_of("bench", what, ("core", "worlds", "k3", "ep"))
    if what == "ep":
        raise typer.Exit(bench_ep(console, max_vio, tokens, repeats, thresholds, case))
    from moonep_validate.studies import bench as benchmarks

    if what == "worlds":
        benchmarks.worlds(console)
    elif what == "k3":
        benchmarks.k3(console, device)
    else:
        benchmarks.core(console, naive if naive and naive.is_file() else None)
