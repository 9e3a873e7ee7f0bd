"""Is what was imported the package that it says it is? Its files, its distribution's record, every rank's word.

A name and a version prove nothing: a folder on the import path can have any. So a part is ``real`` only if an
installed distribution lists its files with these very hashes (or is an editable install of them), and every rank
says that it imported the same ones, and ran none of this suite's own reference. What is missing are its doubts,
and it is ``unverified``. Whoever can write the record of a distribution can still lie (docs/trust.md).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from moonep_validate.trace.provenance import file_of, owner_of, provenance
from moonep_validate.trace.trace import Part, Said, Trace
from moonep_validate.worlds import launch

_OURS = "moonep_validate."
_REFERENCE = f"{_OURS}reference."
_STAND_INS = ("reference", "stand-in")


def part_of(module: ModuleType, *made: object, package: str | None = None, **more: Any) -> Part:
    """What stands behind a stage, with everything that speaks against it.

    Args:
        module: that was imported.
        made: classes and functions of it that are judged; the files that define them count too.
        package: its name in evidence, by default the module's.
        more: fields of the part.
    """
    found = asdict(provenance(module))
    files = _files(module, made)
    part = Part(
        _origin(module), **{**found, "package": package or found["package"]}, digest=_digest(files), **more
    )
    if inherited := next(_inherited(made), None):
        if part.origin == "real":
            part = replace(part, origin="stand-in", doubts=(f"it inherits from {inherited}",))
        return part
    return replace(part, doubts=tuple(_doubts(module, files))) if part.origin == "real" else part


def word_on(package: str, module: ModuleType, made: tuple[object, ...], reference: bool) -> Said:
    """A rank's word on a part.

    Args:
        package: name of the part.
        module: what this rank imported.
        made: see ``part_of``.
        reference: whether the reference ran in the part's place.
    """
    return Said(package, file_of(module), _digest(_files(module, made)), reference)


def compared(trace: Trace, rank: int, words: list[Said]) -> None:
    """Lower the parts of a trace by what a rank says of them."""
    known = {word.package: word for word in words}
    lowered = {part: _lowered(part, rank, known.get(part.package)) for part in set(trace.parts.values())}
    trace.parts = {stage: lowered[part] for stage, part in trace.parts.items()}


def _lowered(part: Part, rank: int, word: Said | None) -> Part:
    if part.origin != "real" or not part.digest:
        return part
    if word is None:
        return _doubted(part, f"rank {rank} did not say what it imported")
    if word.reference:
        return replace(_doubted(part, "this suite's own reference ran in its place"), origin="stand-in")
    if (word.file, word.digest) != (part.file, part.digest):
        return _doubted(
            part, f"rank {rank} imported {word.file or 'no file'}, files {word.digest}, not {part.digest}"
        )
    return part


def _doubted(part: Part, doubt: str) -> Part:
    return part if doubt in part.doubts else replace(part, doubts=(*part.doubts, doubt))


def _origin(module: ModuleType) -> str:
    """``real`` for all that is not ours; a mark may lower a module from outside, never raise it."""
    with suppress(Exception):
        mark = getattr(module, "__moonep_origin__", "real")
        if mark in _STAND_INS:
            own = Path(file_of(module)).resolve().is_relative_to(launch.folder())
            return str(mark) if own else "stand-in"
    return "real"


def _inherited(made: tuple[object, ...]) -> Iterator[str]:
    """Classes of this suite that a class from outside is made of."""
    for one in made:
        for base in inspect.getmro(one) if inspect.isclass(one) else ():
            if base.__module__.startswith(_REFERENCE):
                yield f"{base.__module__}.{base.__qualname__}"


def _files(module: ModuleType, made: tuple[object, ...]) -> list[str]:
    """The file of the module and those that define what is judged, this suite's left out."""
    names = [str(getattr(base, "__module__", "")) for one in made for base in _bases(one)]
    modules = [module, *(sys.modules[n] for n in names if n in sys.modules and not n.startswith(_OURS))]
    files = [file_of(one) for one in modules if getattr(one, "__name__", "") != "builtins"]
    return list(dict.fromkeys(file for file in files if file))


def _bases(one: object) -> tuple[object, ...]:
    return inspect.getmro(one) if inspect.isclass(one) else (one,)


def _digest(files: list[str]) -> str:
    """One hash over the contents of files; ``unreadable`` where one cannot be read."""
    digest = hashlib.sha256()
    for file in files:
        try:
            digest.update(hashlib.sha256(Path(file).read_bytes()).digest())
        except OSError:
            return "unreadable"
    return digest.hexdigest()[:16]


def _doubts(module: ModuleType, files: list[str]) -> Iterator[str]:
    if not files:
        yield "it has no file"
    for file in files:
        if doubt := _unrecorded(str(module.__name__).partition(".")[0], Path(file)):
            yield doubt


def _unrecorded(top: str, file: Path) -> str:
    """Why no distribution vouches for a file, or empty."""
    owner, editable = owner_of(top, file)
    if owner is None:
        return f"no installed distribution lists {file}"
    if editable:
        return ""
    name = f"{owner.metadata['Name']} {owner.version}"
    recorded = _recorded_hash(owner.read_text("RECORD") or "", Path(str(owner.locate_file(""))), file)
    if not recorded:
        return f"the record of {name} has no hash of {file}"
    digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
    return "" if recorded == f"sha256={digest}" else f"{file} is not the file that {name} installed"


def _recorded_hash(record: str, site: Path, file: Path) -> str:
    for row in csv.reader(record.splitlines()):
        if len(row) == 3 and row[0].endswith(file.name) and (site / row[0]).resolve() == file.resolve():
            return row[1]
    return ""
