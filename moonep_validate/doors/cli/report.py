"""The command ``report``: the page of earlier runs, one or several side by side, and whether they were edited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonep_validate.cases.case import CaseError
from moonep_validate.doors.cli.options import console

if TYPE_CHECKING:
    from moonep_validate.doors.report.outcome import CaseTold, Outcome, RunTold

_OURS = b'name="generator" content="moonep-validate"'


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="What `run --out` or `gate` wrote.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    verify: Annotated[bool, typer.Option("--verify", help="Write nothing: was anything edited?")] = False,
) -> None:
    """Write report.html of earlier runs, side by side; or verify that they are as they were written."""
    from moonep_validate.doors.report.outcome import read_outcome
    from moonep_validate.doors.report.page import page
    from moonep_validate.doors.report.seals import verify as hold

    if verify:
        for folder in folders:
            for line in hold(folder):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        return
    outcomes = [read_outcome(folder) for folder in folders]
    write_page(out, page(outcomes[0] if len(outcomes) == 1 else _side_by_side(folders, outcomes)))
    console.print(f"wrote {out}", markup=False, highlight=False, soft_wrap=True)


def write_page(out: Path, text: str) -> None:
    """Write a page, in the place of an earlier one, and of nothing else.

    Raises:
        CaseError: if another file is there, or it cannot be written.
    """
    try:
        if out.exists() and _OURS not in out.read_bytes()[:2000]:
            raise CaseError(f"{out} is no page of ours, and stays; give another file")
        part = out.with_name(f"{out.name}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(out)
    except OSError as error:
        raise CaseError(f"{out} cannot be written: {error.strerror}") from None


def _side_by_side(folders: Sequence[Path], outcomes: Sequence[Outcome]) -> Outcome:
    """All runs as those of one outcome, each with its folder in its name."""
    from moonep_validate.doors.report.outcome import Outcome, together

    runs: list[RunTold] = []
    cases: list[CaseTold] = []
    times: dict[str, float] = {}
    checks: dict[str, dict[str, str]] = {}
    environments: dict[str, dict[str, str]] = {}
    for label, outcome in zip(_labels(folders), outcomes, strict=True):
        names = {run.name: label if len(outcome.runs) == 1 else f"{label}/{run.name}" for run in outcome.runs}
        runs += [replace(run, name=names[run.name]) for run in outcome.runs]
        cases += [replace(case, run=names[case.run]) for case in outcome.cases]
        times |= {f"{label}: {name}": value for name, value in outcome.times.items()}
        checks |= outcome.checks
        environments[label] = {name: _flat(value) for name, value in outcome.environment.items()}
    return Outcome(
        " beside ".join(_labels(folders)), *together(runs), runs, cases, checks, times, environment=environments
    )


def _labels(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that differ."""
    parts = [(path if path.is_dir() else path.parent).resolve().parts for path in folders]
    for count in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(one[-count:]) for one in parts]
        if len(set(labels)) == len(labels):
            return labels
    raise CaseError(f"{folders[0]} is given twice")


def _flat(value: object) -> str:
    """A value of an environment in one line."""
    if isinstance(value, dict):
        return "; ".join(f"{name} {one}" for name, one in value.items())
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)
