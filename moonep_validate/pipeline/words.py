"""What does a rank say of the code from outside that it ran? What it imported, and if that ran our reference."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.target import Engine, Module
from moonep_validate.reference.used import USED
from moonep_validate.subjects import experts
from moonep_validate.subjects.engines import start as engines
from moonep_validate.subjects.vouch import word_on
from moonep_validate.trace.trace import Part, Said
from moonep_validate.worlds.integrity import replaced


def used() -> Counter[str]:
    """How often the reference ran in this process so far; give it to ``words``."""
    return Counter(USED)


def words(job: Job, before: Counter[str]) -> list[Said]:
    """This rank's word on each part that it imported for the case that it has just run."""
    return list(_words(job, USED - before))


def _words(job: Job, ran: Counter[str]) -> Iterator[Said]:
    if isinstance(job.target, Module) and (module := sys.modules.get(job.target.name)):
        yield word_on(job.target.part.package, module, (getattr(module, "Buffer", None),), bool(ran["buffer"]))
    if isinstance(job.target, Engine):
        engine, moonep = engines.parts_here(job.target.name)
        yield _same(engine, bool(ran["experts"]))
        yield _same(moonep, bool(ran["buffer"]))
    if job.experts != experts.DEFAULT:
        yield _same(experts.find(job.experts).part, bool(ran["experts"]))


def _same(part: Part, reference: bool) -> Said:
    return Said(part.package, part.file, part.digest, reference)


def tampered(job: Job) -> list[str]:
    """What the suite has to say where code from outside has replaced some of it in this process."""
    foreign = not job.target.kind.embedded or not experts.is_own(job.experts)
    names = replaced() if foreign else ""
    return [f"code of this suite was replaced in the process of this rank: {names}"] if names else []
