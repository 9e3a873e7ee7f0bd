"""What went red from one revision to another, and which one brought it? Pure functions of what each run said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from moonep_validate.tools.revisions import Revision

RED = ("failed", "hung", "unknown", "error", "vacuous", "not_exercised")


@dataclass(frozen=True)
class Seen:
    """What a run of one revision said.

    Attributes:
        revision: which.
        status: of the run: ``passed``, ``waived``, ``failed`` …; ``not_run`` where nothing was judged.
        checks: check -> its worst status over all cases; those that compared nothing are left out.
        reason: why nothing was judged, or what failed first.
    """

    revision: Revision
    status: str
    checks: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""

    @property
    def judged(self) -> bool:
        """Whether it is an answer at all."""
        return self.status != "not_run"

    @property
    def red(self) -> frozenset[str]:
        """The checks that went wrong; where a run went wrong without one, its status."""
        checks = frozenset(check for check, status in self.checks.items() if status in RED)
        return checks or (frozenset({self.status}) if self.status in RED else frozenset())


@dataclass(frozen=True)
class Change:
    """From one revision that was judged to the next one: checks that went red, green, or are judged no more."""

    before: Revision
    after: Revision
    red: tuple[str, ...]
    green: tuple[str, ...]
    gone: tuple[str, ...]


def changes(seen: Sequence[Seen]) -> list[Change]:
    """Between neighbours that were judged; nothing is said of a pair in which nothing changed."""
    judged = [one for one in seen if one.judged]
    found = [_change(before, after) for before, after in pairwise(judged)]
    return [one for one in found if one.red or one.green or one.gone]


def _change(before: Seen, after: Seen) -> Change:
    mended = {check for check in before.red - after.red if after.checks.get(check) or check in RED}
    gone = {*before.checks, *before.red} - {*after.checks, *after.red} - mended
    red, green, lost = (tuple(sorted(some)) for some in (after.red - before.red, mended, gone))
    return Change(before.revision, after.revision, red, green, lost)


@dataclass(frozen=True)
class Found:
    """What a bisection says.

    Attributes:
        first: the first bad revision, or None.
        suspects: revisions between the last good and the first bad one that could not be judged.
        why: what was told apart: the checks; or why nothing was found.
    """

    first: Revision | None
    suspects: tuple[Revision, ...] = ()
    why: str = ""


def bisect(good: Revision, line: Sequence[Revision], judge: Callable[[Revision], Seen]) -> Found:
    """The first revision at which checks are red that are green at ``good``.

    Args:
        good: before all others.
        line: the revisions after it, from old to new; the last one is bad.
        judge: runs one.
    """
    ends = judge(good), judge(line[-1])
    if lost := [one for one in ends if not one.judged]:
        return Found(None, why=f"{lost[0].revision.short} was not judged: {lost[0].reason}")
    wanted = ends[1].red - ends[0].red
    if not wanted:
        return Found(None, why=f"nothing is red at {line[-1].short} that is green at {good.short}")
    low, high, skipped = -1, len(line) - 1, set[int]()
    while middle := _next(low, high, skipped):
        seen = judge(line[middle - 1])
        if not seen.judged:
            skipped.add(middle - 1)
        elif wanted & seen.red:
            high = middle - 1
        else:
            low = middle - 1
    return Found(line[high], tuple(line[place] for place in range(low + 1, high)), ", ".join(sorted(wanted)))


def _next(low: int, high: int, skipped: set[int]) -> int:
    """One more than the place to try: the nearest to the middle that may be judged; 0 if there is none."""
    open_places = [place for place in range(low + 1, high) if place not in skipped]
    return 1 + min(open_places, key=lambda place: abs(2 * place - low - high)) if open_places else 0
