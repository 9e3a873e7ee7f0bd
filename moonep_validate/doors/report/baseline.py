"""What changed against an earlier outcome? New failures, and what is judged no more, make a gate fail."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from moonep_validate.doors.report.outcome import CaseTold, Evidence, Outcome, RunTold
from moonep_validate.judge.stages import PLACE
from moonep_validate.judge.verdict import LEVELS
from moonep_validate.trace.trace import TraceError

#: Kinds of changes, and what they are; the first two make a gate fail.
KINDS = {
    "new": "new failures",
    "gone": "no longer judged",
    "known": "failures that the baseline has too",
    "mended": "mended",
    "added": "new since the baseline",
    "moved": "plans and times that moved",
}
BROKEN = ("new", "gone")
_FAILURES = ("failed", "hung")
#: A run that takes so many times as long, and so many seconds more, is told; machines of CI vary.
_SLOWER, _SECONDS = 1.5, 5.0
_SHOWN = 3


@dataclass(frozen=True)
class Change:
    """What a comparison says.

    Attributes:
        lines: kind -> sentences; kinds without any are left out.
        tolerated: keys of cases that fail as they did in the baseline.
    """

    lines: dict[str, list[str]] = field(default_factory=dict)
    tolerated: frozenset[tuple[str, str]] = frozenset()

    @property
    def broken(self) -> bool:
        """Whether the gate fails by it."""
        return any(self.lines.get(kind) for kind in BROKEN)


def compare(base: Outcome, now: Outcome) -> Change:
    """Hold an outcome against an earlier one.

    Raises:
        TraceError: if they have no run in common, or the earlier one did not come to its end.
    """
    names, known = [run.name for run in now.runs], [run.name for run in base.runs]
    if base.status == "incomplete":
        raise TraceError("the baseline is of a run that was interrupted: make it anew")
    if not set(names) & set(known):
        raise TraceError(
            f"the baseline has runs {', '.join(known) or 'none'}, this gate has {', '.join(names)}: none in common"
        )
    lines: dict[str, list[str]] = {kind: [] for kind in KINDS}
    before, after = ({case.key: case for case in one.cases} for one in (base, now))
    tolerated = frozenset(key for key, case in after.items() if _same(before.get(key), case))
    whole = {run.name for run in now.runs if _whole(run, now)}
    for kind, line in (
        *_runs(base, now),
        *_failures(before, after, tolerated),
        *_missing(before, after, whole),
        *_idle(before, after),
        *_moved(before, after),
    ):
        lines[kind].append(line)
    return Change({kind: found for kind, found in lines.items() if found}, tolerated)


def pruned(outcome: Outcome) -> bytes:
    """What a later comparison needs of an outcome, one case a line: no times, findings, paths or environment."""
    runs = [
        replace(
            run,
            seconds=0.0,
            smallest="",
            evidence=[Evidence(one.level, "", "", one.stages) for one in run.evidence],
        )
        for run in outcome.runs
    ]
    cases = [_filled(replace(case, seconds=0.0, command="", problems=[], more=[])) for case in outcome.cases]
    whole = replace(outcome, runs=runs, cases=[], checks={}, times={}, baseline={}, environment={}, folders={})
    head = json.dumps(_filled(whole))[:-1]
    lines = ",\n".join(map(json.dumps, cases))
    return f'{head},\n"cases": [\n{lines}\n]}}\n'.encode()


def _filled(record: CaseTold | Outcome) -> dict[str, Any]:
    """A record without what is empty, or would be so by default."""
    return {name: value for name, value in asdict(record).items() if value or name == "exit_code"}


Cases = dict[tuple[str, str], CaseTold]
Lines = Iterator[tuple[str, str]]


def _same(old: CaseTold | None, new: CaseTold) -> bool:
    """Whether a case fails at the stage and check at which it failed before."""
    if old is None or new.status not in _FAILURES or old.status not in _FAILURES:
        return False
    return (old.status, old.stage, old.check) == (new.status, new.stage, new.check)


def _whole(run: RunTold, outcome: Outcome) -> bool:
    return sum(case.run == run.name for case in outcome.cases) == run.planned


def _runs(base: Outcome, now: Outcome) -> Lines:
    """Runs that are gone, new, of a lower level, or slower."""
    mine = {run.name: run for run in now.runs}
    for run in now.runs:
        if run.name not in {one.name for one in base.runs}:
            yield "added", f"run {run.name}"
    for old in base.runs:
        new = mine.get(old.name)
        if new is None:
            yield "gone", f"run {old.name} of the baseline did not run"
            continue
        yield from _fallen(old, new)
        if old.seconds and old.seconds * _SLOWER + _SECONDS < new.seconds:
            yield "moved", f"run {old.name}: {new.seconds:.1f} s, it took {old.seconds:.1f} s"


def _fallen(old: RunTold, new: RunTold) -> Lines:
    """Stages whose part counted for more before, together where they fell alike."""
    was, now = _levels(old), _levels(new)
    fallen: dict[tuple[str, str], list[str]] = {}
    for stage in was.keys() & now.keys():
        if now[stage] < was[stage]:
            fallen.setdefault((LEVELS[was[stage]], LEVELS[now[stage]]), []).append(stage)
    for (before, after), stages in sorted(fallen.items()):
        names = ", ".join(sorted(stages, key=PLACE.__getitem__))
        yield "gone", f"run {old.name}: the level of {names} fell from {before} to {after}"


def _levels(run: RunTold) -> dict[str, int]:
    """Stage -> place in ``LEVELS`` of the weakest part that ran there."""
    found: dict[str, int] = {}
    for part in run.evidence:
        for stage in part.stages if part.level in LEVELS else ():
            found[stage] = min(LEVELS.index(part.level), found.get(stage, len(LEVELS)))
    return found


def _failures(before: Cases, after: Cases, tolerated: frozenset[tuple[str, str]]) -> Lines:
    for key, new in after.items():
        old = before.get(key)
        if old is None and not new.gates:
            yield "added", _of(key)
        elif key in tolerated:
            yield "known", f"{_of(key)}: {new.headline}"
        elif new.gates:
            was = f"it was {old.headline if old.gates else old.status}" if old else "the baseline does not have it"
            yield "new", f"{_of(key)}: {new.headline}; {was}"
        elif old and old.gates and new.status in ("passed", "waived"):
            yield "mended", f"{_of(key)}: it was {old.headline}"
        elif old and old.status == "waived" and new.status == "passed":
            yield "mended", f"{_of(key)}: it was waived, and passes; its waiver no longer applies"


def _missing(before: Cases, after: Cases, whole: set[str]) -> Lines:
    """Cases that were judged, and are not any more; those of a run that was cut short are told by the cut."""
    for key, old in before.items():
        new = after.get(key)
        if old.status == "not_run":
            continue
        if new is None and key[0] in whole:
            yield "gone", f"{_of(key)}: the case is gone; it was {old.status}"
        elif new is not None and new.status == "not_run":
            yield "gone", f"{_of(key)}: not run ({new.reason}); it was {old.status}"


def _idle(before: Cases, after: Cases) -> Lines:
    """Checks that compared something, and events that were seen, in a case that does not fail now; but not now."""
    lost: dict[tuple[str, str], list[str]] = {}
    for key, new in after.items():
        old = before.get(key)
        if old is None or new.gates or new.status == "not_run":
            continue
        checks = [
            f"check {id} compared something, and compares nothing now" for id in _less(old.compared, new.compared)
        ]
        events = [f"event @{name} was seen, and is not seen now" for name in _less(old.events, new.events)]
        for what in checks + events:
            lost.setdefault((key[0], what), []).append(key[1])
    for (run, what), cases in sorted(lost.items()):
        more = f" and {len(cases) - _SHOWN} more" if len(cases) > _SHOWN else ""
        shown = ", ".join(cases[:_SHOWN]) + more
        yield "gone", f"run {run}: {what}, in {shown}"


def _less(before: Iterable[str], after: Iterable[str]) -> list[str]:
    return sorted(set(before) - set(after))


def _moved(before: Cases, after: Cases) -> Lines:
    """Planner figures: each with its sums over the cases that both have and in which it differs."""
    sums: dict[tuple[str, str], list[float]] = {}
    for key, new in after.items():
        old = before.get(key)
        if old is None or new.gates or old.gates:
            continue
        was, now = _figures(old), _figures(new)
        for name in was.keys() & now.keys():
            if was[name] != now[name]:
                total = sums.setdefault((key[0], name), [0.0, 0.0, 0])
                total[:] = total[0] + was[name], total[1] + now[name], total[2] + 1
    for (run, name), (first, second, count) in sorted(sums.items()):
        yield "moved", f"run {run}: {name.replace('_', ' ')} from {first:g} to {second:g} in {count:.0f} cases"


def _figures(case: CaseTold) -> dict[str, float]:
    """Figures of a plan, one number each; the fullest rank for rows, sums for the others."""
    balance = {name: float(max(v) if name == "rows" else sum(v)) for name, v in case.balance.items() if v}
    return {**case.measures, **{f"plan_{name}": value for name, value in balance.items()}}


def _of(key: Sequence[str]) -> str:
    return f"{key[0]} {key[1]}"
