"""Which failures are known? A list of defects of engines that keeps a gate usable until they are mended.

A waiver names a check, cases, steps and versions, says where the defect is described, and expires. What it covers
is reported as ``waived``, beside the passes and never among them; where it covers nothing any more, the gate
fails, so that the list cannot outlive the defect.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from moonep_validate.cases.case import CaseError
from moonep_validate.cases.grammar import renewed
from moonep_validate.judge.checks import CHECKS
from moonep_validate.judge.checks.life import RETURNS
from moonep_validate.judge.verdict import Result, Verdict
from moonep_validate.trace.schema import SchemaError, build, decoded, parsed, read_bytes
from moonep_validate.trace.trace import Part

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

#: The defects that we know of, found by this suite (docs/found.md).
SHIPPED = Path(__file__).with_name("waivers.toml")
#: Invariants of docs/formats.md that a loader can break, beside the checks of cases.
LOADED = ("Y8", "Y11", "Y13")
#: Bytes of a file and characters of a line: TOML parsers need minutes for a key of ten thousand dots.
MAX_BYTES, MAX_LINE = 2**17, 1000


@dataclass(frozen=True)
class Waiver:
    """One known defect.

    Attributes:
        subject: package whose version counts, e.g. ``vllm``.
        checks: ids of the checks that fail by it, or of ``LOADED``.
        case, step: globs.
        versions: a version specifier, e.g. ``>=0.32,<0.34``; empty for all.
        link: where it is described, a public address or a place in docs/.
        expires: day from which it counts no more.
    """

    subject: str
    checks: tuple[str, ...]
    link: str
    expires: date
    case: str = "*"
    step: str = "*"
    versions: SpecifierSet = field(default_factory=SpecifierSet)

    def covers(self, result: Result) -> bool:
        """Whether it is about this result."""
        return result.check in self.checks and fnmatchcase(result.step, self.step)


@dataclass(frozen=True)
class _Entry:
    """A waiver as TOML has it."""

    subject: str
    checks: tuple[str, ...]
    link: str
    expires: date
    case: str = "*"
    step: str = "*"
    versions: str = ""


@lru_cache(maxsize=4)
def waivers_of(path: str | None) -> list[Waiver]:
    """What a file lists; None is the list that ships with the suite, an empty text is none.

    Raises:
        CaseError: see ``read_waivers``.
    """
    return [] if path == "" else read_waivers(SHIPPED if path is None else Path(path))


def read_waivers(path: Path) -> list[Waiver]:
    """Read a TOML file with tables ``[[waiver]]``.

    Raises:
        CaseError: if it cannot be read, or an entry lacks something, has something unknown, or makes no sense.
    """
    try:
        text = decoded(read_bytes(path, MAX_BYTES))
        if max(map(len, text.splitlines()), default=0) > MAX_LINE:
            raise SchemaError(f"has a line of more than {MAX_LINE} characters")
        data = parsed(text, tomllib.loads)
    except (OSError, SchemaError) as error:
        raise CaseError(f"waivers {path} cannot be read: {error}") from None
    entries = data.get("waiver", [])
    if not set(data) <= {"waiver"} or not isinstance(entries, list):
        raise CaseError(f"waivers {path}: tables [[waiver]] are needed, and nothing else")
    return [_waiver(entry, f"waivers {path}, entry {number}") for number, entry in enumerate(entries, start=1)]


def _waiver(data: Any, where: str) -> Waiver:
    try:
        entry = build(_Entry, data, where)
        versions = SpecifierSet(entry.versions)
    except SchemaError as error:
        raise CaseError(str(error)) from None
    except InvalidSpecifier as error:
        raise CaseError(f"{where}: {error}") from None
    if unknown := [check for check in entry.checks if check not in CHECKS and check not in LOADED]:
        raise CaseError(f"{where}: checks has {unknown[0]!r}, ids of checks are needed, such as ['F1', 'Z1']")
    case = renewed(entry.case)
    return Waiver(entry.subject, entry.checks, entry.link, entry.expires, case, entry.step, versions)


def waive(verdict: Verdict, waivers: Sequence[Waiver], engine: Part, today: date) -> Verdict:
    """The verdict with known failures marked ``waived``, and with a failure for each waiver that covers none.

    Args:
        verdict: of a case that ran.
        waivers: all that were given.
        engine: the part whose version decides.
        today: the day that ``expires`` is compared with.
    """
    results = list(verdict.results)
    for waiver in waivers:
        if not _applies(waiver, str(verdict.case), engine, today):
            continue
        covered = [i for i, result in enumerate(results) if waiver.covers(result)]
        bad = [i for i in covered if results[i].status in ("failed", "hung")]
        for i in bad:
            results[i] = replace(results[i], status="waived", reason=f"known: {waiver.link}")
        if covered and not bad:
            reason = f"a waiver expects a failure here ({waiver.link}), and nothing failed: remove the waiver"
            results[covered[0]] = replace(results[covered[0]], status="failed", reason=reason)
    return _explained(replace(verdict, results=results))


def _explained(verdict: Verdict) -> Verdict:
    """Without the absent events, if a known defect ended every pass of the case before they could occur."""
    passes = {r.step for r in verdict.results if r.check == RETURNS.id and r.stage not in ("life", "load")}
    ended = {r.step for r in verdict.results if r.check == RETURNS.id and r.status == "waived"}
    if not passes or not passes <= ended:
        return verdict
    return replace(verdict, vacuous=[reason for reason in verdict.vacuous if reason not in verdict.absent])


def known(waivers: Sequence[Waiver], engine: Part, name: str, check: str, today: date) -> Waiver | None:
    """The waiver of a loader's variant, if there is one.

    Args:
        waivers, engine, today: as for ``waive``.
        name: of the variant; what a waiver calls ``case``.
        check: an invariant of docs/formats.md.
    """
    mine = (waiver for waiver in waivers if check in waiver.checks and _applies(waiver, name, engine, today))
    return next(mine, None)


def _applies(waiver: Waiver, case: str, engine: Part, today: date) -> bool:
    package = engine.package.partition(".")[0]
    if waiver.subject != package or today >= waiver.expires or not fnmatchcase(case, waiver.case):
        return False
    try:
        return Version(engine.version) in waiver.versions
    except InvalidVersion:
        return not str(waiver.versions)
