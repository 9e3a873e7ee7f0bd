"""Experts of the tests in this process: their state is changed here, and a pool of workers is dear."""

from __future__ import annotations

from moonep_validate.faults import parse_fault
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.subjects import experts


def job_here(name: str, *faults: str) -> Job:
    """A job that no options make: for them, such code is from outside."""
    if experts.is_own(name):
        return make_job(Options(experts=name, fault=faults))
    found = experts.find(name)
    seeded = tuple(map(parse_fault, faults))
    return Job(
        world="threads",
        faults=seeded,
        experts=name,
        experts_part=found.part,
        experts_activations=found.activations,
    )
