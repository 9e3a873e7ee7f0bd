"""Can the suite fail? Every known fault is seeded into a subject, and the suite has to find each.

A fault is killed if a case fails by a check that is about the fault's contract: a crash counts only where crashing
is what the fault does. It is located if the first finding is at the fault's own stage. A fault that one case alone
kills is thin: if that case changes, nobody sees the fault any more. A check that no fault makes fail is as bad as
a fault that survives: nobody knows whether it can.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from statistics import median
from typing import Any, TypeVar

from moonep_validate.cases.case import Case, CaseError, Spec
from moonep_validate.cases.profiles import for_generations, profile
from moonep_validate.faults import FAULTS, Fault, parse_fault
from moonep_validate.judge.checks import CHECKS
from moonep_validate.judge.stages import PLACE, owned_by
from moonep_validate.judge.verdict import Result, Verdict
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.run import run_case
from moonep_validate.scenarios import SCENARIOS
from moonep_validate.studies.shrink import shrink
from moonep_validate.trace.trace import Trace

T = TypeVar("T")
#: No fault may need more cases than this until the first that kills it.
MOST_CASES = 50
#: So many different cases have to kill a fault; after them, no more are tried.
ENOUGH = 2
#: And of an engine's cases, a fault that it may not be able to show gets no more than these.
_CASES_FOR_OPTIONAL = 16
#: Seconds of silence after which a rank of the reference hangs; its cases take a fraction of one.
DEADLINE = 2.0


@dataclass
class Trial:
    """What became of one fault.

    Attributes:
        id: the fault's text: its id, with the parameters that differ from its own.
        bugs, own_stage: of the fault.
        status: ``killed``, ``survived``, ``crashed`` (only an accident was seen), ``not_exercised`` (it changed no
            recorded byte in any case) or ``not_run``.
        check, stage: the first finding.
        checks: every check that failed in a killing case.
        cases, seconds: spent until the first killing case.
        killers: the killing cases that are no twins in the other generation, no more than were asked for.
        enough: how many were asked for.
        shrunk: the smallest case that fails in the same way, where asked for.
        optional: the subject may have no way to show it: a fault of a bare Buffer's calls, on an engine.
    """

    id: str
    bugs: str
    own_stage: str
    status: str = "not_run"
    check: str = ""
    stage: str = ""
    checks: list[str] = field(default_factory=list)
    cases: int = 0
    seconds: float = 0.0
    killers: list[str] = field(default_factory=list)
    enough: int = ENOUGH
    shrunk: str = ""
    optional: bool = False

    @property
    def case(self) -> str:
        """The first case that killed it; empty if none did."""
        return self.killers[0] if self.killers else ""

    @property
    def thin(self) -> bool:
        """Whether fewer cases kill it than should: a warning."""
        return self.killed and len(self.killers) < self.enough

    @property
    def killed(self) -> bool:
        """Whether the suite found it."""
        return self.status == "killed"

    @property
    def located(self) -> bool:
        """Whether the first finding was at the fault's own stage."""
        return self.killed and self.stage == self.own_stage

    @property
    def gates(self) -> bool:
        """Whether it counts: not if the subject could not show it."""
        return not (self.optional and self.status == "not_exercised")

    @property
    def late(self) -> bool:
        """Whether the first finding was at a later stage than the fault's own."""
        return self.killed and PLACE[self.stage] > PLACE[self.own_stage]

    def to_json(self) -> dict[str, Any]:
        """What became of it as JSON data."""
        known = CHECKS.get(self.check)
        said = {"name": known.name if known else "", "promise": known.promise if known else ""}
        told = {name: getattr(self, name) for name in ("killed", "located", "case", "thin")}
        return {**asdict(self), **said, **told, "bugs": self.bugs.split()}


def _here(job: Job, fault: Fault) -> bool:
    """Whether a fault can show where the job runs."""
    at_door = fault.for_engine in (None, job.target.kind.layer_door)
    return at_door and (job.device == "cuda" or not fault.needs_gpu)


def chosen(job: Job, faults: Sequence[str] = (), kinds: Sequence[str] = ()) -> list[str]:
    """The faults that are seeded, as texts: all that a subject can host, or those asked for.

    Args:
        job: the subject.
        faults: ids, each for all texts that the catalogue has of it, or texts with parameters.
        kinds: only faults that stand for one of these kinds or bugs.

    Raises:
        CaseError: for a fault or a kind that is unknown.
    """
    for text in faults:
        parse_fault(text)
    known = {bug for fault in FAULTS.values() for bug in fault.bugs.split()}
    for kind in kinds:
        if kind not in known:
            raise CaseError(f"--kind {kind}: no fault stands for it; known: {', '.join(sorted(known))}")
    wanted = faults or [fault.id for fault in FAULTS.values() if _here(job, fault)]
    texts = [one for text in wanted for one in (FAULTS[text].texts if text in FAULTS else [text])]
    return [one for one in texts if not kinds or set(kinds) & set(FAULTS[Spec.parse(one).name].bugs.split())]


