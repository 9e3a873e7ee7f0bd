"""The pipeline: record a case on a subject, judge the trace. Nothing else runs cases.

``run_case`` joins the two; the CLI, pytest, the shrinker, search and the benchmark are loops over it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from moonep_validate.cases.case import Case, CaseError, Spec
from moonep_validate.data.problem import CPU
from moonep_validate.faults import Seams, parse_fault
from moonep_validate.judge.checks import CHECKS, Check, run_check
from moonep_validate.judge.checks.relations import relation_results
from moonep_validate.judge.facts import Step, steps_of
from moonep_validate.judge.measures import measures
from moonep_validate.judge.verdict import NO_CHECK, STAGES, Finding, Result, Verdict
from moonep_validate.judge.waivers import SHIPPED, Waiver, read_waivers, waive
from moonep_validate.judge.witnesses import count_witnesses, vacuous_reasons
from moonep_validate.scenarios.buffer import NEEDS_GPU, SCENARIOS
from moonep_validate.scenarios.rig import Rig
from moonep_validate.subjects import REFERENCE, Subject, module_subject, subject_with_experts
from moonep_validate.subjects.engines import start as engines
from moonep_validate.subjects.experts import DEFAULT
from moonep_validate.subjects.experts import probe as probe_experts
from moonep_validate.subjects.probe import probe
from moonep_validate.subjects.provenance import describe
from moonep_validate.trace.keep import Keep
from moonep_validate.trace.trace import Call, Part, Recorder, Relation, Trace, described
from moonep_validate.worlds import processes, threads
from moonep_validate.worlds.autopsy import how_ended
from moonep_validate.worlds.comm import Comm

#: What check F1 promises; it needs no comparison and so no entry in ``CHECKS``.
RETURNS = "Every call returns on every rank"
#: Groups of stages that a gate can ask for by one name.
GROUPS = {
    "transport": ("plan", "dispatch", "prefetch", "combine"),
    "loader": ("load",),
    "engine": ("load", "prepare", "experts", "layer"),
}
_NO_STEP = ("open", "close", "load")
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
        _waivers(waivers)  # a bad file is said before anything starts
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
    answer = probe_experts(name)
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
    if keep_order or (job.world or subject_of(job).world) == "threads":
        return chosen
    return sorted(chosen, key=lambda case: tuple(map(str, buffer_key(case))))


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


def unmet(job: Job, wanted: Sequence[str]) -> list[str]:
    """Which demands on what really runs are not met, one sentence each.

    Args:
        job: what would run.
        wanted: ``STAGE=PACKAGE``, where STAGE is a stage or one of ``GROUPS``; commas separate several.

    Raises:
        CaseError: for a demand that is not of this form.
    """
    parts, found = subject_of(job).parts, []
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


def open_trace(job: Job, case: Case) -> Trace:
    """An empty trace of a job."""
    subject = subject_of(job)
    return Trace(
        case,
        subject.name,
        [],
        dict(subject.parts),
        proves=subject.proves,
        leaves_open=subject.leaves_open,
        reproducer=job.reproducer,
        keep=job.keep,
    )


def record(job: Job, case: Case) -> Trace:
    """Run a case on all ranks and note what happened.

    A rank that raises, hangs or ends is data in the trace, never an exception here.
    """
    trace, subject = open_trace(job, case), subject_of(job)
    trace.calls = [[] for _ in range(case.R)]
    if reason := subject.supports(case) or _needs_gpu(job, case) or too_few_gpus(job, case.R):
        trace.not_run = reason
    else:
        RECORDERS[job.world or subject.world](job, case, trace)
    return trace


def _needs_gpu(job: Job, case: Case) -> str | None:
    missing = case.scenario.name in NEEDS_GPU and job.device != "cuda"
    return f"the scenario {case.scenario} needs GPUs; see --device cuda" if missing else None


def rank_main(job: Job, case: Case, comm: Comm, recorder: Recorder) -> list[Relation]:
    """The only function that runs on a rank; returns the relations that the scenario promises."""
    seams = Seams(job.faults, comm.rank)
    device = comm.device if job.engine is None else CPU
    rig = Rig(case, comm, recorder, seams, subject_of(job).open, device=device, experts=job.experts)
    try:
        SCENARIOS[case.scenario.name](rig)
    finally:
        recorder.settle()
    return rig.relations


def _record_in_threads(job: Job, case: Case, trace: Trace) -> None:
    recorders = [Recorder(policy=Keep.parse(job.keep)) for _ in range(case.R)]
    relations: list[list[Relation]] = [[] for _ in range(case.R)]

    def on_rank(comm: Comm) -> None:
        relations[comm.rank] = rank_main(job, case, comm, recorders[comm.rank])

    outcomes = threads.run(on_rank, case.R, job.deadline)
    trace.calls = [recorder.calls for recorder in recorders]
    trace.relations = relations[0]
    for rank, outcome in enumerate(outcomes):
        if outcome.stack is not None:
            trace.hung.append({"rank": rank, "stack": outcome.stack, "deadline": job.deadline})
        elif outcome.error is not None and not any(call.error for call in trace.calls[rank]):
            error = described(outcome.error)
            if not error["peer"]:
                trace.errors.append(f"rank {rank}: {error['type']}: {error['message']} ({error['where']})")


def _record_in_processes(job: Job, case: Case, trace: Trace) -> None:
    request = json.dumps({"job": job.to_json(), "case": str(case)}).encode()
    try:
        pool = processes.pool(case.R, job.environment, job.start_request)
        key = str(buffer_key(case))
        replies = pool.run(request, job.deadline, job.reset_request, key, job.deadline_at_first)
    except (OSError, RuntimeError) as error:
        trace.errors.append(f"the worker processes could not run this case: {error}")
        return
    trace.autopsy = pool.autopsy
    waited = pool.autopsy.get("silent") or job.deadline
    stacks = [reply.stack for reply in replies if reply.stack is not None]
    deadlock = bool(stacks) and all(map(processes.in_collective, stacks))
    for rank, reply in enumerate(replies):
        if reply.data is not None:
            add_part(trace, rank, reply.data[1:])
        else:
            trace.calls[rank] = calls_of_lost_rank(rank, reply, trace, waited, deadlock)


def add_part(trace: Trace, rank: int, data: bytes) -> None:
    """Take what one rank recorded into the trace of all."""
    part = Trace.from_bytes(data, f"the answer of rank {rank}", sealed=False)
    trace.calls[rank], trace.relations = part.calls[0], part.relations or trace.relations
    trace.errors += [f"rank {rank}: {error}" for error in part.errors]


def calls_of_lost_rank(
    rank: int, reply: processes.Reply, trace: Trace, deadline: float, deadlock: bool
) -> list[Call]:
    """What is known of a rank that sent no data: the calls it entered, and why the last one has no end."""
    calls = [Call(step, op, done=done) for step, op, done in reply.phases]
    stuck = reply.stack is not None and not processes.in_collective(reply.stack)
    if stuck:
        trace.hung.append({"rank": rank, "stack": reply.stack, "deadline": deadline})
    last = next((call for call in reversed(calls) if not call.done), None)
    if last is None:
        trace.errors.append(f"rank {rank} sent nothing back (exit code {reply.ended})")
    elif not stuck:
        kind, message = "PeerFailed", "stopped while waiting for its peers"
        if reply.ended is not None:
            kind, message = "ProcessEnded", f"the process {how_ended(reply.ended)}"
        elif deadlock:  # nobody failed and nobody is busy, so the peers that it waits for are done
            kind, message = "Deadlock", f"rank {rank} waits in {last.op} for peers that do not come"
        for call in calls:
            if not call.done:
                call.done = True
                peer = kind == "PeerFailed"
                call.error = {"type": kind, "message": message, "where": "outside Python", "peer": peer}
    return calls


#: World -> how a case is recorded there; parity.py adds ``torchrun`` in a process that torchrun started.
RECORDERS: dict[str, Callable[[Job, Case, Trace], None]] = {
    "threads": _record_in_threads,
    "processes": _record_in_processes,
}


def judge(trace: Trace, checks: Sequence[Check] | None = None) -> Verdict:
    """Judge a trace; needs no subject, no world and no data of the case.

    Args:
        trace: what happened.
        checks: which checks to run, all by default.
    """
    if trace.not_run:
        neutral = Result(NO_CHECK, STAGES[0], "-", "not_run", "none", reason=trace.not_run)
        return Verdict(trace.case, trace.parts, [neutral], reproducer=trace.reproducer)
    results, steps = [], steps_of(trace)
    for step in steps.values():
        results += _returns(trace, step)
        if any(op not in _NO_STEP for op in step.ops()):
            results += [run_check(c, step, trace) for c in (CHECKS.values() if checks is None else checks)]
            results += relation_results(step, trace)
    if trace.autopsy:
        results = _explained(results, trace.autopsy["diagnosis"])
    counts = count_witnesses(trace.case, steps.values())
    return Verdict(
        case=trace.case,
        parts=trace.parts,
        results=results,
        witnesses=counts,
        vacuous=vacuous_reasons(trace.case, steps.values(), counts),
        measures=measures(steps.values()),
        errors=trace.errors,
        autopsy=trace.autopsy,
        reproducer=trace.reproducer,
    )


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
        if job.engine_part and not trace.not_run:
            verdict = waive(verdict, _waivers(job.waivers), job.engine_part, date.today())
        if job.faults and exercised and verdict.ok:
            clean = record(replace(job, faults=()), case)
            verdict.override = "not_exercised" if clean.digest() == trace.digest() else None
    return trace, verdict


@lru_cache(maxsize=4)
def _waivers(path: str | None) -> list[Waiver]:
    return [] if path == "" else read_waivers(SHIPPED if path is None else Path(path))


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """On tensors this small, several threads cost up to 15 times as much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _returns(trace: Trace, step: Step) -> list[Result]:
    """F1: every call of the step returned on every rank; one result per stage."""
    results = []
    mine = [[call for call in calls if call.step == step.name] for calls in trace.calls]
    for op in step.ops():
        stage = op if op in STAGES else "life"
        calls = [(rank, call) for rank, calls in enumerate(mine) for call in calls if call.op == op]
        if op == "layer":  # it ends with whatever ended inside it; only what it raised by itself is its own
            calls = [(r, c) for r, c in calls if all(i.done and not i.error for i in mine[r] if i is not c)]
        findings = [finding for rank, call in calls if (finding := _broken(trace, rank, call))]
        hung = any(not call.done or (call.error or {}).get("type") == "Deadlock" for _, call in calls)
        status = "hung" if hung else "failed" if findings else "passed"
        level = trace.parts[stage].level
        results.append(Result("F1", stage, step.name, status, level, len(calls), tuple(findings)))
    return results


def _explained(results: list[Result], diagnosis: str) -> list[Result]:
    """The autopsy's sentence is the first finding at the earliest stage that did not return."""
    broken = [result for result in results if result.check == "F1" and result.findings]
    if not broken:
        return results
    first = min((r for r in broken if r.step == broken[0].step), key=lambda r: STAGES.index(r.stage))
    told = Finding("autopsy", {}, "every rank goes on", diagnosis)
    return [replace(r, findings=(told, *r.findings)) if r is first else r for r in results]


def _broken(trace: Trace, rank: int, call: Call) -> Finding | None:
    """Why a call did not return, or None; a rank that only stopped for a peer has no finding."""
    what = f"{call.op} call of step {call.step}"
    if not call.done:
        hung = next((h for h in trace.hung if h["rank"] == rank), {"deadline": "?", "stack": ""})
        where = hung["stack"].strip().splitlines()[-2:]
        text = f"no return after {hung['deadline']} s; it is in {' '.join(' '.join(where).split())}"
        return Finding(what, {"rank": rank}, "return", text)
    if call.error and not call.error["peer"]:
        text = f"{call.error['type']}: {call.error['message']} ({call.error['where']})"
        return Finding(what, {"rank": rank}, "return", text)
    return None
