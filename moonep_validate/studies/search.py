"""Which case strains the planner most, and does any case fail? Cases drawn by hypothesis, until the time is over.

Hypothesis only draws the cases and climbs towards larger stress figures; its shrinker is off, since ``shrink.py``
shrinks cases from every source. It is imported when a search starts, so the package does not depend on it.
"""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from moonep_validate.cases.case import Case, CaseError, Spec
from moonep_validate.cases.layout import Ints, Layout
from moonep_validate.data.routing import topk_ids
from moonep_validate.judge.oracle.plan import ExpectedPlan, make_plan
from moonep_validate.judge.oracle.statistics import plan_stats
from moonep_validate.judge.verdict import Verdict
from moonep_validate.studies.shrink import Signature, shrink, signature

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

JudgeCase = Callable[[Case], Verdict]

#: Odd ones and powers of two; 128 is what kernels ask for.
PADS = (1, 2, 3, 4, 8, 16, 128)
ALL_RANKS = tuple(range(1, 9))
SCENARIOS = (
    "base",
    "two_poisons",
    "marked_slots",
    "variants",
    "combine_only",
    "dispatch_only",
    "packed",
    "grads",
    "replayed_plan",
    "life",
    "refusals",
    "destructive",
)
#: Scenarios that ``fill:scales`` can have; experts a rank where there are many.
_SCALED = ("base", "two_poisons", "marked_slots", "grouped")
_MANY = (16, 32, 48, 64, 112)
_MAX_TABLE = 200  # ids; beyond that, drawing them costs more than judging the case
_BAD = ("failed", "hung", "unknown", "error")
_BATCH = 40  # cases: the first half is random, the second climbs
_LEAST_CANDIDATES = 10  # a case so slow that fewer fit into the time left is not shrunk


@dataclass
class SearchResult:
    """What a search has seen.

    Attributes:
        tried: cases judged, those of the shrinker aside.
        seconds: how long it took.
        worst: for each figure of ``stress``, the largest value and the first case that reached it.
        failures: one verdict for each distinct way to fail, of the shrunk case.
        statuses: how often each status occurred among the cases tried.
    """

    tried: int = 0
    seconds: float = 0.0
    worst: dict[str, tuple[float, Case]] = field(default_factory=dict)
    failures: list[Verdict] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def vacuous(self) -> int:
        """Cases whose pass means nothing, e.g. since two ranks drew the same tiny payload."""
        return self.statuses["vacuous"]


def search(
    judge_case: JudgeCase,
    seconds: float,
    seed: int = 0,
    generations: Sequence[str] = ("A", "B"),
    portable: bool = False,
) -> SearchResult:
    """Draw, judge and climb until the time is over; failures are shrunk at once, each in half of the time left.

    The cases of a batch have one number of ranks, since a world of processes starts anew for another number.

    Args:
        judge_case: runs one case.
        seconds: budget; at most one case or one candidate runs over it.
        seed: the same seed draws the same cases, as far as the time reaches.
        generations: API generations that the subject has.
        portable: draw only what real hardware accepts.

    Raises:
        CaseError: if hypothesis is not installed.
    """
    _hypothesis()
    hunt = _Hunt(judge_case, time.monotonic(), seconds)
    order = np.random.default_rng(seed).permutation(ALL_RANKS).tolist()
    batch = 0
    while hunt.left > 0:
        ranks = order[batch % len(order)]
        _run_batch(hunt, f"{seed}/{batch}", case_strategy(generations, portable, [ranks]))
        batch += 1
    hunt.result.seconds = time.monotonic() - hunt.start
    return hunt.result


def lines(result: SearchResult) -> list[str]:
    """``figure value case``, a line for each figure."""
    return [f"{figure} {value:.6g} {case}" for figure, (value, case) in result.worst.items()]


# --- how hard a case is for the planner ---


