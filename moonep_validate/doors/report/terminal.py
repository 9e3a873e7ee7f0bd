"""What does a person see? A progress line, findings as they come, a table by stage and check, one last word."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moonep_validate.doors.report.summary import Row, Summary
from moonep_validate.judge.verdict import Verdict
from moonep_validate.trace.provenance import describe, kind_of
from moonep_validate.trace.trace import Part, Trace

_STYLE = {"passed": "green", "failed": "bold red", "hung": "bold red", "error": "bold red"}
_LARGE = 32
#: Characters that a terminal obeys; messages come from the code that is judged.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
#: Cases of a run, or idle checks, that are few: such a run has a short table, and so few are named.
_FEW = 8


def styled(status: str) -> str:
    """A status in its colour."""
    style = _STYLE.get(status, "yellow" if status not in ("not_run", "not_applicable") else "dim")
    return f"[{style}]{status}[/{style}]"


def progress_bar(console: Console) -> Progress:
    """The live display of a run."""
    return Progress(
        TextColumn("{task.completed}/{task.total}", style="bold"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def show_evidence(console: Console, trace: Trace) -> None:
    """One line per distinct part: what really runs; nothing where nothing does."""
    if trace.not_run:
        return
    stages: dict[Part, list[str]] = {}
    for stage, part in trace.parts.items():
        stages.setdefault(part, []).append(stage)
    for part, names in ((part, names) for part, names in stages.items() if part.origin != "none"):
        console.print(
            f"evidence: [bold]{kind_of(part)}[/bold] {escape(describe(part))} for {', '.join(names)}",
            highlight=False,
            soft_wrap=True,
        )
        for seam in part.seams:
            console.print(f"  replaced: {escape(seam)}", highlight=False, soft_wrap=True)
    if trace.case.refusal:
        console.print("evidence: [bold]sampled[/bold] inputs, as a served engine was given them", highlight=False)


def show_problem(console: Console, verdict: Verdict) -> None:
    """A verdict that is not a pass, as it comes."""
    console.print(
        escape(_CONTROL.sub("?", verdict.diagnosis)),
        style="red" if verdict.first else "yellow",
        highlight=False,
        soft_wrap=True,
    )


def show_table(console: Console, summary: Summary, all_checks: bool = False) -> None:
    """Results and the events that were seen; nothing where no case ran.

    A run of a few cases has one row for each stage, and one for each check that is no pass.

    Args:
        console: where to.
        summary: of the run.
        all_checks: one row for each check in any run, and idle checks and events by name.
    """
    if all(verdict.status == "not_run" for verdict in summary.verdicts):
        return
    whole = all_checks or len(summary.verdicts) > _FEW
    console.print(_checks_table(summary.rows()) if whole else _stages_table(summary.rows()))
    seen = ", ".join(f"{name} {count}" for name, count in summary.witnesses().items())
    if idle := summary.idle():
        which = " ".join(idle) if all_checks or len(idle) <= _FEW else "--all-checks names them"
        console.print(f"idle, {len(idle)} checks and events: {which}", highlight=False, soft_wrap=True)
    if seen:
        console.print(f"events seen, in cases: {seen}", highlight=False, soft_wrap=True)


def _table(*names: str) -> Table:
    """A table whose last two columns are numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (*names, "status"):
        table.add_column(name, no_wrap=name not in ("promise", "checks"))
    for name in ("results", "compared"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _stages_table(rows: Sequence[Row]) -> Table:
    """One row for each stage: its checks that passed; then each check that did not."""
    table = _table("stage", "checks")
    for stage in dict.fromkeys(row.stage for row in rows):
        mine = [row for row in rows if row.stage == stage]
        passed = [row for row in mine if row.status == "passed"]
        if passed:
            right = sum(row.statuses["passed"] for row in passed)
            results = sum(row.statuses.total() for row in passed)
            examined = sum(row.examined for row in passed)
            names = " ".join(row.check.id for row in passed)
            table.add_row(stage, names, styled("passed"), f"{right}/{results}", f"{examined:,}")
        for row in (row for row in mine if row not in passed):
            table.add_row("" if passed else stage, f"{row.check}", *_numbers(row))
    return table


def _checks_table(rows: Sequence[Row]) -> Table:
    """One row for each check, with its promise."""
    table, stage = _table("stage", "check", "promise"), ""
    for row in rows:
        shown = "" if row.stage == stage else row.stage
        table.add_row(shown, str(row.check), row.check.promise, *_numbers(row))
        stage = row.stage
    return table


def _numbers(row: Row) -> tuple[str, str, str]:
    """Status, results that passed of all, and elements compared."""
    status = styled(row.status) + (" (information)" if row.information else "")
    return status, f"{row.statuses['passed']}/{row.statuses.total()}", f"{row.examined:,}"


def show_verdict(console: Console, summary: Summary, trace: Trace | None, seconds: float) -> None:
    """The last lines: what the result proves, what it does not, and the answer."""
    reasons = Counter(v.results[0].reason for v in summary.verdicts if v.status == "not_run")
    if pads := _pads(summary):
        console.print(pads, highlight=False, soft_wrap=True)
    for reason, count in reasons.items():
        console.print(f"not run, {count} cases: {reason}", highlight=False, soft_wrap=True)
    for reason, count in _waived(summary).items():
        console.print(f"waived, {count} results: {reason}", highlight=False, soft_wrap=True)
    if trace and summary.counts["passed"] and summary.status in ("passed", "waived", "not_run"):
        proves = f"proves: {trace.proves}{_but(summary)}{_where(summary)}"
        console.print(f"{proves}\nleaves open: {trace.leaves_open}", highlight=False, soft_wrap=True)
    elif summary.verdicts:
        console.print(f"proves nothing as it stands: {summary.status}", highlight=False)
    for missed in summary.missed:
        console.print(missed, markup=False, highlight=False, soft_wrap=True)
    for doubted in dict.fromkeys(
        part for verdict in summary.verdicts for part in verdict.parts.values() if part.doubts
    ):
        text = f"{kind_of(doubted)}: {doubted.package}: {'; '.join(doubted.doubts)}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    counts = ", ".join(f"{count} {status}" for status, count in summary.counts.items())
    word = "interrupted" if summary.interrupted else summary.status
    if summary.missed and word in ("passed", "waived", "not_run"):
        word = "failed"  # the cases are fine, and what was asked for was not reached
    console.print(
        f"[bold]{styled(word)}[/bold]: {summary.ran} of {summary.planned} cases ran ({counts or 'none'}) "
        f"in {seconds:.1f} s, exit code {summary.exit_code}",
        highlight=False,
    )


def _but(summary: Summary) -> str:
    """Of which cases it is not true: those with a known defect."""
    known = summary.counts["waived"]
    many = f"the {known} cases" if known > 1 else "the case"
    return f", but for {many} with a known defect" if known else ""


def _where(summary: Summary) -> str:
    """At which stages values were compared, and at which only in part."""
    whole, part = summary.proven()
    text = f"; values were compared at {', '.join(whole) or 'no stage'}"
    kept = " ".join(dict.fromkeys(f"--record {v.recording}" for v in summary.verdicts if v.recording != "full"))
    return text + (f"; as far as {kept} reaches, also at {', '.join(part)}" if part else "")


def _waived(summary: Summary) -> Counter[str]:
    """Known defects by reason."""
    return Counter(r.reason for verdict in summary.verdicts for r in verdict.results if r.status == "waived")


def _pads(summary: Summary) -> str:
    """What an engine's padding costs: slots, rows and bytes as dispatched, against pads that stay at home."""
    total: Counter[str] = Counter()
    for verdict in summary.verdicts:
        total.update({name: int(value) for name, value in verdict.measures.items() if "pads_" in name})
    if not total:
        return ""
    costs = [
        f"{total[f'{kind}_slots']} slots, {total[f'{kind}_rows_moved']:,} rows moved, "
        f"{total[f'{kind}_prefetch_bytes'] / 2**20:.1f} MiB prefetched"
        for kind in ("pads", "local_pads")
    ]
    return f"plans as dispatched: {costs[0]}; with padding tokens that stay on their rank: {costs[1]}"
