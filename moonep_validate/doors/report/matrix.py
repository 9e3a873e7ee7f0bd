"""How is it told what the suite catches? A table of faults, a table of checks, one line of score, one document."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moonep_validate.faults import FAULTS, Fault
from moonep_validate.judge.checks import CHECKS
from moonep_validate.studies.mutate import Matrix, Outcome

_STYLE = {"killed": "green", "not_exercised": "dim", "not_run": "dim"}


def outcome_line(outcome: Outcome) -> str:
    """One fault as it comes."""
    style = _STYLE.get(outcome.status, "bold red")
    found = f"by {outcome.check} at {outcome.stage}" if outcome.killed else ""
    where = "" if outcome.located or not outcome.killed else f" (it happens at {outcome.own_stage})"
    return (
        f"[{style}]{outcome.status:13}[/{style}] {escape(outcome.id):30} {found}{where}, "
        f"{outcome.cases} cases, {outcome.seconds:.1f} s, {outcome.bugs}"
    )


def show_matrix(console: Console, matrix: Matrix) -> None:
    """Which check makes which faults fail, what nobody noticed, and the score."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("faults", justify="right", no_wrap=True)
    table.add_column("which")
    for check in sorted(matrix.kills, key=lambda c: (c[0], int(c[1:]))):
        names = [outcome.id for outcome in matrix.outcomes if check in outcome.checks]
        table.add_row(check, str(len(names)), " ".join(names))
    console.print(table)
    for outcome in matrix.outcomes:
        if outcome.gates and not outcome.killed:
            console.print(f"[bold red]{outcome.status}[/bold red]: {outcome.id}", highlight=False)
        if outcome.late:
            console.print(f"[bold red]found late[/bold red]: {outcome.id}", highlight=False)
    if matrix.blunt:
        console.print(f"[bold red]no fault makes these checks fail[/bold red]: {' '.join(matrix.blunt)}")
    if hidden := [one.id for one in matrix.outcomes if not one.gates]:
        console.print(f"not shown by this subject, {len(hidden)}: {' '.join(hidden)}", highlight=False)
    if shrunk := matrix.median_shrunk:
        console.print(f"median shrunk case: {shrunk}", highlight=False)
    console.print(f"[bold]{matrix.score}[/bold], exit code {matrix.exit_code}", highlight=False)


def faults_document(matrix: Matrix) -> str:
    """docs/faults.md: what a pass rules out."""
    lines = [
        "# What a pass rules out",
        "",
        "Every fault of the catalogue, seeded into the embedded reference and found by the suite. Written by",
        "`moonep-validate mutate --write docs/faults.md`. Ids with K are kinds of faults, ids with B public bugs:",
        "see [bugs.md](bugs.md). A fault of an engine's own code needs an engine:",
        "`moonep-validate mutate --subject vllm`.",
        "",
        f"{matrix.score}.",
        "",
        "| fault | what is wrong | stage | found by | case | stands for |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for outcome in sorted(matrix.outcomes, key=lambda one: list(FAULTS).index(one.id)):
        found = f"{outcome.check} at {outcome.stage}" if outcome.killed else outcome.status.replace("_", " ")
        case = f"`{outcome.case}`" if outcome.case else ""
        about = FAULTS[outcome.id]
        lines.append(f"| `{about.id}` | {about.summary} | {about.stage} | {found} | {case} | {about.bugs} |")
    tried = {outcome.id for outcome in matrix.outcomes}
    others = [fault for fault in FAULTS.values() if fault.id not in tried]
    lines += _not_tried(
        "Not tried here, since they show on GPUs only, where a call returns before its work is done "
        "(`moonep-validate mutate --device cuda`):",
        [fault for fault in others if fault.needs_gpu],
    )
    lines += _not_tried(
        "Of an engine's own code, seeded around its loader, dispatch, experts and layer:",
        [fault for fault in others if fault.for_engine],
    )
    return "\n".join([*lines, *_checks(matrix), ""])


def _not_tried(why: str, faults: Sequence[Fault]) -> Sequence[str]:
    if not faults:
        return []
    rows = [f"| `{one.id}` | {one.summary} | {one.stage} | {one.bugs} |" for one in faults]
    return ["", why, "", "| fault | what is wrong | stage | stands for |", "| --- | --- | --- | --- |", *rows]


def _checks(matrix: Matrix) -> Sequence[str]:
    lines = ["", "| check | faults that it finds |", "| --- | --- |"]
    for check in matrix.needed:
        names = [f"`{outcome.id}`" for outcome in matrix.outcomes if check in outcome.checks]
        lines.append(f"| {check} | {', '.join(names)} |")
    if not matrix.needed:
        return lines
    callers = [check.id for check in CHECKS.values() if check.about_callers]
    gpus = [check.id for check in CHECKS.values() if check.needs_gpu]
    return [
        *lines,
        "",
        f"No fault of a Buffer makes {', '.join(callers)} fail: they judge what an engine or a caller does.",
        f"{', '.join(gpus)} is judged on GPUs only. Corrupted traces in the tests show that these can fail.",
    ]