def stress(case: Case) -> dict[str, float]:
    """Figures of the plan that the oracle makes for a case; the larger, the harder.

    Returns:
        ``slots_used``: slots of the fullest rank / slots. ``remote_reads``: (rank, expert) pairs without a slot.
        ``rows_moved``, ``padding``: shares of all rows. ``capacity``: last group end of the fullest rank / NvS.
        ``imbalance``: largest home load / mean. ``quotas``: pairs of a donor and a receiver.
        ``donor_receivers``: ranks that are both. ``split``: ranks that the most divided expert has rows on.
        ``ties``: see ``_ties``. ``duplicates``: rows beyond a token's first on a rank, per token.
    """
    layout = Layout.of(case)
    topk = np.stack([topk_ids(case, rank).numpy() for rank in range(case.R)])
    plan = make_plan(topk, layout)
    stats = plan_stats(plan, 1)
    gives, receives = plan.quotas.any(axis=1), plan.quotas.any(axis=0)
    return {
        "slots_used": max(stats["slots_used_per_rank"]) / layout.num_slots,
        "remote_reads": float(stats["experts_read_remotely"]),
        "rows_moved": stats["rows_moved"] / stats["rows"],
        "padding": stats["padding_ratio"],
        "capacity": stats["capacity_utilisation"],
        "imbalance": stats["load_imbalance"],
        "quotas": float(np.count_nonzero(plan.quotas)),
        "donor_receivers": float((gives & receives).sum()),
        "split": float((plan.alloc > 0).sum(axis=1).max()),
        "ties": float(_ties(plan)),
        "duplicates": float((plan.dst < 0).sum() / (layout.R * layout.S)),
    }


def _ties(plan: ExpectedPlan) -> int:
    """Choices that only the tie-break settles: pairs of equal balances of ranks, and of equal experts of a donor.

    Equal loads at the start of the planner's loops, which is where ties are dense; later ones are not counted.
    """
    layout = plan.layout
    loads = plan.alloc.sum(axis=1).reshape(layout.R, -1)  # [R, E/R]
    balance = loads.sum(axis=1) - layout.capacity
    donors = loads[plan.quotas.any(axis=1)]
    return _equal_pairs(balance[balance != 0]) + sum(_equal_pairs(own[own > 0]) for own in donors)


def _equal_pairs(values: Ints) -> int:
    """Neighbours that are equal when the values ``[n]`` are sorted."""
    return len(values) - len(np.unique(values))


# --- which cases are drawn ---


def case_strategy(
    generations: Sequence[str] = ("A", "B"), portable: bool = False, ranks: Sequence[int] = ALL_RANKS
) -> SearchStrategy[Case]:
    """Small valid cases of every routing, fill, format, model and scenario.

    Args:
        generations: which to draw from.
        portable: only what real hardware accepts: H and I of 128, R even or E/R a multiple of 4.
        ranks: values of R.

    Raises:
        CaseError: if hypothesis is not installed.
    """
    strategies = _hypothesis().strategies
    drawn: SearchStrategy[Case] = strategies.composite(_draw_case)(
        tuple(generations), portable, tuple(ranks), strategies
    )
    return drawn


