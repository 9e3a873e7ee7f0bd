"""What is the answer? Statuses, findings, results and the verdict of one case.

The verdict is the worst gating status. ``not_applicable`` and ``not_run`` are neutral; ``waived`` is a known
failure (waivers.py), and no pass; ``vacuous`` means that nothing was examined, or that an event which the case
exists for did not occur.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from moonep_validate.cases.case import Case
from moonep_validate.judge.registry import CHECKS, said
from moonep_validate.judge.stages import PLACE
from moonep_validate.trace.trace import Part

#: What a result can count as, from weakest to strongest (docs/architecture.md, Statuses and levels).
LEVELS = ("stand-in", "reference", "unverified", "patched", "real")

_SHOWN = 8

#: The check id of a result that says why nothing ran.
NO_CHECK = "-"

#: From neutral to worst, each with its process exit code. pytest owns 0 to 6.
EXIT_CODES = {
    "not_applicable": 0,
    "not_run": 0,
    "passed": 0,
    "waived": 0,
    "vacuous": 10,
    "not_exercised": 11,
    "unknown": 12,
    "failed": 1,
    "hung": 13,
    "error": 14,
}
_BADNESS = {status: place for place, status in enumerate(EXIT_CODES)}


def worst(statuses: list[str]) -> str:
    """The worst of some statuses; ``not_run`` for none."""
    return max(statuses, key=_BADNESS.__getitem__, default="not_run")


@dataclass(frozen=True)
class Finding:
    """One difference between what was promised and what was seen.

    Attributes:
        what: the thing that differs, e.g. ``rows per rank``.
        place: where the first (or worst) difference is: rank, row, token, expert, ...
        expected, actual: both values there, as text.
        count: how many elements differ.
        spread: where they all lie, see spread.py; None where nobody could tell.
    """

    what: str
    place: Mapping[str, int]
    expected: str
    actual: str
    count: int = 1
    spread: Mapping[str, Any] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        where = ", ".join(f"{axis.replace('_', ' ')} {index}" for axis, index in self.place.items())
        more = f" ({self.count} elements differ)" if self.count > 1 else ""
        return f"{self.what}{' at ' + where if where else ''}: expected {self.expected}, got {self.actual}{more}"


@dataclass(frozen=True)
class Result:
    """One check on one step.

    Attributes:
        level: of the part that owns the stage, one of ``LEVELS``.
        gates: whether it counts for the verdict; otherwise it is information.
        reason: why it did not run, or what the checker stumbled over.
    """

    check: str
    stage: str
    step: str
    status: str
    level: str
    examined: int = 0
    findings: tuple[Finding, ...] = ()
    gates: bool = True
    reason: str = ""


@dataclass(repr=False)
class Verdict:
    """The answer for one case.

    Attributes:
        results: in pipeline order.
        witnesses: how often each known event occurred.
        vacuous: reasons why a pass would mean nothing.
        absent: those of them that only say what did not happen, which a call that did not return explains.
        measures: quality figures, never a status.
        errors: errors of the suite itself.
        autopsy: what is known of the ranks where a case did not come to its end.
        recording: how much of each tensor was recorded, see trace/recording.py.
        override: a status that the run adds, e.g. ``not_exercised``.
        balance: what the plan of the first step does to each rank, see measures.py.
        seconds: that recording and judging took, where somebody measured it.
    """

    case: Case
    parts: Mapping[str, Part]
    results: list[Result]
    witnesses: dict[str, int] = field(default_factory=dict)
    vacuous: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    measures: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    autopsy: Mapping[str, Any] = field(default_factory=dict)
    reproducer: str = ""
    recording: str = "full"
    override: str | None = None
    balance: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def __repr__(self) -> str:
        return f"<Verdict {self.status} {self.case}>"

    @property
    def status(self) -> str:
        """The worst gating status."""
        statuses = [result.status for result in self.results if result.gates]
        statuses += ["vacuous"] * bool(self.vacuous) + ["error"] * bool(self.errors)
        return worst(statuses + ([self.override] if self.override else []))

    @property
    def ok(self) -> bool:
        """Whether nothing new is wrong; ``vacuous``, ``unknown`` and ``not_run`` are no pass."""
        return self.status in ("passed", "waived")

    @property
    def level(self) -> str:
        """The weakest level among the parts."""
        levels = {part.level for part in self.parts.values()}
        return next((level for level in LEVELS if level in levels), "none")

    @property
    def first(self) -> Result | None:
        """The result that names the broken stage: in the first step that went wrong, the earliest stage.

        A difference that was seen, in whatever step, comes before an answer that is unknown: taps of an early step
        are missing because their rank was lost in a later one.
        """
        bad = [r for r in self.results if r.gates and r.status in ("failed", "hung", "unknown")]
        steps = list(dict.fromkeys(result.step for result in self.results))
        order = lambda r: (r.status == "unknown", steps.index(r.step), PLACE[r.stage], -_BADNESS[r.status])  # noqa: E731
        return min(bad, key=order, default=None)

    @property
    def command(self) -> str:
        """The one-line command that runs this case again, or judges what cannot run again."""
        if self.case.refusal:
            return "moonep-validate check FOLDER"
        return " ".join(f"moonep-validate run --case '{self.case}' {self.reproducer}".split())

    @property
    def diagnosis(self) -> str:
        """A few lines: what is wrong, where, and how to reproduce it."""
        lines = [f"{self.status}: {self.case}"]
        if first := self.first:
            where = f"at stage {first.stage} (check {said(first.check)}, step {first.step})"
            lines[0] = f"{first.status} {where}: {self.case}"
            lines += [f"  {finding}" for finding in first.findings[:4]]
            lines += [f"  {first.reason}"] if first.reason else []
            lines += self._elsewhere(first)
        lines += self._ranks()
        lines += [f"  vacuous: {reason}" for reason in self.vacuous]
        lines += [f"  error of the suite: {error}" for error in self.errors]
        return "\n".join([*lines, f"  reproduce: {self.command}"])

    def _elsewhere(self, first: Result) -> list[str]:
        """One line for each other step that went wrong by itself: what follows in a broken step says little."""
        seen, lines = {first.step}, []
        for result in self.results:
            if result.gates and result.status in ("failed", "hung", "unknown") and result.step not in seen:
                seen.add(result.step)
                what = str(result.findings[0]) if result.findings else result.reason
                lines.append(f"  also {CHECKS.get(result.check, result.check)}: {what}")
        return lines[:_SHOWN] + [f"  and {len(lines) - _SHOWN} more steps"] * (len(lines) > _SHOWN)

    def _ranks(self) -> list[str]:
        """One line for each rank of an autopsy."""
        ranks = self.autopsy.get("ranks", [])
        lines = [
            f"  rank {one['rank']}: {one['state']}; last completed: {one['completed']}; "
            f"last collective: #{one['collective']}"
            for one in ranks
        ]
        return lines[:_SHOWN] + [f"  and {len(ranks) - _SHOWN} more ranks"] * (len(ranks) > _SHOWN)

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON data."""
        first = self.first
        known = CHECKS.get(first.check) if first else None
        return {
            "case": str(self.case),
            "status": self.status,
            "level": self.level,
            "stage": first.stage if first else None,
            "check": first.check if first else None,
            "name": known.name if known else None,
            "promise": known.promise if known else None,
            "command": self.command,
            "recording": self.recording,
            "results": [asdict(result) for result in self.results],
            "witnesses": self.witnesses,
            "vacuous": self.vacuous,
            "measures": self.measures,
            "balance": self.balance,
            "seconds": round(self.seconds, 3),
            "errors": self.errors,
            "autopsy": self.autopsy,
            "parts": {stage: asdict(part) for stage, part in self.parts.items()},
        }
