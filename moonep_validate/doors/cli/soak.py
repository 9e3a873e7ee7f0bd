"""``run --soak 10m`` and ``run --resume DIR``: drawn cases under a watch, kept so that they can go on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moonep_validate import __version__
from moonep_validate.cases.case import CaseError
from moonep_validate.doors import interrupts
from moonep_validate.doors.cli.options import console, job_of, note
from moonep_validate.pipeline.options import Options, read, spelled

if TYPE_CHECKING:
    from moonep_validate.studies.soak import Soak

NAME = "soak.json"
#: What a soak has in place of these.
_REFUSED = ("case", "profile", "require_cases", "fault")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_EXIT_CODES = {"passed": 0, "failed": 1, "vacuous": 10, "unknown": 12, "hung": 13, "error": 14}
_INTERRUPTED = 2
#: Seconds between two writings of the file: the cases of so many, at most, are run again after a soak was killed.
_WRITE = 5.0


def seconds_of(text: str) -> float:
    """A time such as 90s, 10m, 8h, or a number of seconds.

    Raises:
        CaseError: for another text.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found or not float(found[1]):
        raise CaseError(f"--soak is {text!r}; it must be a time: 90s, 10m or 8h")
    return float(found[1]) * _UNITS[found[2]]


def main(
    command: str | None, options: Options, soak: str | None, seed: int, out: Path | None, folder: Path | None
) -> None:
    """Begin a soak, or go on with one; ends the command.

    Raises:
        CaseError: for options that do not go together; see ``start`` and ``resume``.
    """
    if command == "parity":
        raise CaseError("--soak starts its own ranks: use run, without torchrun")
    if folder is None:
        start(options, soak or "", seed, out)
    elif soak or out:
        raise CaseError(f"--resume {folder} has its own --soak and --out: leave them out")
    else:
        resume(folder, options)


def start(options: Options, text: str, seed: int, out: Path | None) -> None:
    """Begin a soak.

    Raises:
        CaseError: for options that it does not take, or a folder that has one already.
    """
    seconds = seconds_of(text)
    if given := [spelled(name) for name in _REFUSED if name in options.given]:
        raise CaseError(f"--soak draws its own cases on a subject that is as it is: leave {', '.join(given)} out")
    if options.world == "threads":
        raise CaseError("--soak watches worker processes: leave --world threads out")
    if out and (out / NAME).exists():
        raise CaseError(f"{out / NAME} is there: go on with --resume {out}, or give another folder")
    from moonep_validate.studies.soak import begin

    options = replace(options, world="processes")
    soak = begin(job_of(options), seed, options.ranks)
    _run(options, seconds, soak, out)


def resume(folder: Path, given: Options) -> None:
    """Go on with a soak that was interrupted, with its own options.

    Raises:
        CaseError: if the folder has none that can be read, or options are given.
    """
    if given.given:
        raise CaseError(
            f"--resume goes on with the options of {folder}: leave {', '.join(map(spelled, given.given))} out"
        )
    try:
        data = json.loads((folder / NAME).read_text())
        options = read(data["options"], note)
        seconds, soak = float(data["seconds"]), _read(data["soak"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CaseError(f"{folder / NAME} is no soak that can go on: {type(error).__name__}: {error}") from None
    _run(options, seconds, soak, folder)


def _read(data: dict[str, Any]) -> Soak:
    from moonep_validate.studies.leaks import Series
    from moonep_validate.studies.soak import Soak

    return Soak(**{**data, "series": [Series(**one) for one in data["series"]]})


def _run(options: Options, seconds: float, soak: Soak, out: Path | None) -> None:
    """The loop, with what is kept and told; ends the command."""
    job = job_of(options)
    if job.not_run:
        raise CaseError(job.not_run)
    if out:
        out.mkdir(parents=True, exist_ok=True)
    from moonep_validate.pipeline.run import run_case
    from moonep_validate.studies.soak import go_on

    first = f", from case {soak.next} on" if soak.next else ""
    console.print(f"[bold]moonep-validate {__version__}[/bold]: soak of {seconds:g} s{first}", highlight=False)
    interrupted, save = False, _saver(options, seconds, soak, out)
    try:
        save(False)
        for verdict in go_on(soak, job, lambda case: run_case(job, case)[1], seconds):
            if verdict.first or verdict.errors:
                console.print(verdict.diagnosis, markup=False, highlight=False, soft_wrap=True)
            save(False)
            interrupts.check()
    except KeyboardInterrupt:
        interrupts.ending()
        interrupted = True
    save(True)
    _say(soak, interrupted, out)
    raise typer.Exit(_INTERRUPTED if interrupted else _EXIT_CODES[soak.status])


def _saver(options: Options, seconds: float, soak: Soak, out: Path | None) -> Callable[[bool], None]:
    """Writes the file, if there is to be one and it is time, or the end."""
    from moonep_validate.doors.report.files import replace_file

    latest = [float("-inf")]

    def save(now: bool) -> None:
        if out is None or not (now or time.monotonic() > latest[0] + _WRITE):
            return
        status = soak.status if soak.spent >= seconds else "incomplete"
        data = {
            "schema": 1,
            "version": __version__,
            "status": status,
            "seconds": seconds,
            "leaks": soak.leaks,
            "options": asdict(options),
            "soak": asdict(soak),
        }
        replace_file(out / NAME, json.dumps(data).encode())
        latest[0] = time.monotonic()

    return save


def _say(soak: Soak, interrupted: bool, out: Path | None) -> None:
    counts = ", ".join(f"{count} {status}" for status, count in sorted(soak.statuses.items())) or "none"
    for line in soak.leaks:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if soak.unwatched:
        text = f"watched too short to tell a leak, 100 cases at least: {', '.join(soak.unwatched)}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    watched = sum(one.judged for one in soak.series)
    word = "interrupted" if interrupted else soak.status
    console.print(
        f"{word}: {soak.next} cases ({counts}) in {soak.spent:.0f} s, {watched} processes watched, "
        f"{len(soak.leaks)} leaks",
        markup=False,
        highlight=False,
    )
    if interrupted and out:
        console.print(
            f"go on with: moonep-validate run --resume {out}", markup=False, highlight=False, soft_wrap=True
        )
