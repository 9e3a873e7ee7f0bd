"""How often does a bounded check cry wolf? Cases of real data on a subject that is right, until the time is over.

Bit-exact checks cannot: on correct code they see no difference. The bounded ones (oracle/bounds.py) allow six
standard deviations of a modelled error, and a model may be wrong at a size or a batch that nobody tried. So each
run draws cases of its own: other seeds, token counts, routings, geometries and numbers of ranks. An alarm counts
once a case, however many elements are outside, since errors of one case are not independent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from random import Random

from moonep_validate.cases.case import Case, CaseError, Spec
from moonep_validate.cases.vocabulary import VOCABULARY
from moonep_validate.judge.checks import CHECKS
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.run import run_case

#: Alarms that a run may raise per case of a subject that is right.
BUDGET = 1 / 1000
#: Ranks of a case. An engine's pool has two.
_RANKS, _ENGINE_RANKS = (1, 2, 3, 4, 6, 8), (2,)
#: Cases in a row with the same ranks: a world of processes starts anew for another number.
_BLOCK = 25
_TRIES = 10_000
#: Experts a rank where there are many.
_MANY = (16, 32, 64, 112)
#: Elements of one projection of all experts: larger cases cost more time than they try.
_MOST_WEIGHTS = 1_000_000
_ALARMS = ("failed", "unknown", "hung", "error")


@dataclass
class Alarms:
    """What the drawn cases have shown.

    Attributes:
        cases: cases that ran and whose pass would mean something.
        alarms: how many of them had a failed gating check.
        examined: elements that bounded checks compared.
        outside: how many of them were outside their bound.
        seconds: how long it took.
        lines: the alarming cases, each with the check that failed first.
    """

    cases: int = 0
    alarms: int = 0
    examined: int = 0
    outside: int = 0
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Alarms per case."""
        return self.alarms / self.cases if self.cases else 0.0

    @property
    def upper(self) -> float:
        """The rate is below this with 95% confidence."""
        return upper_bound(self.alarms, self.cases)

    @property
    def over_budget(self) -> bool:
        """Whether more alarms were raised than the budget explains: 95% sure that the rate is above it."""
        return self.alarms > 0 and _at_most(self.alarms - 1, self.cases, BUDGET) >= 0.95

    @property
    def summary(self) -> str:
        """One line."""
        shown = "shown to be kept" if self.upper <= BUDGET else "exceeded" if self.over_budget else "not yet shown"
        return (
            f"{self.alarms} false alarms in {self.cases:,} cases: below {self.upper:.2g} a case (95%), "
            f"the budget of {BUDGET:g} is {shown}; "
            f"{self.outside:,} of {self.examined:,} bounded elements outside, {self.seconds:.0f} s"
        )


def false_alarms(job: Job, seconds: float, seed: int = 0, most: int | None = None) -> Alarms:
    """Run drawn cases of real data until the time is over, or the user stops it: what was counted stays.

    Args:
        job: a subject that is right, without faults.
        seconds: budget; at most one case runs over it.
        seed: the same seed draws the same cases, as far as the time reaches.
        most: no more cases than this.

    Raises:
        CaseError: if the job has faults, or its subject cannot run here.
    """
    if job.faults or job.not_run:
        raise CaseError(job.not_run or "false alarms are counted on a subject that is right: leave --fault out")
    result, start = Alarms(), time.monotonic()
    with suppress(KeyboardInterrupt):
        for case in drawn_cases(job, seed):
            if time.monotonic() - start >= seconds or result.cases == most:
                break
            _count(result, run_case(job, case)[1])
    result.seconds = time.monotonic() - start
    return result


def _count(result: Alarms, verdict: Verdict) -> None:
    """Add one case; a vacuous one, e.g. of two ranks that drew the same tiny payload, tells nothing."""
    if verdict.status not in ("passed", "waived", *_ALARMS):
        return
    bounded = [one for one in verdict.results if CHECKS[one.check].bounded]
    result.cases += 1
    result.examined += sum(one.examined for one in bounded)
    result.outside += sum(finding.count for one in bounded for finding in one.findings)
    if verdict.status in _ALARMS:
        result.alarms += 1
        first = verdict.first
        why = f"{first.check} at {first.stage}" if first else verdict.status
        result.lines.append(f"{verdict.case} ({why})")


