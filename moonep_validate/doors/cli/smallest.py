"""How can a failure of a run be seen again? The smallest case that fails alone, else the cases that it needs.

What is printed was tried in new workers: a case may fail only because of what the cases before it left behind.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.doors.cli.options import console
from moonep_validate.doors.report.summary import Summary, first_failures
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.run import run_case
from moonep_validate.studies.shrink import shrink, shrink_sequence, signature
from moonep_validate.worlds.processes import close_pools


def show_smallest(summary: Summary, job: Job, seconds: float) -> None:
    """Print how the first failure of a run can be had again, and which of other kinds do not repeat alone.

    Failures that wait for a deadline each time are left out.
    """
    failures = [verdict for verdict in first_failures(summary.verdicts) if verdict.status == "failed"]
    if not failures:
        return
    failed = failures[0]
    with console.status("looking for the smallest failing case"):
        text = _alone(job, failed, seconds) or _after_others(job, failed, summary.verdicts, seconds)
        others = _others(job, failures[1:], seconds)
    summary.smallest = text, str(failed.case)
    for line in (text, *others):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _others(job: Job, failures: Sequence[Verdict], seconds: float) -> list[str]:
    """Which failures of other kinds do not repeat alone, and which were not tried; their commands were printed."""
    until, lone, untried = time.monotonic() + seconds, [], []
    for verdict in failures:
        if time.monotonic() > until:
            untried.append(str(verdict.case))
        elif signature(_in_new_workers(job, [verdict.case])) != signature(verdict):
            lone.append(str(verdict.case))
    told = {"not reproduced alone": lone, "not run again by itself, for lack of time (--shrink-seconds)": untried}
    return [f"{what}: {', '.join(cases)}" for what, cases in told.items() if cases]


def _alone(job: Job, failed: Verdict, seconds: float) -> str:
    """The smallest case that fails by itself in the same way; empty if the case, run once more, does not."""
    if signature(_in_new_workers(job, [failed.case])) != signature(failed):
        return ""
    try:
        smallest = shrink(failed.case, lambda one: run_case(job, one)[1], seconds)
    except CaseError:  # it fails now and then
        return ""
    case, tried = smallest.case, f"{smallest.tried} candidates tried"
    if case != failed.case and signature(_in_new_workers(job, [case])) != signature(failed):
        case, tried = failed.case, f"{tried}, but the smallest of them fails in used workers only"
    return f"smallest failing case ({tried}):\n  {_command(job, [case])}"


def _after_others(job: Job, failed: Verdict, verdicts: Sequence[Verdict], seconds: float) -> str:
    """The fewest cases of the run that must come before it."""
    place = next(index for index, verdict in enumerate(verdicts) if verdict is failed)
    ran = [verdict.case for verdict in verdicts[:place] if verdict.status != "not_run"]
    shared = [case for case in ran if job.runs_in == "threads" or case.R == failed.case.R]
    wanted = signature(failed)
    assert wanted is not None
    found = shrink_sequence(shared, failed.case, wanted, lambda cases: _in_new_workers(job, cases), seconds)
    text = "not reproduced alone: it needs the cases before it in the same workers"
    if not found.repeated:
        over = "" if found.complete else f", of which the {found.tried} shortest ends were tried"
        text = f"not reproduced alone, nor behind the {len(shared)} cases before it in new workers{over}"
    return f"{text} ({found.tried} sequences tried):\n  {_command(job, found.cases)}"


def _in_new_workers(job: Job, cases: Sequence[Case]) -> Verdict:
    """The verdict on the last of some cases that run in order in workers of their own."""
    close_pools()
    return [run_case(job, case)[1] for case in cases][-1]


def _command(job: Job, cases: Sequence[Case]) -> str:
    return " ".join(["moonep-validate run", *(f"--case '{case}'" for case in cases), job.reproducer]).rstrip()
