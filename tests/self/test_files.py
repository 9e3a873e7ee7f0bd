"""The folder of a run: files of many cases are not written after each, and nothing is lost at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moonep_validate.doors.report import files
from moonep_validate.doors.report.files import OutputFolder
from moonep_validate.doors.report.summary import Summary
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.run import run_case
from moonep_validate.trace.manifest import Manifest
from tests.self.conftest import CASE

CASES = [CASE.but(seed=seed) for seed in range(3)]


def filled(folder: OutputFolder, summary: Summary) -> list[tuple[int, int]]:
    """Cases in report and manifest after each case."""
    counts = []
    folder.plan(CASES, "none")
    for case in CASES:
        trace, verdict = run_case(Job(), case)
        folder.note(trace, verdict)
        summary.verdicts.append(verdict)
        folder.write_report(summary, "reference")
        counts.append(known(folder.path))
    return counts


def known(path: Path) -> tuple[int, int]:
    report = json.loads((path / "report.json").read_text())
    return len(report["cases"]), sum(entry.status is not None for entry in Manifest.read(path).entries)


def test_files_of_few_cases_are_written_after_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_DEAR", 60.0)
    assert filled(OutputFolder(tmp_path), Summary(3)) == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("how", ["ended", "interrupted"])
def test_dear_files_rest_and_are_whole_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(files, "_DEAR", -1.0)
    monkeypatch.setattr(files, "_REST", 1e6)
    folder, summary = OutputFolder(tmp_path), Summary(3)
    assert filled(folder, summary) == [(0, 0), (0, 0), (0, 0)]
    setattr(summary, how, True)
    folder.write_report(summary, "reference")
    assert known(tmp_path) == (3, 3)


def test_a_trace_that_is_kept_is_listed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_DEAR", -1.0)
    monkeypatch.setattr(files, "_REST", 1e6)
    folder = OutputFolder(tmp_path)
    folder.plan(CASES, "all")
    trace, verdict = run_case(Job(), CASES[0])
    folder.note(trace, verdict)
    assert [entry.file is not None for entry in Manifest.read(tmp_path).entries] == [True, False, False]
