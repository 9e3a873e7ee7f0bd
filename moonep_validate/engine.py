"""The pipeline: record a case on a subject, judge the trace. Nothing else runs cases.

``run_case`` joins the two; the CLI, pytest, the shrinker, search and the benchmark are loops over it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from moonep_validate.case import Case, CaseError, Spec
from moonep_validate.checks import CHECKS, Check, run_check
from moonep_validate.checks.relations import relation_results
from moonep_validate.facts import Missing, Step, steps_of
from moonep_validate.faults import Seams, parse_fault
from moonep_validate.rig import Rig
from moonep_validate.scenarios import SCENARIOS
from moonep_validate.subjects import REFERENCE, Subject, module_subject
from moonep_validate.subjects.probe import probe
from moonep_validate.trace import Call, Part, Recorder, Relation, Trace, described
from moonep_validate.verdict import NO_CHECK, STAGES, Finding, Result, Verdict
from moonep_validate.witnesses import count_witnesses, vacuous_reasons
from moonep_validate.worlds import processes, threads
from moonep_validate.worlds.comm import Comm

#: What check F1 promises; it needs no comparison and so no entry in ``CHECKS``.
RETURNS = "Every call returns on every rank"
_NO_STEP = ("open", "close", "load")


@dataclass(frozen=True)
class Job:
    """Where and on whom a case runs; the case says what.

    Attributes:
        module: an importable module with MoonEP's ``Buffer``; None is the embedded reference.
        generation, part: what the module is, from probe.py.
        relaxed: run cases on the module that real hardware refuses.
        destructive: run bad input on the module that may trap, hang or end the process.
        faults: seeded faults.
        deadline: seconds that a rank may run without a sign of life.
        options: the command-line options beside ``--case`` and ``--fault`` that lead to this job.
    """

    module: str | None = None
    generation: str | None = None
    part: Part | None = None
    relaxed: bool = False
    destructive: bool = False
    faults: tuple[Spec, ...] = ()
    deadline: float = 30.0
    options: str = ""

    @property
    def reproducer(self) -> str:
        """The command-line options that differ from the defaults."""
        return " ".join([self.options, *(f"--fault {fault}" for fault in self.faults)]).strip()

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the worker processes."""
        return {"MOONEP_VALIDATE_RELAXED": "1"} if self.relaxed else {}

    def to_json(self) -> dict[str, Any]:
        """The job as JSON data."""
        return {**asdict(self), "faults": [str(fault) for fault in self.faults]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        """Read ``to_json``."""
        part = Part.from_json(data["part"]) if data["part"] else None
        return cls(**{**data, "part": part, "faults": tuple(Spec.parse(fault) for fault in data["faults"])})


def make_job(
    module: str | None = None,
    api: str | None = None,
    policy: str | None = None,
    relaxed: bool = False,
    destructive: bool = False,
    faults: Sequence[str] = (),
    deadline: float = 30.0,
) -> Job:
    """A job from command-line text; asks a module what it is.

    Raises:
        CaseError: for an unknown fault, or a module that cannot be judged.
    """
    parsed = tuple(parse_fault(text) for text in faults)
    if module is None:
        if api or policy or relaxed or destructive:
            raise CaseError("--api, --policy, --relaxed and --destructive go with --moonep-module")
        return Job(faults=parsed, deadline=deadline)
    given = {"moonep-module": module, "api": api, "policy": policy}
    options = " ".join(f"--{name} {value}" for name, value in given.items() if value)
    options += " --relaxed" * relaxed + " --destructive" * destructive
    job = Job(module, None, None, relaxed, destructive, parsed, deadline, options)
    generation, part = probe(module, api, policy, job.environment)
    return replace(job, generation=generation, part=part)


@lru_cache(maxsize=8)
def _module_subject(module: str, generation: str, part: Part, relaxed: bool, destructive: bool) -> Subject:
    return module_subject(module, generation, part, relaxed, destructive)


def subject_of(job: Job) -> Subject:
    """The subject of a job."""
    if job.module is None:
        return REFERENCE
    assert job.generation is not None
    assert job.part is not None
    return _module_subject(job.module, job.generation, job.part, job.relaxed, job.destructive)


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
    )


def record(job: Job, case: Case) -> Trace:
    """Run a case on all ranks and note what happened.

    A rank that raises, hangs or ends is data in the trace, never an exception here.
    """
    trace, subject = open_trace(job, case), subject_of(job)
    trace.calls = [[] for _ in range(case.R)]
    if reason := subject.supports(case):
        trace.not_run = reason
    elif subject.world == "threads":
        _record_in_threads(job, case, trace)
    else:
        _record_in_processes(job, case, trace)
    return trace


