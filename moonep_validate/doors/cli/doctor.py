"""The command ``doctor``: can this machine run it, and if not, why? It runs nothing, and imports no torch here."""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from moonep_validate.doors.cli.options import console, note
from moonep_validate.doors.doctor.findings import findings, known_tiers
from moonep_validate.doors.doctor.line import TIERS, Line, Tier, tiers
from moonep_validate.doors.doctor.readings import SECONDS, read
from moonep_validate.errors import CaseError

#: What the gate without options needs.
_DEFAULT = ("threads", "processes")
_STYLES = {"ok": "green", "note": "yellow", "missing": "red", "broken": "bold red", "unknown": "magenta"}
#: As the exit codes of all commands, the worst last; not known is never a pass.
_CODES = {"yes": 0, "unknown": 12, "no": 1}
_ANSWERS = {"yes": "green", "no": "red", "unknown": "magenta"}


def doctor(
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require",
            help=f"Tiers that must run, else exit code 1, or 12 where it is not known [{', '.join(_DEFAULT)}].",
        ),
    ] = None,
    engine_path: Annotated[
        Path | None, typer.Option("--engine-path", help="Folder that comes first on the import path.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="For all packages and tools, asked at once.")] = SECONDS,
    json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the tables.")] = False,
) -> None:
    """Say what this machine can run, and why not the rest; nothing is run."""
    wanted = known_tiers(require or list(_DEFAULT))
    if engine_path and not engine_path.is_dir():
        raise CaseError(f"--engine-path {engine_path} is no folder")
    lines = findings(read(seconds, path=str(engine_path.resolve()) if engine_path else None))
    answers = tiers(lines)
    short = [tier for tier in answers if tier.name in wanted and tier.can_run != "yes"]
    code = max((_CODES[tier.can_run] for tier in answers if tier.name in wanted), key=list(_CODES.values()).index)
    if json:
        data = {"tiers": [asdict(tier) for tier in answers], "lines": [asdict(line) for line in lines]}
        sys.stdout.write(json_format.dumps({**data, "exit_code": code}) + "\n")
    else:
        _show(lines, answers)
    for tier in short:
        note(f"{tier.name}: {'cannot run' if tier.can_run == 'no' else 'not known'}: {'; '.join(tier.why)}")
    raise typer.Exit(code)


def _show(lines: list[Line], answers: list[Tier]) -> None:
    table = Table("what", "state", "value", "needed by", "fix", box=None, pad_edge=False)
    for line in lines:
        needs = "all" if set(TIERS) <= set(line.needed_by) else ", ".join(line.needed_by)
        state = Text(line.state, _STYLES[line.state])
        table.add_row(Text(line.what), state, Text(line.value), Text(needs), Text(line.fix))
    console.print(table)
    console.print()
    table = Table("tier", "can run", "what it is", "why not", box=None, pad_edge=False)
    for tier in answers:
        state = Text(tier.can_run, _ANSWERS[tier.can_run])
        table.add_row(tier.name, state, Text(TIERS[tier.name]), Text("; ".join(tier.why)))
    console.print(table)