def _draw_case(
    draw: DrawFn, generations: tuple[str, ...], portable: bool, ranks: tuple[int, ...], st: Any
) -> Case:
    """Sizes first, then the words that are valid for them: nothing is filtered.

    Every other case is ``base``, since the planner sees no scenario and the others take several times as long.
    """
    generation = draw(st.sampled_from(generations))
    R = draw(st.sampled_from(ranks))
    per_rank = 4 if portable and R % 2 else draw(st.integers(1, 6))
    scenario = draw(st.one_of(st.just("base"), st.sampled_from(SCENARIOS)))
    S = draw(st.integers(1, 24))
    plain = Case(
        generation=generation,
        R=R,
        E=R * per_rank,
        K=draw(st.one_of(st.integers(1, 8), st.integers(1, 8), st.integers(9, 16))),
        S=S,
        H=128 if portable else 8 * draw(st.integers(1, 8)),
        I=128 if portable else draw(st.integers(1, 64)),
        slots=draw(_slots(generation, scenario, per_rank, st)),
        pad=draw(st.sampled_from(PADS)),
        tokens=draw(st.one_of(st.none(), st.none(), st.tuples(*[st.integers(0, S)] * R))),
        fill=Spec(draw(st.sampled_from(("ints", "real", "ulp", *["cancel"] * 3 * (scenario == "combine_only"))))),
        scenario=Spec(scenario),
        seed=draw(st.integers(0, 2**16)),
    )
    varied = _varied(draw, plain, portable, st)
    return _but(varied, routing=draw(draw(st.sampled_from(_routings(varied, st)))))


def _varied(draw: DrawFn, case: Case, portable: bool, st: Any) -> Case:
    """Another fill, format or model, or many experts, in every third case where the words go together."""
    blocks = {name: 128 if portable else 32 * draw(st.integers(1, 2)) for name in ("H", "I")}
    fill: dict[str, Any] = {"fill": Spec("scales"), "scenario": Spec(draw(st.sampled_from(_SCALED))), **blocks}
    changes: list[dict[str, Any]] = [
        fill,
        {"E": case.R * draw(st.sampled_from(_MANY)), **_smallest(case, portable)},
    ]
    if not portable:
        top_k = min(case.K, case.experts_per_rank)
        changes += [
            {"format": Spec("mxfp4"), **blocks},
            {"format": Spec("fp8"), "H": 128, "I": 128},
            {"model": Spec("k3"), "fill": Spec("real"), "tokens": None, "K": top_k},
        ]
    return _but(case, **draw(st.sampled_from([*[{}] * 2 * len(changes), *changes])))


def _smallest(case: Case, portable: bool) -> dict[str, int]:
    """Widths at which many experts cost little."""
    return {} if portable else {"H": 8, "I": min(case.I, 8)}


def _but(case: Case, **changes: Any) -> Case:
    """The case with changes, or as it is where they do not go together with its other words."""
    try:
        return case.but(**changes)
    except CaseError:
        return case


def _slots(generation: str, scenario: str, per_rank: int, st: Any) -> Any:
    """Generation A: too few slots, ``E/R``, or one more than can be used; training needs ``E/R``."""
    if generation == "B" or scenario in ("grads", "replayed_plan"):
        return st.none()
    return st.one_of(st.none(), st.integers(1, per_rank + 1))


