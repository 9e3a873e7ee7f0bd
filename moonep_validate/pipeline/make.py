"""Which job do a user's options name? A module or an engine is asked here what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from moonep_validate.cases.case import CaseError
from moonep_validate.faults import parse_fault
from moonep_validate.judge.waivers import waivers_of
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.kinds import kind_name, refuse
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.target import Engine, Module, relaxed_environment
from moonep_validate.subjects.engines import path as paths
from moonep_validate.subjects.engines import start as engines
from moonep_validate.subjects.experts import DEFAULT
from moonep_validate.subjects.experts import identify as identify_experts
from moonep_validate.subjects.identify import identify
from moonep_validate.trace.recording import Recording
from moonep_validate.trace.trace import Part
from moonep_validate.worlds import processes


def make_job(options: Options | None = None) -> Job:
    """The job that the options name, those of defaults if there are none.

    Raises:
        CaseError: for an unknown fault or subject, options that exclude each other, a module that cannot be
            judged, an engine whose calls do not fit the ``moonep`` that it would get, or one that does not lie
            where ``--engine-path`` says.
    """
    options = options or Options()
    faults = tuple(parse_fault(text) for text in options.fault)
    recording = str(Recording.parse(options.record))
    refuse(options)
    waivers = "" if options.waivers == "none" else options.waivers
    return _MAKERS[kind_name(options)](
        options,
        Job(
            world=options.world,
            device=options.device or "cpu",
            faults=faults,
            deadline=options.deadline,
            recording=recording,
            waivers=waivers,
        ),
    )


def _reference(options: Options, job: Job) -> Job:
    world = job.world or ("processes" if job.device == "cuda" else None)
    return _with_experts(replace(job, world=world), options.experts)


def _module(options: Options, job: Job) -> Job:
    assert options.moonep_module is not None
    environment = relaxed_environment(options.relaxed) | engines.on_device(job.device)
    generation, part = identify(options.moonep_module, options.api, options.policy, environment)
    target = Module(
        options.moonep_module,
        generation,
        part,
        api=options.api,
        policy=options.policy,
        relaxed=options.relaxed,
        destructive=options.destructive,
    )
    return _with_experts(replace(job, target=target), options.experts)


def _with_experts(job: Job, name: str) -> Job:
    """Ask a part for the experts what it is; one that cannot run here makes every case not run."""
    if name == DEFAULT:
        return job
    found = identify_experts(name, job.environment)
    known = replace(job, experts=name, experts_part=found.part, experts_activations=found.activations)
    return replace(known, not_run=found.reason or job.not_run)


def _engine(options: Options, job: Job) -> Job:
    """Ask an engine what it is: import and initialise it in a pool of two ranks, which the cases then use."""
    waivers_of(job.waivers)  # a bad file is said before anything starts
    device = options.device or ("cuda" if torch.cuda.device_count() > 1 else "cpu")
    name, path = options.subject, options.engine_path
    if path and (wrong := paths.misses(path, engines.declared(name).package)):
        raise CaseError(wrong)
    target = Engine(name, engines.declared(name).generations, path)
    job = replace(job, target=target, device=device)
    if device == "cuda" and (found := torch.cuda.device_count()) < 2:
        return replace(job, not_run=f"--device cuda needs a GPU for each of at least 2 ranks; torch sees {found}")
    try:
        answer = processes.pool(2, job.environment, target.start_request(device)).started
    except (OSError, RuntimeError) as error:
        return replace(job, not_run=f"{name} did not start: {error}")
    if answer is None or "error" in answer:
        return replace(job, not_run=answer["error"] if answer else f"{name} did not start")
    moonep, part = (Part.from_json(answer[which]) for which in ("moonep", "engine"))
    if path and (wrong := paths.outside(path, part.package, part.file)):
        raise CaseError(wrong)
    if answer["mismatch"]:
        raise CaseError(answer["mismatch"])
    return replace(job, target=replace(target, moonep=moonep, part=part))


_MAKERS: dict[str, Callable[[Options, Job], Job]] = {
    "reference": _reference,
    "module": _module,
    "engine": _engine,
}
