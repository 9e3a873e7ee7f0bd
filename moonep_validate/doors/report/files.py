"""What is kept? report.json and manifest.json after every case, and a trace of each case that asks for one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moonep_validate import __version__
from moonep_validate.cases.case import Case
from moonep_validate.doors.report.summary import Summary
from moonep_validate.judge.checks import CHECKS
from moonep_validate.judge.verdict import Verdict
from moonep_validate.trace.manifest import NAME, Entry, Keeps, Manifest, calls_digest, check_report, due
from moonep_validate.trace.trace import Trace, TraceError

SCHEMA = 1
_TRACES, _SUFFIX = "traces", ".safetensors"
_LONGEST_NAME = 200


class OutputFolder:
    """Where a run leaves its results; traces of an earlier run in it are removed.

    Attributes:
        lost: what could not be written, e.g. on a full disk, or empty; the run goes on, and says so at its end.

    Raises:
        OSError: if the folder cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.lost = ""
        self.path, self.manifest = path, Manifest.of((), "none")
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
        with self._writing(self.path / "report.json") as path:
            part = path.with_suffix(".json.part")
            part.write_text(json.dumps(data, indent=1) + "\n")
            part.replace(path)

    def plan(self, cases: Sequence[Case], keep: Keeps) -> None:
        """Note what is to run, before anything does; see manifest.py."""
        self.manifest = Manifest.of([str(case) for case in cases], keep)
        self.manifest.write(self.path)

    def note(self, trace: Trace, verdict: Verdict) -> None:
        """Note a verdict, and keep the trace if the policy says so; its name is the case."""
        file = None
        if due(self.manifest.keep, verdict.status):
            file = f"{_file_name(trace.case)}{_SUFFIX}"
            with self._writing(self.traces / file) as path:
                trace.save(path)
        self.manifest = self.manifest.judged(trace, verdict.status, file)
        with self._writing(self.path / NAME):
            self.manifest.write(self.path)

    @contextmanager
    def _writing(self, path: Path) -> Iterator[Path]:
        """The verdicts are worth more than their files: note the first that cannot be written, and go on."""
        try:
            yield path
        except OSError as error:
            self.lost = (
                self.lost or f"{path} cannot be written: {error.strerror}; what {self.path} holds is not whole"
            )


def load_traces(folder: Path) -> tuple[Manifest, dict[str, Trace]]:
    """The manifest of a folder, and its traces by case, each as the manifest lists it.

    Raises:
        TraceError: if the folder has none, one is damaged, gone or changed, or one is there that is not listed.
    """
    if not folder.is_dir():
        raise TraceError(f"{folder} is not a folder; give the folder that `run --out` wrote")
    manifest, inside = Manifest.read(folder), folder / _TRACES
    check_report(folder, manifest)
    listed = {entry.file: entry for entry in manifest.entries if entry.file is not None}
    if extra := sorted(path.name for path in inside.glob("*") if path.name not in listed):
        raise TraceError(f"{inside / extra[0]} is not in {folder / NAME}: no run of this folder wrote it")
    if not listed:
        raise TraceError(f"{folder} holds no trace (*{_SUFFIX}); record with `run --out {folder} --keep all`")
    return manifest, {entry.case: _listed(inside / name, entry) for name, entry in listed.items()}


def _listed(path: Path, entry: Entry) -> Trace:
    """The trace of an entry, which is what was recorded."""
    trace = Trace.load(path)
    if str(trace.case) != entry.case or calls_digest(trace) != entry.calls or trace.seal != entry.seal:
        raise TraceError(f"{path} is not the trace that {NAME} lists for {entry.case}: it was replaced or changed")
    return trace


def _file_name(case: Case) -> str:
    name = str(case)
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