def case_list(job: Job, most: int | None = MOST_CASES) -> list[Case]:
    """The cases that faults are tried on, cheap ones first.

    First one of each scenario, format and model, then one for each event that cases claim, then the rest in turns.
    """
    own = profile(job.target.kind.profile)
    *others, newest = job.target.generations
    listed = for_generations(own, (newest,)) + [case for case in own if case.generation in others]
    supports = job.subject.supports
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in sorted((case for case in listed if supports(case) is None), key=_cost):
        groups.setdefault(_kind(case), []).append(case)
    turns = range(max((len(group) for group in groups.values()), default=0))
    ordered = [group[turn] for turn in turns for group in groups.values() if turn < len(group)]
    events = {event: case for case in reversed(ordered) for event in case.witnesses}
    return list(dict.fromkeys([*ordered[: len(groups)], *events.values(), *ordered]))[:most]


def _kind(case: Case) -> tuple[object, ...]:
    """What decides which seams a case has."""
    return case.scenario, case.format, case.model


def _cost(case: Case) -> tuple[bool, int]:
    """Cases with batches in flight come last: they find many faults, but late, where the damage shows."""
    work = case.R * case.S * case.K * case.H + case.E * case.I * case.H
    return SCENARIOS[case.scenario.name].overlaps, work


def try_fault(
    job: Job, fault: str, cases: Sequence[Case], shrink_seconds: float = 0.0, enough: int = ENOUGH
) -> Trial:
    """Seed one fault and run cases until enough of them kill it.

    Args:
        job: the subject, without faults.
        fault: its text.
        cases: in the order in which they are tried; after a kill, those that are like it come first.
        shrink_seconds: time to look for the smallest case that kills it in the same way.
        enough: how many killing cases are looked for.
    """
    spec = Spec.parse(fault)
    known = FAULTS[spec.name]
    trial = Trial(fault, known.bugs, known.stage, enough=enough)
    trial.optional = job.target.kind.layer_door and not known.for_engine
    faulty, start = replace(job, faults=(spec,)), time.monotonic()
    waiting = list(cases[:_CASES_FOR_OPTIONAL] if trial.optional else cases)
    while waiting and len(trial.killers) < enough and (trial.killers or trial.cases < MOST_CASES):
        case = waiting.pop(0)
        if _kills(trial, job, faulty, case):
            trial.seconds = trial.seconds or time.monotonic() - start
            waiting = sorted((one for one in waiting if not _twins(one, case)), key=partial(_unlike, case))
    if not trial.killed:
        trial.seconds = time.monotonic() - start
    elif shrink_seconds:
        with suppress(CaseError):  # it needs the cases before it: there is no smallest one
            smallest = shrink(Case.parse(trial.case), lambda one: run_case(faulty, one)[1], shrink_seconds)
            trial.shrunk = str(smallest.case)
    return trial


def _twins(one: Case, other: Case) -> bool:
    """Whether two cases differ in the generation only, or not at all."""
    return str(one).partition("+")[2] == str(other).partition("+")[2]


def _unlike(killer: Case, case: Case) -> bool:
    """Whether a case is of another kind than one that kills."""
    return _kind(case) != _kind(killer)


def _kills(trial: Trial, job: Job, faulty: Job, case: Case) -> bool:
    """Run a case on the faulty subject, and note what it says about the fault; whether it kills it."""
    trace, verdict = run_case(replace(faulty, waivers=""), case, exercised=False)
    if verdict.status == "not_run":
        return False
    first = _finding(verdict, FAULTS[Spec.parse(trial.id).name])
    trial.cases += not trial.killed
    if first is not None:
        if not trial.killed:
            trial.status, trial.check, trial.stage = "killed", first.check, first.stage
        trial.killers.append(str(case))
        trial.checks = sorted({*trial.checks, *_failed(verdict)})
    elif trial.status in ("not_run", "not_exercised", "survived", "crashed"):
        trial.status = _survives(trial.status, job, case, trace, verdict)
    return first is not None


def _survives(so_far: str, job: Job, case: Case, trace: Trace, verdict: Verdict) -> str:
    """What a fault is that a further case has not killed: an accident counts most, then a change of any byte."""
    if verdict.first is not None or so_far == "crashed":
        return "crashed"
    changed = so_far == "survived" or _clean_digest(job, case) != trace.digest()
    return "survived" if changed else "not_exercised"


def _failed(verdict: Verdict) -> set[str]:
    """The checks that count and have failed."""
    return {one.check for one in verdict.results if one.gates and one.status in ("failed", "hung")}


@lru_cache(maxsize=MOST_CASES)
def _clean_digest(job: Job, case: Case) -> str:
    """What a case records without a fault."""
    return run_case(job, case)[0].digest()


def _finding(verdict: Verdict, fault: Fault) -> Result | None:
    """The first finding, if it is about the contract and no accident."""
    first = verdict.first
    if first is None or first.status == "unknown" or (first.check == "F1" and not fault.crashes):
        return None
    return first