def _routings(case: Case, st: Any) -> list[SearchStrategy[Spec]]:
    """One strategy for each routing that can be what its name says in this case."""

    def word(name: str, argument: Any = None) -> Any:
        return st.just(Spec(name)) if argument is None else argument.map(lambda value: Spec(name, (str(value),)))

    sharpness = st.integers(0, 16).map(lambda quarters: quarters / 4)
    largest_maxvio = case.E * -(-case.K // case.E) / case.K - 1
    found = [
        *map(word, ("uniform", "balanced", "all_local", "round_robin", "per_rank", "repeated", "ties")),
        word("hot", st.integers(0, case.E - 1)),
        word("hot_rank", st.integers(0, case.R - 1)),
        word("zipf", sharpness),
        word("lognormal", sharpness),
        word("maxvio", st.integers(0, int(largest_maxvio * 4)).map(lambda quarters: quarters / 4)),
    ]
    size = case.R * case.S * case.K
    if size <= _MAX_TABLE:
        ids = st.lists(st.integers(0, case.E - 1), min_size=size, max_size=size)
        found.append(ids.map(lambda drawn: Spec("table", tuple(map(str, drawn)))))
    if case.E >= 2:
        found.append(word("empty_experts", st.integers(1, case.E - 1)))
    return found + [word(name) for name in ("all_remote", "chain", "overflow") if _fits(case, name)]


def _fits(case: Case, routing: str) -> bool:
    """Whether the case can have a routing without arguments; its limits have one home, in case.py."""
    try:
        case.but(routing=Spec(routing))
    except CaseError:
        return False
    return True


def drawn(
    seed: str, generations: Sequence[str] = ("A", "B"), portable: bool = False, ranks: int = 4
) -> Iterator[Case]:
    """The cases of a seed for R ranks, without end; see ``case_strategy``."""
    for batch in count():
        found: list[Case] = []
        _given(f"{seed}/{batch}", case_strategy(generations, portable, [ranks]), found.append)
        yield from found


# --- the loop ---


@dataclass
class _Hunt:
    """A search under way.

    Attributes:
        start: monotonic time.
        seconds: budget.
        judged: cases seen, since hypothesis may draw one twice.
        known: signatures of failures seen.
    """

    judge_case: JudgeCase
    start: float
    seconds: float
    result: SearchResult = field(default_factory=SearchResult)
    judged: set[Case] = field(default_factory=set)
    known: set[Signature] = field(default_factory=set)

    @property
    def left(self) -> float:
        """Seconds; negative when the time is over."""
        return self.start + self.seconds - time.monotonic()

    def visit(self, case: Case) -> dict[str, float]:
        """Judge a case that is new, and return its figures for climbing."""
        figures = stress(case)
        if case not in self.judged:
            self.judged.add(case)
            for figure, value in figures.items():
                if figure not in self.result.worst or value > self.result.worst[figure][0]:
                    self.result.worst[figure] = value, case
            self._judge(case)
        return figures

    def _judge(self, case: Case) -> None:
        start = time.monotonic()
        verdict = self.judge_case(case)
        self.result.tried += 1
        self.result.statuses[verdict.status] += 1
        found = _signature(verdict)
        if verdict.status in _BAD and found not in self.known:
            self.known.add(found)
            self.result.failures.append(self._smallest(verdict, time.monotonic() - start))

    def _smallest(self, verdict: Verdict, took: float) -> Verdict:
        """The verdict of the shrunk case; an error of the suite has no finding to keep, so it stays as it is."""
        if verdict.first is None or took * _LEAST_CANDIDATES > self.left:
            return verdict
        verdicts = {verdict.case: verdict}

        def judge_once(case: Case) -> Verdict:
            if case not in verdicts:
                verdicts[case] = self.judge_case(case)
            return verdicts[case]

        return verdicts[shrink(verdict.case, judge_once, self.left / 2).case]


def _signature(verdict: Verdict) -> Signature:
    """The way in which a case failed; that of an error of the suite is its status."""
    return signature(verdict) or (verdict.status, "", "")


def _run_batch(hunt: _Hunt, seed: str, cases: SearchStrategy[Case]) -> None:
    """One run of hypothesis. Its climbing starts afresh in each, so that a search is not stuck on one hill."""
    h = _hypothesis()

    def one(case: Case) -> None:
        if hunt.left > 0:  # hypothesis cannot be told to stop early: the rest of the batch is drawn, not judged
            for figure, value in hunt.visit(case).items():
                h.target(value, label=figure)

    _given(seed, cases, one)


def _given(seed: str, cases: SearchStrategy[Case], one: Callable[[Case], None]) -> None:
    """Call ``one`` on a batch of cases; the same seed draws the same ones."""
    h = _hypothesis()
    settings = h.settings(
        max_examples=_BATCH,
        phases=(h.Phase.generate, h.Phase.target),
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(h.HealthCheck),
    )
    h.seed(seed)(settings(h.given(cases)(lambda case: one(case))))()


def _hypothesis() -> Any:
    try:
        return importlib.import_module("hypothesis")
    except ImportError:
        raise CaseError(
            "search draws its cases with hypothesis, which is missing: pip install hypothesis"
        ) from None
