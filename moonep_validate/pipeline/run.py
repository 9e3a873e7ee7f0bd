"""Record a case on a subject and judge the trace. Nothing else runs cases.

``run_case`` joins the two; the CLI, pytest, the shrinker, search and the benchmark are loops over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date

import torch

from moonep_validate.cases.case import Case
from moonep_validate.judge.verdict import Verdict
from moonep_validate.judge.waivers import waive, waivers_of
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.judge import judge
from moonep_validate.pipeline.record import record
from moonep_validate.trace.trace import Trace


def run_case(job: Job, case: Case, exercised: bool = True) -> tuple[Trace, Verdict]:
    """Record and judge; a fault that changed no recorded byte makes the verdict ``not_exercised``.

    Args:
        job: where and on whom.
        case: what.
        exercised: whether to look for that, which costs a second run of the case.
    """
    with _one_torch_thread():
        trace = record(job, case)
        verdict = judge(trace)
        if (part := job.target.known_by) and not trace.not_run:
            verdict = waive(verdict, waivers_of(job.waivers), part, date.today())
        if job.faults and exercised and verdict.ok:
            clean = record(replace(job, faults=()), case)
            verdict.override = "not_exercised" if clean.digest() == trace.digest() else None
    return trace, verdict


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """On tensors this small, several threads cost up to 15 times as much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
