"""The pipeline: record a case on a subject, judge the trace. Nothing else runs cases.

``run_case`` joins the two; the CLI, pytest, the shrinker and the benchmark are loops over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moonep_validate.case import Case, CaseError, Spec
from moonep_validate.checks import CHECKS, Check, run_check
from moonep_validate.contract import Layout
from moonep_validate.facts import Missing, Step
from moonep_validate.faults import Seams, parse_fault
from moonep_validate.rig import Rig
from moonep_validate.scenarios import SCENARIOS
from moonep_validate.subjects import SUBJECTS
from moonep_validate.trace import Call, Recorder, Relation, Trace, described
from moonep_validate.verdict import NO_CHECK, Finding, Result, Verdict
from moonep_validate.witnesses import count_witnesses, vacuous_reasons
from moonep_validate.worlds import threads
from moonep_validate.worlds.comm import Comm

#: What check F1 promises; it needs no comparison and so no entry in ``CHECKS``.
RETURNS = "Every call returns on every rank"
_STAGE_OF_OP = {"open": "life", "close": "life", "load": "life"}


@dataclass(frozen=True)
class Job:
    """Where and on whom a case runs; the case says what.

    Attributes:
        subject: a name of ``SUBJECTS``.
        faults: seeded faults.
        deadline: seconds that a rank may run between two collectives.
    """

    subject: str = "reference"
    faults: tuple[Spec, ...] = ()
    deadline: float = 30.0

    @property
    def reproducer(self) -> str:
        """The command-line options that differ from the defaults."""
        options = [f"--fault {fault}" for fault in self.faults]
        if self.subject != Job.subject:
            options.append(f"--subject {self.subject}")
        return " ".join(options)


def make_job(subject: str, faults: Sequence[str], deadline: float) -> Job:
    """A job from command-line text.

    Raises:
        CaseError: for an unknown subject or fault.
    """
    if subject not in SUBJECTS:
        raise CaseError(f"unknown subject {subject!r}; known: {', '.join(SUBJECTS)}")
    return Job(subject, tuple(parse_fault(text) for text in faults), deadline)


def record(job: Job, case: Case) -> Trace:
    """Run a case on all ranks and note what happened.

    A rank that raises or hangs is data in the trace, never an exception here.
    """
    subject = SUBJECTS[job.subject]
    trace = Trace(case, subject.name, [[] for _ in range(case.R)], dict(subject.parts), reproducer=job.reproducer)
    if reason := subject.supports(case):
        trace.not_run = reason
        return trace
    Layout.of(case)
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
    return trace


def rank_main(job: Job, case: Case, comm: Comm, recorder: Recorder) -> list[Relation]:
    """The only function that runs on a rank; returns the relations that the scenario promises."""
    seams = Seams(job.faults, comm.rank)
    rig = Rig(case, comm, recorder, seams, SUBJECTS[job.subject].open)
    SCENARIOS[case.scenario.name](rig)
    return rig.relations


def judge(trace: Trace, checks: Sequence[Check] | None = None) -> Verdict:
    """Judge a trace; needs no subject, no world and no data of the case.

    Args:
        trace: what happened.
        checks: which checks to run, all by default.
    """
    if trace.not_run:
        neutral = Result(NO_CHECK, "life", "-", "not_run", "none", reason=trace.not_run)
        return Verdict(trace.case, trace.parts, [neutral], reproducer=trace.reproducer)
    results = []
    for name in trace.steps():
        step = Step(trace, name)
        results += _returns(trace, step)
        if "layer" in step.ops():
            applicable = CHECKS.values() if checks is None else checks
            results += [run_check(c, step, trace) for c in applicable if c.kind != "relation" or step.relations()]
    counts = count_witnesses(trace)
    return Verdict(
        case=trace.case,
        parts=trace.parts,
        results=results,
        witnesses=counts,
        vacuous=vacuous_reasons(trace, counts),
        measures=_measures(trace),
        errors=trace.errors,
        reproducer=trace.reproducer,
    )


def run_case(job: Job, case: Case) -> tuple[Trace, Verdict]:
    """Record and judge; a fault that changed no recorded byte makes the verdict ``not_exercised``."""
    trace = record(job, case)
    verdict = judge(trace)
    if job.faults and verdict.ok and record(replace(job, faults=()), case).digest() == trace.digest():
        verdict.override = "not_exercised"
    return trace, verdict


def _returns(trace: Trace, step: Step) -> list[Result]:
    """F1: every call of the step returned on every rank; one result per stage."""
    results = []
    for op in step.ops():
        if op == "layer":
            continue
        stage = _STAGE_OF_OP.get(op, op)
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


def _measures(trace: Trace) -> dict[str, float]:
    """Quality of the plans, for information: rows computed away from home, and padding per real row."""
    moved = padding = rows = 0
    for name in trace.steps():
        step = Step(trace, name)
        try:
            moved += int((step.layout.home(step.topk) != step.rank_of).sum())
            padding += int(step.cu_seqlens[:, -1].sum()) - step.raw.size
            rows += step.raw.size
        except Missing:
            continue
    return {"rows_moved": moved / rows, "padding_ratio": padding / rows} if rows else {}
