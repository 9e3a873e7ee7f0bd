"""Which subject does a job judge?"""

from __future__ import annotations

from functools import lru_cache

from moonep_validate.pipeline.job import Job
from moonep_validate.subjects import REFERENCE, Subject, module_subject, subject_with_experts
from moonep_validate.subjects.engines import start as engines
from moonep_validate.subjects.experts import DEFAULT
from moonep_validate.trace.trace import Part


@lru_cache(maxsize=8)
def _engine_subject(
    engine: str, part: Part | None, engine_part: Part | None, not_run: str | None, device: str
) -> Subject:
    return engines.engine_subject(engine, part, engine_part, not_run, device)


@lru_cache(maxsize=8)
def _module_subject(
    module: str, generation: str, part: Part, relaxed: bool, destructive: bool, device: str
) -> Subject:
    return module_subject(module, generation, part, relaxed, destructive, device)


def subject_of(job: Job) -> Subject:
    """The subject of a job."""
    subject = _subject_of(job)
    if job.engine is not None or job.experts == DEFAULT:
        return subject
    return subject_with_experts(subject, job.experts, job.experts_part, job.not_run)


def _subject_of(job: Job) -> Subject:
    if job.engine is not None:
        return _engine_subject(job.engine, job.part, job.engine_part, job.not_run, job.device)
    if job.module is None:
        return REFERENCE
    assert job.generation is not None
    assert job.part is not None
    return _module_subject(job.module, job.generation, job.part, job.relaxed, job.destructive, job.device)
