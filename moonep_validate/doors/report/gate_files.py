"""What does a gate leave? Reports over all its runs, beside a folder a run, as ``run --out`` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moonep_validate.cases.case import CaseError
from moonep_validate.doors.doctor.line import Line
from moonep_validate.doors.report.baseline import Change
from moonep_validate.doors.report.environment import environment
from moonep_validate.doors.report.files import ours, replace_file, sealed
from moonep_validate.doors.report.junit import junit
from moonep_validate.doors.report.outcome import Outcome
from moonep_validate.doors.report.page import page
from moonep_validate.doors.report.seals import folder_digests

_REPORT, _JUNIT, _PAGE = "report.json", "junit.xml", "report.html"


class GateFolder:
    """The folder of a gate; until the gate has ended its report says ``incomplete``, with exit code 2.

    Attributes:
        lost: what could not be written, or empty.

    Raises:
        CaseError: if it cannot be used, or holds a report that no run wrote.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lost = path, ""
        try:
            path.mkdir(parents=True, exist_ok=True)
            report = path / _REPORT
            if report.exists() and not ours(report):
                raise CaseError(f"--out {path} cannot be used: {report} was not written by a run, and stays")
            replace_file(report, Outcome("", "incomplete", 2).to_text().encode())
            for old in (_JUNIT, _PAGE):
                (path / old).unlink(missing_ok=True)
        except OSError as error:
            raise CaseError(f"--out {path} cannot be used: {error.strerror}") from None

    def write(self, outcome: Outcome, change: Change, lines: Sequence[Line] = ()) -> None:
        """All files, with doctor's lines; one that cannot be written is noted, and the others are."""
        folders = {run.name: self.path / run.name for run in outcome.runs if (self.path / run.name).is_dir()}
        digests = {name: folder_digests(folder) for name, folder in folders.items()}
        outcome = replace(outcome, environment={**environment(), **_told(lines)}, folders=digests)
        self._put(_REPORT, sealed(outcome.to_text()))
        self._put(_JUNIT, junit(outcome, change.tolerated))
        self._put(_PAGE, page(outcome).encode())

    def _put(self, name: str, data: bytes) -> None:
        try:
            replace_file(self.path / name, data)
        except OSError as error:
            self.lost = self.lost or f"{self.path / name} cannot be written: {error.strerror}"


def _told(lines: Sequence[Line]) -> dict[str, dict[str, str]]:
    """Doctor's findings in the manifest; versions and variables are there already."""
    mine = [line for line in lines if not line.what.startswith(("$", "version of "))]
    return {"doctor": {one.what: f"{one.state}: {one.value}" for one in mine}} if mine else {}
