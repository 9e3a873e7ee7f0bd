"""Was a result edited? A report ends with a digest of all that it says; a gate's lists those of its folders.

A digest is no signature: who can run this package can write one (docs/trust.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from moonep_validate.doors.report.files import DIGEST, load_traces
from moonep_validate.doors.report.outcome import Outcome, read_outcome
from moonep_validate.trace.manifest import MAX_REPORT, NAME, REPORT, Manifest, check_report
from moonep_validate.trace.schema import SchemaError, read_bytes
from moonep_validate.trace.trace import TraceError


def folder_digests(folder: Path) -> dict[str, str]:
    """The hashes of a run's manifest and report, by file."""
    return {name: _hash(folder / name) for name in (NAME, REPORT)}


def verify(path: Path) -> Iterator[str]:
    """What holds of a folder, or a file ``report.json``, one sentence each.

    Raises:
        TraceError: at the first thing that does not.
    """
    file = path / REPORT if path.is_dir() else path
    outcome = read_outcome(file)
    _hold_digest(file)
    yield f"{file} is as it was written: {outcome.status}, {len(outcome.cases)} cases"
    for run, digests in outcome.folders.items():
        for name, digest in digests.items():
            if _hash(file.parent / run / name) != digest:
                raise TraceError(f"{file.parent / run / name} is not the file that {file} lists: it was changed")
        yield from verify(file.parent / run)
    if not outcome.folders and path.is_dir():
        yield from _traces(path, outcome)


def _traces(folder: Path, outcome: Outcome) -> Iterator[str]:
    """Manifest and traces of a run."""
    manifest = Manifest.read(folder)
    check_report(folder, manifest)
    if len(outcome.cases) < sum(entry.status is not None for entry in manifest.entries):
        raise TraceError(f"{folder / REPORT} has fewer cases than {NAME}: some were cut out")
    kept = [entry for entry in manifest.entries if entry.file is not None]
    if kept:
        load_traces(folder)
    yield f"{folder}: the manifest and {len(kept)} traces have their seals; `check` judges traces again"


def _hold_digest(file: Path) -> None:
    body, mark, rest = read_bytes(file, MAX_REPORT).rpartition(DIGEST)
    if not mark:
        raise TraceError(f"{file} has no digest: it is of a run that did not end, or of an earlier version")
    if rest != hashlib.sha256(body).hexdigest().encode() + b'"}\n':
        raise TraceError(f"{file} does not match its digest: it was changed")


def _hash(file: Path) -> str:
    try:
        return hashlib.sha256(read_bytes(file, MAX_REPORT)).hexdigest()
    except OSError as error:
        raise TraceError(f"{file} cannot be read: {error.strerror}") from None
    except SchemaError as error:
        raise TraceError(f"{file}: {error}") from None
