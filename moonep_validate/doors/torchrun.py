"""What does a process of torchrun do? Rank 0 leads: it loops over cases, judges and reports; the others serve.

Each rank records its own calls (pipeline/member.py); rank 0's child gathers their bytes, this process judges them,
and all ranks are told the verdict. So one report is printed, and every rank exits with the same code.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from rich.console import Console

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.doors.report import terminal
from moonep_validate.doors.report.summary import Summary
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.judge import judge
from moonep_validate.pipeline.lost import calls_of_lost_rank, deadlocked
from moonep_validate.pipeline.member import Member, alike
from moonep_validate.pipeline.record import RECORDERS, open_trace, take_parts
from moonep_validate.pipeline.selection import too_few_gpus
from moonep_validate.trace.trace import Call, Trace
from moonep_validate.worlds.autopsy import Rank, autopsy, diagnosis
from moonep_validate.worlds.first import First
from moonep_validate.worlds.flight import CASE, phases
from moonep_validate.worlds.place import Place, place
from moonep_validate.worlds.processes import Reply

if TYPE_CHECKING:
    from moonep_validate.doors.report.files import OutputFolder

T = TypeVar("T")
_USAGE, _SAY_SECONDS = 4, 2.0
COMMAND = "torchrun --nproc-per-node N -m moonep_validate parity"


class Parity:
    """This process's part of the job; collective.

    On rank 0 it leads, and its child is the rank: so no code from outside runs where verdicts are made.

    Args:
        here: which rank it is.
        job: what runs, the same on every rank.
        cases: to choose from, the same on every rank.

    Attributes:
        size: number of ranks.
        cases: that are to run.
        verdicts: so far, on rank 0.
        folder, console: for the report, on rank 0.
    """

    def __init__(self, here: Place, job: Job, cases: Sequence[Case]) -> None:
        self.size, self.job = here.size, job
        self.cases, self.verdicts = list[Case](), list[Verdict]()
        self.folder: OutputFolder | None = None
        self.console = Console(width=None if sys.stdout.isatty() else 120)
        self._case: Case | None = None
        self._member: Member | None = None
        self._first: First | None = None
        if here.rank:
            self._member = Member(here, job.device, alike(job, cases))
        else:
            hello = {"device": job.device, "alike": alike(job, cases)}
            self._first = First("moonep_validate.pipeline.member", hello, here.size, self._bury)
            RECORDERS["torchrun"] = self.record

    @property
    def leads(self) -> bool:
        """Whether this process judges and reports."""
        return self._first is not None

    def record(self, job: Job, case: Case, trace: Trace) -> None:
        """Record a case on all ranks; called on rank 0 only, the others ``serve``."""
        assert self._first is not None
        self._case = case
        replies = [Reply(data) for data in self._first.record(job.to_json(), str(case), job.deadline_at_first)]
        for rank, problem in take_parts(trace, replies).items():
            lost = Reply(problem=problem)
            trace.calls[rank] = calls_of_lost_rank(rank, lost, trace, job.deadline, deadlock=False)
        self._case = None

    def led(self, function: Callable[[], T]) -> T:
        """What ``function`` returns on rank 0, on every rank; meanwhile the others record what it asks for."""
        if self._first is None:
            kind, value = self.serve()
            if kind == "raised":
                raise RuntimeError(f"rank 0: {value}")
            return value  # type: ignore[no-any-return]
        try:
            value = function()
        except BaseException as error:
            self._first.share("raised", f"{type(error).__name__}: {error}")
            raise
        self._first.share("value", value)
        return value

    def serve(self) -> tuple[str, Any]:
        """Take part in cases until rank 0 says something else."""
        assert self._member is not None
        return self._member.serve()

    def judged(self, one_case: Callable[[Case], tuple[Trace, Verdict]]) -> Callable[[Case], tuple[Trace, Verdict]]:
        """``one_case``, whose verdicts are kept for a report that may have to be written in a hurry."""

        def judge_one(case: Case) -> tuple[Trace, Verdict]:
            trace, verdict = one_case(case)
            self.verdicts.append(verdict)
            return trace, verdict

        return judge_one

    def end(self, code: int) -> None:
        """Tell all ranks the exit code, once the report is written, and wait for them."""
        assert self._first is not None
        self._first.share("value", code)
        self.leave()

    def leave(self) -> None:
        """Wait for all ranks, so that torchrun does not end one that still has to report."""
        if self._first is not None:
            self._first.end()
        if self._member is not None:
            self._member.world.end()

    def _bury(self, ranks: list[Rank], silent: float | None, why: str) -> int:
        """Rank 0's last words: the case that was lost, judged from what the ranks left, and the report."""
        console, case = self.console, self._case or self._next()
        ranks = [of_case(rank, case) for rank in ranks]
        if case is None:
            console.print(
                f"moonep-validate: the ranks were lost while no case ran: {why or 'silence'}; {diagnosis(ranks)}",
                highlight=False,
                soft_wrap=True,
            )
            summary = Summary(len(self.cases), self.verdicts, interrupted=True)
            if self.folder:
                self.folder.write_report(summary, open_trace(self.job, self.cases[0]).subject)
            return summary.exit_code
        trace = self._lost_trace(case, ranks, silent, why)
        verdict = judge(trace)
        summary = Summary(len(self.cases), [*self.verdicts, verdict], ended=True)
        left = len(self.cases) - len(summary.verdicts)
        if left and self.folder:  # pytest has the list
            summary.cut = f"the ranks were lost: {left} of {len(self.cases)} cases were not run"
        if self.folder:
            self.folder.note(trace, verdict)
            self.folder.write_report(summary, trace.subject)
        terminal.show_problem(console, verdict)
        console.print(
            f"the ranks cannot go on, so {left} cases were not run; exit code {summary.exit_code}", highlight=False
        )
        return summary.exit_code

    def _next(self) -> Case | None:
        """The case whose turn it is while none runs; None if all are judged, or pytest has the list."""
        left = self.cases[len(self.verdicts) :]
        return left[0] if left and self.folder else None

    def _lost_trace(self, case: Case, ranks: list[Rank], silent: float | None, why: str) -> Trace:
        trace = open_trace(self.job, case)
        trace.calls, trace.autopsy = [[] for _ in ranks], autopsy(ranks, silent)
        replies = [
            Reply(phases=phases(r.records), ended=r.ended, problem=r.problem, stack=_stack(r) if silent else None)
            for r in ranks
        ]
        deadlock = deadlocked(replies)
        for rank, reply in enumerate(replies):
            if not ranks[rank].done or reply.bad:
                trace.calls[rank] = _with_error(
                    ranks[rank], calls_of_lost_rank(rank, reply, trace, silent or 0.0, deadlock)
                )
        if not silent and not any(rank.failed for rank in ranks):
            trace.errors.append(f"the ranks were lost: {why}; {trace.autopsy['diagnosis']}")
        return trace


