"""Which cases does a job run, in which order, and are there GPUs for them?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.pipeline.job import Job


def buffer_key(case: Case) -> tuple[object, ...]:
    """What a Buffer is built for, and its kernels compiled: cases with one key share that cost in a worker."""
    return (case.R, case.generation, case.E, case.K, case.S, case.H, case.I, case.slots, case.pad)


def too_few_gpus(job: Job, ranks: int) -> str | None:
    """Why a case of so many ranks cannot run on the GPUs of this host, or None."""
    if job.device != "cuda" or job.world == "torchrun" or (found := torch.cuda.device_count()) >= ranks:
        return None
    return f"--device cuda needs a GPU for each of {ranks} ranks; torch sees {found}"


def select_cases(job: Job, cases: Sequence[Case], ranks: int | None, keep_order: bool = False) -> list[Case]:
    """The cases of so many ranks; for a world of processes those of one Buffer key together.

    Args:
        job: what will run.
        cases: to choose from.
        ranks: how many, or None for all.
        keep_order: leave the order as it is.

    Raises:
        CaseError: if there are none, or fewer GPUs than ranks; it says how many there are.
    """
    chosen = [case for case in cases if ranks in (None, case.R)]
    if not chosen:
        known = ", ".join(map(str, sorted({case.R for case in cases}))) or "none"
        raise CaseError(f"--ranks {ranks}: no case has R={ranks}; there are cases of R = {known}")
    if ranks is not None and (reason := too_few_gpus(job, ranks)):
        raise CaseError(reason)
    if keep_order or job.runs_in == "threads":
        return chosen
    return sorted(chosen, key=lambda case: tuple(map(str, buffer_key(case))))