# --- which cases are drawn ---


def drawn_cases(job: Job, seed: int = 0) -> Iterator[Case]:
    """Cases of real data that the job's subject supports, without end.

    Raises:
        CaseError: if it supports none.
    """
    supports, ranks = job.subject.supports, _ENGINE_RANKS if job.target.kind.own_ranks else _RANKS
    for block in count():
        draw = Random(f"{seed}/{block}")
        size = draw.choice(ranks)
        for _ in range(_BLOCK):
            yield next(case for case in _candidates(job, draw, size) if supports(case) is None)


def _candidates(job: Job, draw: Random, ranks: int) -> Iterator[Case]:
    """Valid cases for R ranks, some of which a subject may not support."""
    for _ in range(_TRIES):
        try:
            case = _draw(job, draw, ranks)
        except CaseError:  # words that do not go together
            continue
        if case.E * case.H * case.I <= _MOST_WEIGHTS:
            yield case
    raise CaseError("the subject supports no case of real data that could be drawn")


def _draw(job: Job, draw: Random, ranks: int) -> Case:
    """One case.

    Raises:
        CaseError: if its words do not go together.
    """
    bare, whole = not job.target.kind.layer_door, job.target.portable_only
    known = job.target.generations
    generation = draw.choice(known) if len(known) > 1 else known[0]
    per_rank = draw.randint(1, 6) if draw.random() < 0.8 else draw.choice(_MANY)
    top_k = draw.choice((1, 2, 2, 3, 4, 6, 7, 8, 9, 16))
    tokens = draw.choice((1, 2, 7, 16, 16, 33))
    slots = draw.choice((None, draw.randint(1, per_rank), 4)) if generation == "A" else None
    counts = tuple(draw.randint(0, tokens) for _ in range(ranks)) if draw.random() < 0.3 else None
    words = {field: [n for n, word in VOCABULARY.items() if word.field == field] for field in ("model", "format")}
    scenarios = (*["base"] * 6, "marked_slots", "layers", *["combine_only", "replayed_plan"] * bare)
    return Case(
        generation=generation,
        R=ranks,
        E=ranks * per_rank,
        K=top_k,
        S=tokens,
        H=draw.choice((128, 256, 384) if whole else (8, 24, 64, 128, 256, 520)),
        I=draw.choice((128, 256) if whole else (1, 8, 32, 96, 128, 260)),
        slots=slots,
        pad=draw.choice((1, 4, 8, 128)) if bare else draw.choice((4, 128)),
        tokens=counts,
        routing=_routing(draw, ranks * per_rank),
        fill=Spec(draw.choice((*["real"] * 9, "scales"))),
        model=Spec(draw.choice(("moe", *words["model"]))),
        format=Spec(draw.choice((*["bf16"] * 6, *words["format"]))),
        scenario=Spec(draw.choice(scenarios)),
        seed=draw.randrange(2**16),
    )


def _routing(draw: Random, experts: int) -> Spec:
    """A routing with a load that MoonEP evens out, or one without."""
    name = draw.choice(("uniform", "zipf", "lognormal", "hot", "balanced", "repeated"))
    arguments = {
        "zipf": (f"{draw.choice((0.5, 1.0, 2.0))}",),
        "lognormal": (f"{draw.choice((0.5, 1.5))}",),
        "hot": (f"{draw.randrange(experts)}",),
    }
    return Spec(name, arguments.get(name, ()))


# --- what the numbers say ---


def upper_bound(events: int, trials: int, confidence: float = 0.95) -> float:
    """The largest probability that is not excluded by so few events (Clopper and Pearson, one-sided).

    Without an event it is about 3 / trials, the rule of three. To 1e-12.
    """
    if events >= trials:
        return 1.0
    low, high = events / trials, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        if _at_most(events, trials, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def _at_most(events: int, trials: int, p: float) -> float:
    """Probability of at most so many events in independent trials of probability 0 < p < 1."""
    total = 0.0
    for k in range(events + 1):
        ways = math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        total += math.exp(ways + k * math.log(p) + (trials - k) * math.log1p(-p))
    return min(1.0, total)
