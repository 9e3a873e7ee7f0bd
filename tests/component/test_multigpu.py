"""Multi-GPU tier: the profile ``multigpu`` on ranks that these tests start themselves, a GPU for each.

Run it with ``pytest -m multigpu``; under ``--require-gpus N`` a case of up to N ranks that is skipped for want of
GPUs is an error.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moonep_validate.cases.case import Case
from moonep_validate.cases.profiles import profile
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.run import run_case
from moonep_validate.pipeline.selection import select_cases

JOB = make_job(Options(world="processes", device="cuda", deadline=60.0))
CASES = select_cases(JOB, profile("multigpu"), None)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=pytest.mark.multigpu(case.R)) for case in CASES]
)
def test_case(case: Case, moonep_gpus: Callable[[int], list[str]]) -> None:
    assert len(moonep_gpus(case.R)) == case.R
    _, verdict = run_case(JOB, case)
    assert verdict.ok, verdict.diagnosis
