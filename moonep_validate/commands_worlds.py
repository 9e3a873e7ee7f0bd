"""Which commands are about worlds? ``parity``, which is ``run`` as a rank of torchrun, and ``bench``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from moonep_validate.case import Case, CaseError

if TYPE_CHECKING:
    from moonep_validate.engine import Job
    from moonep_validate.report.files import OutputFolder

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


def joined(command: str | None, job: Job, cases: list[Case], folder: Callable[[], OutputFolder | None]) -> Any:
    """The process that runs the cases; of the ranks of ``parity`` only rank 0 comes back from here.

    Raises:
        CaseError: see ``parity.join``.
    """
    if command != "parity":
        return Alone(job, cases, folder())
    from moonep_validate.parity import join

    return join(job, cases, folder)


def bench(
    what: Annotated[str, typer.Argument(help="core or worlds")] = "core",
    naive: Annotated[Path | None, typer.Option(help="Naive loop planner to compare with.")] = Path(
        "tests/self/naive_plan.py"
    ),
) -> None:
    """Print speed ratios measured in one run."""
    if what not in ("core", "worlds"):
        raise CaseError(f"bench is {what!r}; known: core, worlds")
    from moonep_validate import bench as benchmarks

    console = Console(width=None if Console().is_terminal else 120)
    if what == "worlds":
        benchmarks.worlds(console)
    else:
        benchmarks.core(console, naive if naive and naive.is_file() else None)
