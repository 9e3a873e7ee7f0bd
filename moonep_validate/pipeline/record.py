"""How is a case recorded? On all ranks of any world; ``rank_main`` is what runs on a rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from moonep_validate.cases.case import Case
from moonep_validate.data.problem import CPU
from moonep_validate.faults import Seams
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.lost import calls_of_lost_rank, deadlocked, left_running
from moonep_validate.pipeline.selection import buffer_key, too_few_gpus
from moonep_validate.scenarios import SCENARIOS
from moonep_validate.sessions.rig import Rig
from moonep_validate.subjects.vouch import compared
from moonep_validate.trace.recording import Recording
from moonep_validate.trace.trace import Recorder, Relation, Trace, TraceError, described
from moonep_validate.worlds import processes, threads
from moonep_validate.worlds.comm import Comm


def open_trace(job: Job, case: Case) -> Trace:
    """An empty trace of a job."""
    subject = job.subject
    return Trace(
        case,
        subject.name,
        [],
        dict(subject.parts),
        proves=subject.proves,
        leaves_open=subject.leaves_open,
        reproducer=job.reproducer,
        recording=job.recording,
        layer_door=job.target.kind.layer_door,
        faults=[str(fault) for fault in job.faults],
    )


def record(job: Job, case: Case) -> Trace:
    """Run a case on all ranks and note what happened.

    A rank that raises, hangs or ends is data in the trace, never an exception here.
    """
    trace = open_trace(job, case)
    trace.calls = [[] for _ in range(case.R)]
    if reason := refused(job, case):
        trace.not_run = reason
    else:
        RECORDERS[job.runs_in](job, case, trace)
    return trace


def refused(job: Job, case: Case) -> str | None:
    """Why a job does not run a case here, or None."""
    return case.refusal or job.subject.supports(case) or _needs_gpu(job, case) or too_few_gpus(job, case.R)


def _needs_gpu(job: Job, case: Case) -> str | None:
    missing = "gpu" in SCENARIOS[case.scenario.name].needs and job.device != "cuda"
    return f"the scenario {case.scenario} needs GPUs; see --device cuda" if missing else None


def rank_main(job: Job, case: Case, comm: Comm, recorder: Recorder) -> list[Relation]:
    """The only function that runs on a rank; returns the relations that the scenario promises."""
    seams = Seams(job.faults, comm.rank)
    device = CPU if job.target.kind.layer_door else comm.device
    rig = Rig(case, comm, recorder, seams, job.subject.open, device=device, experts=job.experts)
    try:
        SCENARIOS[case.scenario.name].script(rig)
    finally:
        recorder.settle()
    return rig.relations


def _record_in_threads(job: Job, case: Case, trace: Trace) -> None:
    recorders = [Recorder(recording=Recording.parse(job.recording)) for _ in range(case.R)]
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
        pool = processes.pool(case.R, job.environment, job.target.start_request(job.device))
        key = str(buffer_key(case))
        replies = pool.run(request, job.deadline, job.target.reset_request, key, job.deadline_at_first)
        if unreadable := take_parts(trace, replies):
            pool.reject(unreadable, replies)
    except (OSError, RuntimeError) as error:
        trace.errors.append(f"the worker processes could not run this case: {error}")
        return
    if trace.not_run and any(trace.calls):
        trace.not_run = ""
        trace.errors.append("some ranks refused the case, and others ran it")
    trace.autopsy = pool.autopsy
    waited = pool.autopsy.get("silent") or job.deadline
    deadlock = deadlocked(replies)
    for rank, reply in enumerate(replies):
        if reply.data is None:
            trace.calls[rank] = calls_of_lost_rank(rank, reply, trace, waited, deadlock)
        if reply.left:
            trace.calls[rank].append(left_running(reply.left))


def take_parts(trace: Trace, replies: Sequence[processes.Reply]) -> dict[int, str]:
    """Take what the ranks recorded into the trace of all; says for which ranks that cannot be read, and why."""
    unreadable = {}
    for rank, reply in enumerate(replies):
        try:
            if reply.data is not None:
                add_part(trace, rank, reply.data)
        except Exception as error:  # the bytes come from a process in which code from outside ran
            unreadable[rank] = f"its reply cannot be read: {type(error).__name__}: {error}"
    return unreadable


def add_part(trace: Trace, rank: int, data: bytes) -> None:
    """Take what one rank recorded into the trace of all.

    Raises:
        TraceError: if it is no trace, or none of one rank of this case.
    """
    part = Trace.from_bytes(data, f"the answer of rank {rank}", sealed=False)
    if str(part.case) != str(trace.case):
        raise TraceError(f"it is of another case: expected {trace.case}, got {part.case}")
    if len(part.calls) != 1:
        raise TraceError(f"it has the calls of {len(part.calls)} ranks; those of 1 are due")
    trace.calls[rank], trace.relations = part.calls[0], part.relations or trace.relations
    if not part.not_run:
        compared(trace, rank, part.said)
    trace.not_run = part.not_run or trace.not_run
    trace.errors += [f"rank {rank}: {error}" for error in part.errors]


#: World -> how a case is recorded there; parity.py adds ``torchrun`` in a process that torchrun started.
RECORDERS: dict[str, Callable[[Job, Case, Trace], None]] = {
    "threads": _record_in_threads,
    "processes": _record_in_processes,
}
