"""What is kept? ``report.json`` after every case, and one trace file per case that is asked for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from moonep_validate import __version__
from moonep_validate.cases.case import Case
from moonep_validate.doors.report.summary import Summary
from moonep_validate.judge.checks import CHECKS
from moonep_validate.trace.trace import Trace, TraceError

SCHEMA = 1
_TRACES, _SUFFIX = "traces", ".safetensors"
_LONGEST_NAME = 200


class OutputFolder:
    """Where a run leaves its results; traces of an earlier run in it are removed.

    Raises:
        OSError: if the folder cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.traces = path / _TRACES
        self.traces.mkdir(parents=True, exist_ok=True)
        for old in self.traces.glob(f"*{_SUFFIX}"):
            old.unlink()
        (path / "report.json").write_text("{}\n")

    def write_report(self, summary: Summary, subject: str) -> None:
        """Replace report.json; called after every case, so that an interrupted run keeps what is known."""
        data = {
            "schema": SCHEMA,
            "version": __version__,
            "subject": subject,
            "status": summary.status,
            "interrupted": summary.interrupted,
            "exit_code": summary.exit_code,
            "planned": summary.planned,
            "checks": {c.id: {"name": c.name, "stage": c.stage, "promise": c.promise} for c in CHECKS.values()},
            "cases": [verdict.to_json() for verdict in summary.verdicts],
        }
        part = self.path / "report.json.part"
        part.write_text(json.dumps(data, indent=1) + "\n")
        part.replace(self.path / "report.json")

    def write_trace(self, trace: Trace) -> None:
        """Keep one trace; its name is the case."""
        trace.save(self.traces / f"{_file_name(trace.case)}{_SUFFIX}")


def load_traces(folder: Path) -> list[Trace]:
    """All traces of a folder, in order of name.

    Raises:
        TraceError: if the folder has none, or one is damaged.
    """
    if not folder.is_dir():
        raise TraceError(f"{folder} is not a folder; give the folder that `run --out` wrote")
    inside = folder / _TRACES
    paths = sorted((inside if inside.is_dir() else folder).glob(f"*{_SUFFIX}"))
    if not paths:
        raise TraceError(f"{folder} holds no trace (*{_SUFFIX}); record with `run --out {folder} --keep all`")
    return [Trace.load(path) for path in paths]


def _file_name(case: Case) -> str:
    name = str(case)
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
