"""Where and on whom does a case run? A job is made from the options of a command, and travels as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from moonep_validate.cases.case import CaseError, Spec
from moonep_validate.faults import parse_fault
from moonep_validate.judge.waivers import waivers_of
from moonep_validate.subjects.engines import start as engines
from moonep_validate.subjects.experts import DEFAULT
from moonep_validate.subjects.experts import identify as identify_experts
from moonep_validate.subjects.probe import probe
from moonep_validate.trace.keep import Keep
from moonep_validate.trace.trace import Part
from moonep_validate.worlds import processes

PARTS = ("part", "engine_part", "experts_part")


@dataclass(frozen=True)
class Job:
    """Where and on whom a case runs; the case says what.

    Attributes:
        module: an importable module with MoonEP's ``Buffer``; None is the embedded reference, or an engine's.
        generation, part: what the module is, from probe.py.
        engine: a serving engine: ``vllm``, ``sglang``, or MODULE:CLASS of an ``Integration``.
        engine_part: what the engine is.
        not_run: why nothing can run on this engine here, or None.
        path: a folder that goes first on the import path of the workers.
        world: ``threads``, ``processes`` or ``torchrun``; None is the subject's own.
        device: ``cpu`` or ``cuda``.
        relaxed: run cases on the module that real hardware refuses.
        destructive: run bad input on the module that may trap, hang or end the process.
        faults: seeded faults.
        deadline: seconds that a rank may run without a sign of life.
        experts: who computes the expert rows around a Buffer, see ``experts.find``.
        experts_part: what that is, or None where it cannot run.
        keep: how much of each tensor is recorded, see keep.py.
        first_deadline: the same in the first case of a Buffer key, where memory is mapped and kernels compiled;
            None is three times the deadline.
        waivers: a file of known defects; None is what ships with the suite, an empty text is none.
        options: the command-line options beside ``--case`` and ``--fault`` that lead to this job.
    """

    module: str | None = None
    generation: str | None = None
    part: Part | None = None
    engine: str | None = None
    engine_part: Part | None = None
    not_run: str | None = None
    path: str | None = None
    world: str | None = None
    device: str = "cpu"
    relaxed: bool = False
    destructive: bool = False
    faults: tuple[Spec, ...] = ()
    deadline: float = 30.0
    experts: str = DEFAULT
    experts_part: Part | None = None
    first_deadline: float | None = None
    keep: str = "full"
    waivers: str | None = None
    options: str = ""

    @property
    def reproducer(self) -> str:
        """The command-line options that differ from the defaults."""
        record = [f"--record {self.keep}"] if self.keep != "full" else []
        return " ".join([self.options, *record, *(f"--fault {fault}" for fault in self.faults)]).strip()

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the worker processes."""
        ours = {"MOONEP_VALIDATE_RELAXED": "1"} if self.relaxed else {}
        if self.engine:
            return ours | engines.environment(self.engine, self.path, self.device)
        return ours | ({engines.DEVICE: self.device} if self.device != "cpu" else {})

    @property
    def embedded(self) -> bool:
        """Whether the subject is our own reference, all of whose collectives go through our ``Comm``."""
        return self.module is None and self.engine is None

    @property
    def deadline_at_first(self) -> float:
        """Seconds without a sign of life in the first case of a Buffer key."""
        return 3 * self.deadline if self.first_deadline is None else self.first_deadline

    @property
    def start_request(self) -> bytes | None:
        """What a new pool of workers is told first: the engine that it shall import and initialise."""
        return json.dumps({"start": self.engine, "device": self.device}).encode() if self.engine else None

    @property
    def reset_request(self) -> bytes | None:
        """What the workers are told after a case in which a rank raised; an engine is dear to start anew."""
        return json.dumps({"reset": self.engine}).encode() if self.engine else None

    def to_json(self) -> dict[str, Any]:
        """The job as JSON data."""
        return {**asdict(self), "faults": [str(fault) for fault in self.faults]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        """Read ``to_json``."""
        parts = {name: Part.from_json(data[name]) if data[name] else None for name in PARTS}
        return cls(**{**data, **parts, "faults": tuple(Spec.parse(fault) for fault in data["faults"])})


def make_job(
    module: str | None = None,
    api: str | None = None,
    policy: str | None = None,
    relaxed: bool = False,
    destructive: bool = False,
    faults: Sequence[str] = (),
    deadline: float = 30.0,
    subject: str = "reference",
    path: str | None = None,
    device: str | None = None,
    waivers: str | None = None,
    experts: str = DEFAULT,
    world: str | None = None,
    keep: str = "full",
) -> Job:
    """A job from command-line text; asks a module or an engine what it is.

    Raises:
        CaseError: for an unknown fault or subject, options that exclude each other, a module that cannot be
            judged, or an engine whose calls do not fit the ``moonep`` that it would get.
    """
    parsed = tuple(parse_fault(text) for text in faults)
    keep = str(Keep.parse(keep))
    _refuse_world(world, device, module or (subject if subject != "reference" else None))
    if subject != "reference":
        if keep != "full":
            raise CaseError(
                f"--record {keep} goes with a Buffer; an engine's cases are small and recorded in full"
            )
        if module or api or policy or relaxed or destructive or experts != DEFAULT:
            raise CaseError(
                f"--subject {subject}: --moonep-module, --experts, --api, --policy, --relaxed and --destructive "
                "go without it; an engine takes the moonep that it can import, and has its own experts"
            )
        device = device or ("cuda" if torch.cuda.device_count() > 1 else "cpu")
        job = Job(engine=subject, path=path, device=device, faults=parsed, deadline=deadline, waivers=waivers)
        waivers_of(waivers)  # a bad file is said before anything starts
        return _engine_job(job)
    if path or waivers:
        raise CaseError("--sglang-path and --waivers go with --subject vllm or --subject sglang")
    device = device or "cpu"
    world = world or ("processes" if device == "cuda" else None)
    given = {"moonep-module": module, "api": api, "policy": policy}
    given |= {"world": world if module is None else None, "device": device if device != "cpu" else None}
    options = " ".join(f"--{name} {value}" for name, value in given.items() if value)
    if module is None:
        if api or policy or relaxed or destructive:
            raise CaseError("--api, --policy, --relaxed and --destructive go with --moonep-module")
        job = Job(world=world, device=device, faults=parsed, deadline=deadline, keep=keep, options=options)
        return _with_experts(job, experts)
    options += " --relaxed" * relaxed + " --destructive" * destructive
    job = Job(module, None, None, relaxed=relaxed, destructive=destructive, faults=parsed, deadline=deadline)
    job = replace(job, world=world, device=device, keep=keep, options=options)
    generation, part = probe(module, api, policy, job.environment)
    return _with_experts(replace(job, generation=generation, part=part), experts)


def _with_experts(job: Job, name: str) -> Job:
    """Ask a part for the experts what it is; one that cannot run here makes every case not run."""
    if name == DEFAULT:
        return job
    answer = identify_experts(name)
    options = f"{job.options} --experts {name}".strip()
    if isinstance(answer, str):
        return replace(job, experts=name, not_run=answer, options=options)
    return replace(job, experts=name, experts_part=answer, options=options)


def _refuse_world(world: str | None, device: str | None, outside: str | None) -> None:
    """Raise for a world in which the subject does not run."""
    if world not in (None, "threads", "processes"):
        raise CaseError(f"--world is {world!r}; known: threads, processes")
    if world == "threads" and outside:
        raise CaseError(f"--world threads: code from outside ({outside}) runs in processes only")
    if world == "threads" and device == "cuda":
        raise CaseError("--world threads: on cuda each rank is a process with a GPU of its own; use processes")


def _engine_job(job: Job) -> Job:
    """Ask an engine what it is: import and initialise it in a pool of two ranks, which the cases then use."""
    assert job.engine is not None
    options = {
        "subject": job.engine,
        "sglang-path": job.path,
        "device": job.device if job.device != "cpu" else None,
        "waivers": "none" if job.waivers == "" else job.waivers,
    }
    text = " ".join(f"--{name} {value}" for name, value in options.items() if value)
    job = replace(job, options=text, generation="A")
    if job.device == "cuda" and (found := torch.cuda.device_count()) < 2:
        return replace(job, not_run=f"--device cuda needs a GPU for each of at least 2 ranks; torch sees {found}")
    try:
        answer = processes.pool(2, job.environment, job.start_request).started
    except (OSError, RuntimeError) as error:
        return replace(job, not_run=f"{job.engine} did not start: {error}")
    if answer is None or "error" in answer:
        return replace(job, not_run=answer["error"] if answer else f"{job.engine} did not start")
    if answer["mismatch"]:
        raise CaseError(answer["mismatch"])
    part, engine_part = (Part.from_json(answer[name]) for name in ("moonep", "engine"))
    return replace(job, part=part, engine_part=engine_part)
