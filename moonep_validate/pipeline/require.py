"""Does what really runs meet the demands of a gate (``--require STAGE=PACKAGE``)?"""

from __future__ import annotations

from collections.abc import Sequence

from moonep_validate.cases.case import CaseError
from moonep_validate.judge.stages import STAGES, owned_by
from moonep_validate.pipeline.job import Job
from moonep_validate.subjects.provenance import describe

#: Groups of stages that a gate can ask for by one name.
GROUPS = {
    "transport": owned_by("moonep"),
    "loader": ("load",),
    "engine": owned_by("engine"),
}


def unmet(job: Job, wanted: Sequence[str]) -> list[str]:
    """Which demands on what really runs are not met, one sentence each.

    Args:
        job: what would run.
        wanted: ``STAGE=PACKAGE``, where STAGE is a stage or one of ``GROUPS``; commas separate several.

    Raises:
        CaseError: for a demand that is not of this form.
    """
    parts, found = job.subject.parts, []
    for demand in (one for text in wanted for one in text.split(",")):
        stage, equals, package = demand.partition("=")
        if not (equals and package) or stage not in (*GROUPS, *STAGES):
            known = ", ".join((*GROUPS, *STAGES))
            raise CaseError(f"--require {demand}: write STAGE=PACKAGE, where STAGE is one of {known}")
        for part in dict.fromkeys(parts[name] for name in GROUPS.get(stage, (stage,))):
            if job.not_run:
                found.append(f"--require {demand} is not met: {job.not_run}")
            elif part.origin != "real" or package not in part.package.split("."):
                found.append(f"--require {demand} is not met: {part.origin} {describe(part)} would run")
    return found
