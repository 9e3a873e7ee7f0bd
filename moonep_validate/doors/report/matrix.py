"""How is it told what the suite catches? A line for each fault, a table of checks, one line of score."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moonep_validate.studies.mutate import Matrix, Trial

_STYLE = {"killed": "green", "not_exercised": "dim", "not_run": "dim"}


def trial_line(trial: Trial) -> str:
    """One fault as it comes."""
    style = _STYLE.get(trial.status, "bold red")
    found = f"by {trial.check} at {trial.stage}" if trial.killed else ""
    where = "" if trial.located or not trial.killed else f" (it happens at {trial.own_stage})"
    few = f"; by {len(trial.killers)} case only" if trial.thin else ""
    return (
        f"[{style}]{trial.status:13}[/{style}] {escape(trial.id):30} {found}{where}, "
        f"{trial.cases} cases, {trial.seconds:.1f} s, {trial.bugs}{few}"
    )


def show_matrix(console: Console, matrix: Matrix) -> None:
    """Which check makes which faults fail, what nobody noticed, and the score."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("faults", justify="right", no_wrap=True)
    table.add_column("which")
    for check in sorted(matrix.kills, key=lambda c: (c[0], int(c[1:]))):
        table.add_row(check, str(matrix.kills[check]), " ".join(matrix.found_by(check)))
    console.print(table)
    for trial in matrix.trials:
        if trial.gates and not trial.killed:
            console.print(f"[bold red]{trial.status}[/bold red]: {trial.id}", highlight=False)
        if trial.late:
            console.print(f"[bold red]found late[/bold red]: {trial.id}", highlight=False)
    if matrix.thin:
        names = " ".join(one.id for one in matrix.thin)
        few = f"warning: fewer than {matrix.thin[0].enough} cases kill"
        console.print(f"[bold yellow]{few}[/bold yellow]: {names}", highlight=False)
    if matrix.blunt:
        console.print(f"[bold red]no fault makes these checks fail[/bold red]: {' '.join(matrix.blunt)}")
    if hidden := [one.id for one in matrix.trials if not one.gates]:
        console.print(f"not shown by this subject, {len(hidden)}: {' '.join(hidden)}", highlight=False)
    if shrunk := matrix.median_shrunk:
        console.print(f"median shrunk case: {shrunk}", highlight=False)
    console.print(f"[bold]{matrix.score}[/bold], exit code {matrix.exit_code}", highlight=False)