def mutate(
    job: Job, faults: Sequence[str], shrink_seconds: float = 0.0, enough: int = ENOUGH, workers: int = 2
) -> Iterator[Trial]:
    """Seed every fault in turn; yields what became of each as it comes.

    An engine has defects of its own: cases that it fails without a fault say nothing about faults.
    """
    cases = case_list(job, None)
    if job.target.kind.layer_door:
        cases = [case for case in cases if run_case(job, case)[1].status == "passed"]
    one = partial(try_fault, job, cases=cases, shrink_seconds=shrink_seconds, enough=enough)
    yield from _shared_out(job, one, faults, workers)


def _shared_out(job: Job, work: Callable[[str], T], items: Sequence[str], workers: int) -> Iterator[T]:
    """Results of ``work`` as they come; the reference runs in threads, so its items go to several processes."""
    if job.runs_in != "threads" or workers < 2 or len(items) < 4:
        yield from map(work, items)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as executor:
        for done in as_completed([executor.submit(work, item) for item in items]):
            yield done.result()


def sharpen(job: Job, matrix: Matrix, workers: int = 2) -> None:
    """Look further where a check has made no fault fail yet: a fault is mostly killed before its own case.

    All cases are looked at here, not only those that faults are tried on. Adds the check to the fault that it
    finds.
    """
    killed = [one.id for one in matrix.trials if one.killed and one.id in FAULTS]
    work = partial(_find_kill, job, faults=killed, cases=case_list(job, None))
    for check, fault in _shared_out(job, work, matrix.blunt, workers):
        for trial in matrix.trials:
            if trial.id == fault:
                trial.checks = sorted({*trial.checks, check})


def _find_kill(job: Job, check: str, faults: Sequence[str], cases: Sequence[Case]) -> tuple[str, str]:
    """A fault that a check makes fail in some case where it compares something; empty if there is none."""
    stage = CHECKS[check].stage if CHECKS[check].function else None
    near = [one for one in faults if stage in (None, FAULTS[Spec.parse(one).name].stage)]
    for case in cases:
        clean = run_case(job, case)[1]
        if not any(result.check == check and result.examined for result in clean.results):
            continue
        for fault in near:
            verdict = run_case(replace(job, faults=(Spec.parse(fault),)), case, exercised=False)[1]
            if check in _failed(verdict):
                return check, fault
    return check, ""


@dataclass
class Matrix:
    """The answer of a whole run.

    Attributes:
        trials: what became of each fault.
        needed: checks that must make some fault fail.
    """

    trials: list[Trial]
    needed: list[str]

    @property
    def kills(self) -> Counter[str]:
        """How many faults each check makes fail."""
        return Counter(check for trial in self.trials for check in trial.checks)

    def found_by(self, check: str) -> list[str]:
        """Ids of the faults that a check makes fail, on whichever ranks and with whichever parameters."""
        return list(dict.fromkeys(Spec.parse(one.id).name for one in self.trials if check in one.checks))

    @property
    def blunt(self) -> list[str]:
        """Checks that no fault makes fail."""
        return [check for check in self.needed if not self.kills[check]]

    @property
    def thin(self) -> list[Trial]:
        """Faults that fewer cases kill than should."""
        return [one for one in self.trials if one.gates and one.thin]

    @property
    def exit_code(self) -> int:
        """0 only if every fault is killed, none is found later than it happens, and every check kills."""
        bad = any(one.gates and (not one.killed or one.late) for one in self.trials)
        return int(bad or bool(self.blunt))

    @property
    def score(self) -> str:
        """One line."""
        counted = [one for one in self.trials if one.gates]
        killed, located = (sum(getattr(one, name) for one in counted) for name in ("killed", "located"))
        slowest = max((one.cases for one in counted if one.killed), default=0)
        return (
            f"{killed} of {len(counted)} faults killed, {located} at their own stage, within {slowest} cases; "
            f"{len(self.needed) - len(self.blunt)} of {len(self.needed)} checks kill one"
        )

    @property
    def median_shrunk(self) -> str:
        """Ranks, experts and tokens of the median shrunk case; empty if none was shrunk."""
        shrunk = [Case.parse(one.shrunk) for one in self.trials if one.shrunk]
        if not shrunk:
            return ""
        ranks, experts, tokens = (median(getattr(case, name) for case in shrunk) for name in ("R", "E", "S"))
        return f"{ranks:g} ranks, {experts:g} experts, {tokens:g} tokens, of {len(shrunk)} faults"

    def to_json(self) -> dict[str, Any]:
        """The matrix as JSON data."""
        return {
            "faults": [trial.to_json() for trial in self.trials],
            "checks": {check: self.kills[check] for check in self.needed},
            "exit_code": self.exit_code,
        }


def needed_checks(job: Job, whole: bool) -> list[str]:
    """The checks that must kill: all on a bare Buffer, and on an engine those of the stages that are its own.

    Args:
        job: the subject.
        whole: whether the whole catalogue runs; for a part of it no check is needed.
    """
    if not whole:
        return []
    if job.target.kind.layer_door:
        own = owned_by("engine")
        return [check.id for check in CHECKS.values() if check.function and check.stage in own]
    return [check.id for check in CHECKS.values() if not (check.about_callers or check.needs_gpu)]
