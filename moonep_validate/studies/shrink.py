"""What is the smallest case that fails in the same way? One greedy shrinker for all sources of cases.

A candidate counts if its first finding has the same status, stage and check. Passes run from the coarse (fewer
ranks) to the fine (one token less), and start over after each success, until none helps. A case that fails behind
others only is kept as it is; what is shrunk then is the list of cases before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from moonep_validate.cases.case import Case, CaseError, Spec
from moonep_validate.data import routing
from moonep_validate.formats.stored import FORMATS
from moonep_validate.judge.verdict import Verdict

Signature = tuple[str, str, str]


@dataclass(frozen=True)
class Shrunk:
    """A smallest case.

    Attributes:
        case: it.
        tried: how many candidates ran.
        complete: whether no candidate helped any more, or the budget ended before that.
    """

    case: Case
    tried: int
    complete: bool


def signature(verdict: Verdict) -> Signature | None:
    """What must stay the same while shrinking: (status, stage, check), or None for a case without finding."""
    first = verdict.first
    return (first.status, first.stage, first.check) if first else None


def shrink(case: Case, judge_case: Callable[[Case], Verdict], seconds: float) -> Shrunk:
    """Shrink a failing case.

    Args:
        case: it must fail.
        judge_case: runs one case.
        seconds: budget.

    Raises:
        CaseError: if the case has no finding.
    """
    wanted = signature(judge_case(case))
    if wanted is None:
        raise CaseError(f"{case} has no failing check: there is nothing to shrink")
    end, tried = time.monotonic() + seconds, 0
    seen = {case}
    progress = True
    while progress:
        progress = False
        for candidate in _candidates(case):
            if candidate in seen:
                continue
            if time.monotonic() > end:
                return Shrunk(case, tried, complete=False)
            seen.add(candidate)
            tried += 1
            if signature(judge_case(candidate)) == wanted:
                case, progress = candidate, True
                break
    return Shrunk(case, tried, complete=True)


@dataclass(frozen=True)
class Needed:
    """Cases that fail one after the other in new workers.

    Attributes:
        cases: in order; the last one is the case that fails.
        repeated: whether it failed again behind the others; else nothing that was tried shows it again.
        tried: how many sequences ran.
        complete: whether no shorter one was found, or the budget ended before that.
    """

    cases: tuple[Case, ...]
    repeated: bool
    tried: int
    complete: bool


def shrink_sequence(
    before: Iterable[Case],
    case: Case,
    wanted: Signature,
    judge_last: Callable[[tuple[Case, ...]], Verdict],
    seconds: float,
) -> Needed:
    """Find the fewest cases that must run before one, in the same workers, so that it fails as it did.

    Longer and longer ends of the run are tried first, since a case mostly suffers from one shortly before it; then
    parts of that end are left out, down to single cases.

    Args:
        before: the cases that ran before it, in order.
        case: it.
        wanted: how it failed.
        judge_last: runs cases in new workers, in order; the verdict on the last.
        seconds: budget; the shortest end is tried in any case.
    """
    behind, end, tried = tuple(before), time.monotonic() + seconds, 0

    def fails(some: tuple[Case, ...]) -> bool:
        nonlocal tried
        tried += 1
        return signature(judge_last((*some, case))) == wanted

    needed = next((some for some in _ends(behind, end) if fails(some)), None)
    if needed is None:
        return Needed((*behind, case), repeated=False, tried=tried, complete=time.monotonic() <= end)
    size = len(needed)
    while size := size // 2:
        start = 0
        while start < len(needed):
            if time.monotonic() > end:
                return Needed((*needed, case), repeated=True, tried=tried, complete=False)
            shorter = needed[:start] + needed[start + size :]
            if shorter and fails(shorter):
                needed = shorter
            else:
                start += size
    return Needed((*needed, case), repeated=True, tried=tried, complete=True)


def _ends(cases: tuple[Case, ...], end: float) -> Iterator[tuple[Case, ...]]:
    """The last 1, 2, 4, ... of some cases, then all of them, until the time is over."""
    size = 1
    while cases and (size == 1 or time.monotonic() <= end):
        yield cases[-size:]
        if size >= len(cases):
            return
        size = min(2 * size, len(cases))


def _candidates(case: Case) -> Iterator[Case]:
    """Smaller cases, the most promising first; those that cannot exist are left out."""
    for changes in _changes(case):
        try:
            yield case.but(**changes)
        except CaseError:
            continue


def _changes(case: Case) -> Iterator[dict[str, object]]:
    if case.witnesses:
        yield {"witnesses": ()}
    if case.scenario.name != "base":
        yield {"scenario": Spec("base")}
    if case.tokens:
        yield {"tokens": None}
    yield from _geometry(case)
    if case.format.name != "bf16":
        yield {"format": Spec("bf16")}
    width = max(8, FORMATS[case.format.name].block)
    for name, small in (("H", width), ("I", width), ("pad", 1), ("seed", 0)):
        if getattr(case, name) != small and (name == "seed" or getattr(case, name) > small):
            yield {name: small}
    if case.fill.name != "ints":
        yield {"fill": Spec("ints")}
    if case.routing.name != "table":
        ids = [str(e) for rank in range(case.R) for e in routing.topk_ids(case, rank).flatten().tolist()]
        yield {"routing": Spec("table", tuple(ids)), "tokens": None}
    else:
        yield from _simpler_tables(case)


def _geometry(case: Case) -> Iterator[dict[str, object]]:
    """Fewer ranks, experts per rank, tokens and routes; the routing follows."""
    per_rank = case.experts_per_rank
    for ranks in _smaller(case.R):
        yield from _resized(case, R=ranks, E=ranks * per_rank)
    for experts in _smaller(per_rank):
        yield from _resized(case, E=case.R * experts)
    for tokens in _smaller(case.S):
        yield from _resized(case, S=tokens)
    for top_k in _smaller(case.K):
        yield from _resized(case, K=top_k)


def _smaller(value: int) -> list[int]:
    """1, halves, and one less."""
    return sorted({small for small in (1, value // 2, value - 1) if 1 <= small < value})


def _resized(case: Case, **sizes: int) -> Iterator[dict[str, object]]:
    if case.routing.name != "table":
        yield {**sizes, "tokens": None}
        if case.routing.name == "hot":
            yield {**sizes, "tokens": None, "routing": Spec("hot", ("0",))}
        return
    R, S, K = (sizes.get(name, getattr(case, name)) for name in "RSK")
    per_rank, smaller = case.experts_per_rank, sizes.get("E", case.E) // sizes.get("R", case.R)
    ids = [int(expert) for expert in case.routing.args]
    kept = [ids[(r * case.S + s) * case.K + k] for r in range(R) for s in range(S) for k in range(K)]
    # An expert keeps its home rank (modulo the ranks that are left) and its place there.
    moved = [(e // per_rank) % R * smaller + e % per_rank % smaller for e in kept]
    yield {**sizes, "tokens": None, "routing": Spec("table", tuple(map(str, moved)))}


def _simpler_tables(case: Case) -> Iterator[dict[str, object]]:
    """Drop the token at one place on every rank, or send one route to expert 0."""
    size = case.K
    ids = case.routing.args
    if case.S > 1:
        for s in range(case.S):
            kept = [ids[(r * case.S + t) * size :][:size] for r in range(case.R) for t in range(case.S) if t != s]
            yield {"S": case.S - 1, "routing": Spec("table", tuple(e for token in kept for e in token))}
    for place, expert in enumerate(ids):
        if expert != "0":
            yield {"routing": Spec("table", (*ids[:place], "0", *ids[place + 1 :]))}
