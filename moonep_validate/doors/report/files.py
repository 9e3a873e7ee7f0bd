"""What is kept? report.json and manifest.json as cases are judged, and a trace of each case that asks for one."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moonep_validate import __version__
from moonep_validate.cases.case import Case
from moonep_validate.doors.report.environment import environment
from moonep_validate.doors.report.summary import INTERRUPTED, Summary
from moonep_validate.judge.checks import CHECKS
from moonep_validate.judge.verdict import Verdict
from moonep_validate.trace.manifest import NAME, Entry, Keeps, Manifest, calls_digest, check_report, due
from moonep_validate.trace.trace import Trace, TraceError

SCHEMA = 1
INCOMPLETE = "incomplete"
_REPORT = "report.json"
#: What comes before the digest at the end of a report.
DIGEST = b',\n"digest": "'
#: Seconds of one writing above which files rest, and for how many times as long.
_DEAR, _REST = 0.1, 20
_TRACES, _SUFFIX = "traces", ".safetensors"
#: File systems take 255 bytes, and a suffix follows; a routing by table is longer.
_LONGEST_NAME = 200


class OutputFolder:
    """Where a run leaves its results; those of an earlier run in it are removed, and nothing else is.

    Attributes:
        lost: what could not be written, e.g. on a full disk, or empty; the run goes on, and says so at its end.

    Raises:
        OSError: if the folder cannot be made or written, is in use, or holds files that no run wrote.
    """

    def __init__(self, path: Path) -> None:
        self.lost = ""
        self.path, self.manifest = path, Manifest.of((), "none")
        self._told: list[tuple[Verdict, str]] = []
        self._rests_until = 0.0
        self.traces = path / _TRACES
        self.traces.mkdir(parents=True, exist_ok=True)
        weakref.finalize(self, os.close, _locked(path))
        old = _of_a_run(path, self.traces)
        self.write_report(Summary(0), "")
        if self.lost:
            raise OSError(errno.EIO, self.lost)
        for trace in old:
            trace.unlink()

    def write_report(self, summary: Summary, subject: str) -> None:
        """Replace report.json; called after every case, so that an interrupted run keeps what is known.

        Until the run has ended its status is ``incomplete``, with the exit code of an interrupted one. Files of
        thousands of cases are dear: writing them takes a small share of the time, so that a run that is killed may
        lose its last cases.
        """
        if not (summary.ended or summary.interrupted) and self._rests:
            return
        begin = time.monotonic()
        data = {
            "schema": SCHEMA,
            "version": __version__,
            "subject": subject,
            "status": summary.status if summary.ended else INCOMPLETE,
            "interrupted": summary.interrupted,
            "exit_code": summary.exit_code if summary.ended else INTERRUPTED,
            "planned": summary.planned,
            "environment": environment(),
            "unmet": summary.missed,
            "smallest": summary.smallest,
            "checks": {c.id: {"name": c.name, "stage": c.stage, "promise": c.promise} for c in CHECKS.values()},
        }
        head = json.dumps(data)[:-1]
        text = f'{head}, "cases": [\n{self._cases(summary.verdicts)}\n]}}\n'
        with self._writing(self.path / _REPORT) as path:
            replace_file(path, sealed(text) if summary.ended else text.encode())
        if self._rests_until:  # what note() left out
            self._write_manifest()
        took = time.monotonic() - begin
        self._rests_until = time.monotonic() + _REST * took if took > _DEAR else 0.0

    @property
    def _rests(self) -> bool:
        """Whether files are dear, and were written a short time ago."""
        return time.monotonic() < self._rests_until

    def _write_manifest(self) -> None:
        with self._writing(self.path / NAME):
            self.manifest.write(self.path)

    def _cases(self, verdicts: Sequence[Verdict]) -> str:
        """Verdicts as JSON, one a line; each is put into words once, not after every case that follows."""
        for place, verdict in enumerate(verdicts):
            if self._told[place : place + 1] == [] or self._told[place][0] is not verdict:
                self._told[place:] = [(verdict, json.dumps(verdict.to_json()))]
        return ",\n".join(text for _, text in self._told[: len(verdicts)])

    def plan(self, cases: Sequence[Case], keep: Keeps) -> None:
        """Note what is to run, before anything does; see manifest.py."""
        self.manifest = Manifest.of([str(case) for case in cases], keep)
        self.manifest.write(self.path)
        self.write_report(Summary(len(cases)), "")

    def note(self, trace: Trace, verdict: Verdict) -> None:
        """Note a verdict, and keep the trace if ``--keep`` says so; its name is the case."""
        file = None
        if due(self.manifest.keep, verdict.status):
            file = f"{_file_name(trace.case)}{_SUFFIX}"
            with self._writing(self.traces / file) as path:
                replace_file(path, trace.to_bytes())
        self.manifest = self.manifest.judged(trace, verdict.status, file)
        if file or not self._rests:
            self._write_manifest()

    @contextmanager
    def _writing(self, path: Path) -> Iterator[Path]:
        """The verdicts are worth more than their files: note the first that cannot be written, and go on."""
        try:
            yield path
        except OSError as error:
            self.lost = (
                self.lost or f"{path} cannot be written: {error.strerror}; what {self.path} holds is not whole"
            )


def sealed(text: str) -> bytes:
    """A JSON object with a digest of everything before it as its last value; see seals.py."""
    body = text.rstrip().removesuffix("}").rstrip().encode()
    return body + DIGEST + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def replace_file(path: Path, data: bytes) -> None:
    """Write a file in one step, so that nobody ever sees half of it."""
    part = path.with_name(f"{path.name[:_LONGEST_NAME]}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _locked(path: Path) -> int:
    """Hold the folder until this descriptor is closed.

    Raises:
        OSError: if another run holds it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OSError(errno.EBUSY, "another run writes to it; give each run a folder of its own") from None
    except OSError:  # a file system without locks
        pass
    return descriptor


def _of_a_run(path: Path, traces: Path) -> list[Path]:
    """The traces that an earlier run left.

    Raises:
        OSError: if there are files in our names that no run wrote.
    """
    found = sorted(traces.iterdir())
    strange = [one for one in found if not (one.name.endswith(".part") or _is_trace(one))]
    strange += [one for one in (path / _REPORT, path / NAME) if one.exists() and not ours(one)]
    if strange:
        raise OSError(errno.EEXIST, f"{strange[0]} was not written by a run, and stays; give another folder")
    return found


def _is_trace(path: Path) -> bool:
    """Whether a file says in its first bytes that it is a trace; it may be of any version."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return b'"__metadata__"' in (begin := file.read(4096)) and b'"moonep_validate"' in begin


def ours(path: Path) -> bool:
    """Whether a file is a report or a manifest, or was cut short while one was written."""
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError):
        return path.is_file() and path.stat().st_size == 0
    return isinstance(data, dict) and (not data or {"schema", "version"} <= set(data))


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