def rank_main(job: Job, case: Case, comm: Comm, recorder: Recorder) -> list[Relation]:
    """The only function that runs on a rank; returns the relations that the scenario promises."""
    seams = Seams(job.faults, comm.rank)
    rig = Rig(case, comm, recorder, seams, subject_of(job).open)
    SCENARIOS[case.scenario.name](rig)
    return rig.relations


def _record_in_threads(job: Job, case: Case, trace: Trace) -> None:
    recorders = [Recorder() for _ in range(case.R)]
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
        replies = processes.pool(case.R, job.environment).run(request, job.deadline)
    except (OSError, RuntimeError) as error:
        trace.errors.append(f"the worker processes could not run this case: {error}")
        return
    for rank, reply in enumerate(replies):
        if reply.data is not None:
            part = Trace.from_bytes(reply.data[1:], f"the answer of rank {rank}")
            trace.calls[rank], trace.relations = part.calls[0], part.relations or trace.relations
            trace.errors += [f"rank {rank}: {error}" for error in part.errors]
        else:
            trace.calls[rank] = _calls_of_lost_rank(rank, reply, trace, job.deadline)


def _calls_of_lost_rank(rank: int, reply: processes.Reply, trace: Trace, deadline: float) -> list[Call]:
    """What is known of a rank that sent no data: the calls it entered, and why the last one has no end."""
    calls = [Call(step, op, done=done) for step, op, done in reply.phases]
    stuck = reply.stack is not None and not processes.in_collective(reply.stack)
    if stuck:
        trace.hung.append({"rank": rank, "stack": reply.stack, "deadline": deadline})
    last = next((call for call in reversed(calls) if not call.done), None)
    if last is None:
        trace.errors.append(f"rank {rank} sent nothing back (exit code {reply.ended})")
    elif not stuck:
        own = reply.ended is not None
        message = (
            f"the process ended with exit code {reply.ended}" if own else "stopped while waiting for its peers"
        )
        for call in calls:
            if not call.done:
                call.done = True
                kind = "ProcessEnded" if own else "PeerFailed"
                call.error = {"type": kind, "message": message, "where": "outside Python", "peer": not own}
    return calls


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
    counts = count_witnesses(trace.case, steps.values())
    return Verdict(
        case=trace.case,
        parts=trace.parts,
        results=results,
        witnesses=counts,
        vacuous=vacuous_reasons(trace.case, steps.values(), counts),
        measures=_measures(steps.values()),
        errors=trace.errors,
        reproducer=trace.reproducer,
    )


def run_case(job: Job, case: Case) -> tuple[Trace, Verdict]:
    """Record and judge; a fault that changed no recorded byte makes the verdict ``not_exercised``."""
    with _one_torch_thread():
        trace = record(job, case)
        verdict = judge(trace)
        if job.faults and verdict.ok and record(replace(job, faults=()), case).digest() == trace.digest():
            verdict.override = "not_exercised"
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


def _returns(trace: Trace, step: Step) -> list[Result]:
    """F1: every call of the step returned on every rank; one result per stage."""
    results = []
    for op in step.ops():
        if op == "layer":
            continue
        stage = op if op in STAGES else "life"
        calls = [
            (rank, call)
            for rank, calls in enumerate(trace.calls)
            for call in calls
            if call.op == op and call.step == step.name
        ]
        findings = [finding for rank, call in calls if (finding := _broken(trace, rank, call))]
        hung = any(not call.done or (call.error or {}).get("type") == "Deadlock" for _, call in calls)
        status = "hung" if hung else "failed" if findings else "passed"
        level = trace.parts[stage].origin
        results.append(Result("F1", stage, step.name, status, level, len(calls), tuple(findings)))
    return results


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


def _measures(steps: Iterable[Step]) -> dict[str, float]:
    """Quality of the plans, for information: rows computed away from home, and padding per real row."""
    moved = padding = rows = 0
    for step in steps:
        try:
            moved += int((step.layout.home(step.topk) != step.rank_of).sum())
            padding += int(step.cu_seqlens[:, -1].sum()) - step.raw.size
            rows += step.raw.size
        except Missing:
            continue
    return {"rows_moved": moved / rows, "padding_ratio": padding / rows} if rows else {}