def of_case(rank: Rank, case: Case | None) -> Rank:
    """What a rank did in this case: nothing, if its log is of an earlier one."""
    first = rank.records[0] if rank.records else None
    if first is None or case is None or first.kind != CASE or str(case).startswith(first.name):
        return rank
    return replace(rank, records=[])


def _stack(rank: Rank) -> str | None:
    """Where a silent rank is; one that does not even say that, and waits for nobody, is stuck by itself."""
    return rank.stack or (None if rank.done or rank.waits else "(it does not answer)")


def _with_error(rank: Rank, calls: list[Call]) -> list[Call]:
    """The calls of a lost rank; what it raised, as far as its log says, is the error of the innermost one."""
    if rank.failed and rank.raised and calls:
        kind, _, message = rank.raised.partition(": ")
        calls[-1].done = True
        calls[-1].error = {"type": kind, "message": message, "where": rank.place, "peer": False}
    return calls


def join(job: Job, cases: Sequence[Case], folder: Callable[[], OutputFolder | None]) -> Parity:
    """Become a rank; a rank other than 0 serves here and exits.

    Args:
        job: what runs.
        cases: to choose from; those of as many ranks as there are run.
        folder: makes the folder of the report; called on rank 0.

    Raises:
        CaseError: without torchrun, for an engine, if no case has as many ranks, or if ranks differ.
    """
    try:
        parity = enter(job, cases)
    except CaseError:
        if (here := place()) and here.rank:  # rank 0 says it; torchrun would kill it for our exit
            time.sleep(_SAY_SECONDS)
            _exit(_USAGE)
        raise
    parity.cases = [case for case in cases if parity.size == case.R]
    if not parity.leads:
        _, code = parity.serve()
        parity.leave()
        _exit(code)
    parity.folder = folder()
    if others := len(cases) - len(parity.cases):
        parity.console.print(
            f"{others} cases are left out, since they do not have the {parity.size} ranks of torchrun",
            highlight=False,
        )
    return parity


def enter(job: Job, cases: Sequence[Case]) -> Parity:
    """The part of ``join`` that pytest needs too."""
    here = place()
    if here is None:
        raise CaseError(f"parity runs as a rank of torchrun, which is not around; start it with: {COMMAND}")
    if job.target.kind.own_ranks:
        raise CaseError(f"parity judges a Buffer, and {job.target.name} starts its own ranks; use run")
    if not any(here.size == case.R for case in cases):
        known = ", ".join(map(str, sorted({case.R for case in cases}))) or "none"
        raise CaseError(
            f"torchrun started {here.size} ranks, and no case has R={here.size}; there are R = {known}"
        )
    if reason := too_few_gpus(job, here.local_size):
        raise CaseError(reason)
    return Parity(here, replace(job, world="torchrun"), cases)


def _exit(code: int) -> NoReturn:
    """At once, since torchrun ends what is still there when the first rank has failed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
