"""Which failures are known? A list of defects of engines that keeps a gate usable until they are mended.

A waiver names a check, cases, steps and versions, says where the defect is described, and expires. What it covers
is reported as ``waived``, beside the passes and never among them; where it covers nothing any more, the gate
fails, so that the list cannot outlive the defect.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
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
from moonep_validate.judge.verdict import Result, Verdict
from moonep_validate.trace.trace import Part

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

#: The defects that we know of, found by this suite (docs/found.md).
SHIPPED = Path(__file__).with_name("waivers.toml")


@dataclass(frozen=True)
class Waiver:
    """One known defect.

    Attributes:
        subject: package whose version counts, e.g. ``vllm``.
        checks: ids of the checks that fail by it.
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
        data = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CaseError(f"waivers {path} cannot be read: {error}") from None
    entries = data.get("waiver", [])
    if (
        not set(data) <= {"waiver"}
        or not isinstance(entries, list)
        or not all(isinstance(e, dict) for e in entries)
    ):
        raise CaseError(f"waivers {path}: tables [[waiver]] are needed, and nothing else")
    return [_waiver(entry, f"waivers {path}, entry {number}") for number, entry in enumerate(entries, start=1)]


def _waiver(entry: dict[str, Any], where: str) -> Waiver:
    known = {one.name for one in fields(Waiver)}
    needed = {"subject", "checks", "link", "expires"}
    if unknown := set(entry) - known:
        raise CaseError(f"{where} has {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    if missing := needed - set(entry):
        raise CaseError(f"{where} lacks {', '.join(sorted(missing))}")
    if type(entry["expires"]) is not date:
        raise CaseError(f"{where}: expires is {entry['expires']!r}, a date such as 2027-06-30 is needed")
    for name in ("subject", "link", "case", "step", "versions"):
        if not isinstance(entry.get(name, ""), str):
            raise CaseError(f"{where}: {name} is {entry[name]!r}, a text is needed")
    checks = entry["checks"]
    if not isinstance(checks, list) or not all(one in CHECKS for one in checks):
        raise CaseError(f"{where}: checks is {checks!r}, a list of ids of checks is needed, such as ['F1', 'Z1']")
    try:
        versions = SpecifierSet(entry.get("versions", ""))
    except InvalidSpecifier as error:
        raise CaseError(f"{where}: {error}") from None
    entry = {**entry, "case": renewed(entry.get("case", "*"))}
    return Waiver(**{**entry, "checks": tuple(entry["checks"]), "versions": versions})


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
        if not _applies(waiver, verdict, engine, today):
            continue
        covered = [i for i, result in enumerate(results) if waiver.covers(result)]
        bad = [i for i in covered if results[i].status in ("failed", "hung")]
        for i in bad:
            results[i] = replace(results[i], status="waived", reason=f"known: {waiver.link}")
        if covered and not bad:
            reason = f"a waiver expects a failure here ({waiver.link}), and nothing failed: remove the waiver"
            results[covered[0]] = replace(results[covered[0]], status="failed", reason=reason)
    return replace(verdict, results=results)


def _applies(waiver: Waiver, verdict: Verdict, engine: Part, today: date) -> bool:
    package = engine.package.partition(".")[0]
    if waiver.subject != package or today >= waiver.expires or not fnmatchcase(str(verdict.case), waiver.case):
        return False
    try:
        return Version(engine.version) in waiver.versions
    except InvalidVersion:
        return not str(waiver.versions)
