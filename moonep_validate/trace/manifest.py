"""What should be in a folder of traces? A list of the cases that were planned, their verdicts and their traces.

``run --out`` writes it before the first case and after each, and ``check`` holds the folder against it: a trace
that is gone, changed, doubled or of another case is refused, and so is a case that never ran.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from moonep_validate import __version__
from moonep_validate.trace.schema import SchemaError, build, build_known, decoded, parsed, read_bytes, shown
from moonep_validate.trace.trace import Trace, TraceError

SCHEMA = 1
NAME, REPORT = "manifest.json", "report.json"
MAX_BYTES, MAX_REPORT = 2**26, 2**30
Keeps = Literal["failed", "all", "none"]


@dataclass(frozen=True)
class Entry:
    """One planned case.

    Attributes:
        case: its line.
        status: of its verdict; None until it is judged.
        file: of its trace, beside the manifest; None where none was kept.
        seal: of that trace.
        calls: step and operation of each call of each rank, hashed.
    """

    case: str
    status: str | None = None
    file: str | None = None
    seal: str | None = None
    calls: str | None = None


@dataclass(frozen=True)
class Manifest:
    """All planned cases.

    Attributes:
        keep: which traces were to be kept: ``failed`` (whatever did not pass), ``all`` or ``none``.
        entries: in the order in which they ran.
    """

    schema: int
    version: str
    keep: Keeps
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, cases: Sequence[str], keep: Keeps) -> Manifest:
        """Nothing is judged yet; a case that is given twice is one."""
        return cls(SCHEMA, __version__, keep, tuple(map(Entry, dict.fromkeys(cases))))

    def judged(self, trace: Trace, status: str, file: str | None) -> Manifest:
        """With the verdict on a trace, and the file where it is kept."""
        mine = Entry(str(trace.case), status, file, trace.seal if file else None, calls_digest(trace))
        others = {entry.case: entry for entry in self.entries}
        return replace(self, entries=tuple({**others, mine.case: mine}.values()))

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest in one step."""
        data = asdict(self)
        part = folder / f"{NAME}.part"
        part.write_text(json.dumps({**data, "seal": _seal(data)}, indent=1) + "\n")
        part.replace(folder / NAME)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder.

        Raises:
            TraceError: if there is none, or it is damaged or changed.
        """
        path = folder / NAME
        try:
            data = parsed(decoded(read_bytes(path, MAX_BYTES)))
            seal = data.pop("seal", None) if isinstance(data, dict) else None
            manifest = build(cls, data, "the manifest")
            if manifest.schema != SCHEMA:
                raise SchemaError(f"has schema {manifest.schema}, this version reads {SCHEMA}")
            if seal != _seal(data):
                raise SchemaError("does not match its seal: it was changed")
        except FileNotFoundError:
            raise TraceError(f"{path} is not there: without it nobody knows which cases were planned") from None
        except OSError as error:
            raise TraceError(f"{path} cannot be read: {error.strerror}") from None
        except SchemaError as error:
            raise TraceError(f"{path}: {error}") from None
        return manifest.checked(path)

    def checked(self, path: Path) -> Manifest:
        """Itself, if each case has what ``keep`` asks for.

        Raises:
            TraceError: for a case that is listed twice, or a trace that is or is not there against ``keep``.
        """
        if twice := [case for case, count in Counter(e.case for e in self.entries).items() if count > 1]:
            raise TraceError(f"{path} lists {shown(twice[0])} twice")
        for entry in self.entries:
            if entry.status is not None and due(self.keep, entry.status) != (entry.file is not None):
                raise TraceError(
                    f"{path}: {entry.case} is {entry.status}, and a trace of it is {'' if entry.file else 'not '}"
                    f"listed; --keep {self.keep} says otherwise"
                )
            if entry.file is not None and (not entry.seal or Path(entry.file).name != entry.file):
                raise TraceError(f"{path}: the trace of {entry.case} has no seal, or a file name that is a path")
        return self


@dataclass(frozen=True)
class _Reported:
    """What a report says of a case; there is more."""

    case: str
    status: str


@dataclass(frozen=True)
class _Report:
    """What is read of ``report.json``; there is more."""

    cases: list[dict[str, Any]] = field(default_factory=list)


def check_report(folder: Path, manifest: Manifest) -> None:
    """Hold the verdicts of a folder's report against the manifest; a report may be gone, or end early.

    Raises:
        TraceError: for a report that is damaged, or says something else.
    """
    path = folder / REPORT
    statuses = {entry.case: entry.status for entry in manifest.entries}
    try:
        data = parsed(decoded(read_bytes(path, MAX_REPORT)))
        if not isinstance(data, dict):
            raise SchemaError(f"is {shown(data)}, an object is needed")
        for number, one in enumerate(build_known(_Report, data).cases):
            said = build_known(_Reported, one, f"cases[{number}]")
            if said.case not in statuses or statuses[said.case] != said.status:
                known = statuses.get(said.case, "not listed")
                raise SchemaError(f"{said.case} is {said.status} here, and {known} in {NAME}")
    except FileNotFoundError:
        return
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None
    except SchemaError as error:
        raise TraceError(f"{path}: {error}") from None


def due(keep: Keeps, status: str) -> bool:
    """Whether ``keep`` asks for the trace of a case with this verdict."""
    return keep == "all" or (keep == "failed" and status not in ("passed", "waived"))


def calls_digest(trace: Trace) -> str:
    """A hash over step and operation of each call of each rank, in order."""
    calls = [[[call.step, call.op] for call in rank] for rank in trace.calls]
    return hashlib.sha256(json.dumps(calls).encode()).hexdigest()


def _seal(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
