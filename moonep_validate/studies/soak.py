"""Does anything break or leak over hours? Drawn cases in rounds, in workers that are watched while they run.

Twenty cases are drawn for each number of ranks; a later round runs the same cases with another seed, so that the
data is always new, and what a subject rightly keeps for a size is there after the first round. Case n follows
from n: a soak that was interrupted goes on with the next one. What a leak is: leaks.py.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from moonep_validate.cases.case import Case
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.job import Job
from moonep_validate.studies.leaks import Series, leaks
from moonep_validate.studies.search import drawn
from moonep_validate.worlds import held, processes

#: Numbers of ranks: few enough for the workers of all of them to live at a time. An engine's pool has two.
_RANKS, _ENGINE_RANKS = (2, 4), (2,)
#: Cases of one number of ranks, and after how many of them its workers are looked at.
_CASES, _EVERY = 20, 4
_SEEDS = 2**16
_BAD = ("failed", "hung", "unknown", "error")
#: Failures that are kept with their text.
_KEPT = 20


@dataclass
class Soak:
    """A soak under way, or one that ended.

    Attributes:
        cases: case lines that were drawn; each round runs all of them.
        next: number of the case that runs next.
        spent: seconds.
        statuses: how often each status occurred.
        failures: the first failures, each as it was told.
        series: what each process held.
    """

    cases: list[str]
    next: int = 0
    spent: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)

    @property
    def leaks(self) -> list[str]:
        """What grows without end, a sentence each."""
        return list(dict.fromkeys(line for one in self.series for line in leaks(one)))

    @property
    def unwatched(self) -> list[str]:
        """Ranks of which no process was watched for long enough."""
        judged = {one.who for one in self.series if one.judged}
        sizes = sorted({Case.parse(line).R for line in self.cases})
        return [who for size in sizes for rank in range(size) if (who := _who(rank, size)) not in judged]

    @property
    def status(self) -> str:
        """``failed``, ``vacuous`` if too little was seen for a pass, or ``passed``."""
        worst = [status for status in ("error", "hung", "failed", "unknown") if self.statuses.get(status)]
        if worst or self.leaks:
            return worst[0] if worst else "failed"
        return "passed" if self.statuses.get("passed") and not self.unwatched else "vacuous"

    def case(self, number: int) -> Case:
        """The case with a number: those drawn in their order, in each round with another seed."""
        turn, place = divmod(number, len(self.cases))
        case = Case.parse(self.cases[place])
        return case.but(seed=(case.seed + turn) % _SEEDS)


def begin(job: Job, seed: int, ranks: int | None) -> Soak:
    """Draw the cases of a soak.

    Raises:
        CaseError: if hypothesis is not installed.
    """
    sizes = (ranks,) if ranks else _ENGINE_RANKS if job.target.kind.own_ranks else _RANKS
    supports, target = job.subject.supports, job.target
    lines: list[str] = []
    for size in sizes:
        candidates = drawn(f"soak/{seed}", target.generations, target.portable_only, size)
        fine = (case for case in candidates if not case.refusal and supports(case) is None)
        lines += map(str, islice(fine, _CASES))
    return Soak(lines)


def go_on(soak: Soak, job: Job, judge_case: Callable[[Case], Verdict], seconds: float) -> Iterator[Verdict]:
    """Run cases until ``seconds`` are spent in all; the soak always says what is known by now.

    Yields:
        Each verdict, when the soak has it.
    """
    watch = Watch(job)
    start, before = time.monotonic(), soak.spent
    while soak.spent < seconds:
        case = soak.case(soak.next)
        verdict = judge_case(case)
        watch.look(soak, case)
        # From here on the case is done: one that is interrupted before runs again when the soak is resumed.
        soak.next += 1
        soak.spent = before + time.monotonic() - start
        soak.statuses = dict(Counter(soak.statuses) + Counter([verdict.status]))
        if verdict.status in _BAD and len(soak.failures) < _KEPT:
            soak.failures.append(verdict.diagnosis)
        yield verdict


class Watch:
    """Looks at the workers after every few cases.

    Args:
        job: whose workers.
    """

    def __init__(self, job: Job) -> None:
        names = (job.target.name, job.experts)
        self.packages = sorted({name.partition(":")[0].partition(".")[0] for name in names} - {"reference"})
        self.deadline = job.deadline
        self._of: dict[int, Series] = {}
        self._cases: Counter[int] = Counter()

    def look(self, soak: Soak, case: Case) -> None:
        """After a case: every few cases of as many ranks, a sample of each of their workers."""
        self._cases[case.R] += 1
        if self._cases[case.R] % _EVERY:
            return
        for pool in processes.living(case.R):
            pool.watched = True
            replies = pool.run(json.dumps({"held": self.packages}).encode(), self.deadline)
            for rank, (worker, reply) in enumerate(zip(pool.workers, replies, strict=False)):
                word = processes.answer_of(reply)
                self._series(soak, worker.pid, _who(rank, case.R)).add(
                    self._cases[case.R], held.told(word, held.seen(worker.pid))
                )
        self._series(soak, 0, "this machine").add(sum(self._cases.values()), held.shared())

    def _series(self, soak: Soak, pid: int, who: str) -> Series:
        """The series of a process; one that is new begins one."""
        if pid not in self._of:
            self._of[pid] = Series(who)
            soak.series.append(self._of[pid])
        return self._of[pid]


def _who(rank: int, size: int) -> str:
    return f"rank {rank} of {size}"
