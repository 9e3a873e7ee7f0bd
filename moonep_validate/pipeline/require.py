"""Does what really runs meet the demands of a gate (``--require STAGE=PACKAGE``)?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moonep_validate.cases.case import CaseError
from moonep_validate.judge.stages import STAGES, owned_by
from moonep_validate.pipeline.job import Job
from moonep_validate.trace.provenance import describe, kind_of
from moonep_validate.trace.trace import Part

#: Groups of stages that a gate can ask for by one name.
GROUPS = {
    "transport": owned_by("moonep"),
    "loader": ("load",),
    "engine": owned_by("engine"),
}
#: Levels of a package that is what it says it is; in ``patched`` the named seams were replaced.
_MET = ("real", "patched")


def unmet(job: Job, wanted: Sequence[str]) -> list[str]:
    """Which demands on what really runs are not met, one sentence each.

    Args:
        job: what would run.
        wanted: ``STAGE=PACKAGE``, where STAGE is a stage or one of ``GROUPS``; commas separate several.

    Raises:
        CaseError: for a demand that is not of this form.
    """
    return unmet_by(job.subject.parts, wanted, job.not_run)


def unmet_by(parts: Mapping[str, Part], wanted: Sequence[str], not_run: str | None = None) -> list[str]:
    """The same of parts, as a run has found them: what ranks say can lower them.

    Args:
        parts: stage -> part.
        wanted: see ``unmet``.
        not_run: why nothing can run, or None.
    """
    found = []
    for demand, stage, package in demands(wanted):
        for part in dict.fromkeys(parts[name] for name in GROUPS.get(stage, (stage,))):
            if not_run:
                found.append(f"--require {demand} is not met: {not_run}")
            elif part.level not in _MET or package not in part.package.split("."):
                why = f" ({'; '.join(part.doubts)})" if part.doubts else ""
                found.append(f"--require {demand} is not met: {kind_of(part)} {describe(part)} would run{why}")
    return found


def demands(wanted: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Each demand as it was written, its stage or group, and its package.

    Raises:
        CaseError: for a demand that is not of this form.
    """
    for demand in (one for text in wanted for one in text.split(",")):
        stage, equals, package = demand.partition("=")
        if not (equals and package) or stage not in (*GROUPS, *STAGES):
            known = ", ".join((*GROUPS, *STAGES))
            raise CaseError(f"--require {demand}: write STAGE=PACKAGE, where STAGE is one of {known}")
        yield demand, stage, package
