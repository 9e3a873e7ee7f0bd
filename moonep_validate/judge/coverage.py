"""At which stages did a case call something, and at which of them did a check compare anything?

F1 says what was called. A stage whose calls returned, and at which no gating check compared a value although the
recording would have allowed it, is bare: whatever was neutral there must not look like a pass. ``life`` is left
out, since F1 is what its calls promise, and ``load``, since only an engine's loader has a check of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from moonep_validate.cases.case import Case
from moonep_validate.judge.registry import CHECKS, Check, step_checks
from moonep_validate.judge.stages import STAGES
from moonep_validate.judge.verdict import Result
from moonep_validate.trace.recording import Recording

_NOT_DEMANDED = ("life", "load")


def called(results: Iterable[Result]) -> list[str]:
    """Stages whose calls returned on every rank, in order; a plan is made by dispatch."""
    returned = {r.stage for r in results if r.status == "passed" and CHECKS[r.check].kind == "returns"}
    return [stage for stage in STAGES if stage in returned or (stage == "plan" and "dispatch" in returned)]


def compared(results: Iterable[Result]) -> list[str]:
    """Stages at which a gating check compared a value, in order; that a call returned, or a form, is none."""
    having = {r.stage for r in results if r.gates and r.examined and _of_values(CHECKS[r.check])}
    return [stage for stage in STAGES if stage in having]


def proven(results: Iterable[Result], recording: Recording) -> tuple[list[str], list[str]]:
    """Stages at which values were compared: those where the recording reaches every check, and the others.

    A stage with a known defect, or of which something is unknown, is in neither.
    """
    results = list(results)
    doubtful = {r.stage for r in results if r.gates and r.status in ("waived", "unknown", "failed", "hung")}
    stages = [stage for stage in compared(results) if stage not in doubtful]
    withheld = _withheld(recording)
    return [s for s in stages if s not in withheld], [s for s in stages if s in withheld]


def _withheld(recording: Recording) -> set[str]:
    """Stages some of whose checks need more than what was kept."""
    return {check.stage for check in step_checks() if _of_values(check) and not recording.reaches(check.needs)}


def _of_values(check: Check) -> bool:
    return check.kind != "returns" and not check.about_form


def bare(case: Case, results: Iterable[Result], recording: Recording) -> list[str]:
    """Stages that were called and not judged, although what was kept would have been enough.

    A layer that was given no token at all has nothing to compare.
    """
    results = list(results)
    empty = () if any(case.token_count(rank) for rank in range(case.R)) else ("layer",)
    judged = {*compared(results), *_withheld(recording), *_NOT_DEMANDED, *empty}
    return [stage for stage in called(results) if stage not in judged]
