"""Do two sides say the same? Five checks of a pair, each with what it compared, and one verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moonep_validate.judge.verdict import EXIT_CODES, Finding, worst
from moonep_validate.served.answers import GREEDY, Answer, Answers
from moonep_validate.served.drift import Drift, Split, Summary, summary
from moonep_validate.served.noise import (
    FEWEST,
    FLOOR,
    MARGIN,
    Noise,
    Test,
    drifts_of,
    fewest_beyond_chance,
    measure,
    test,
)
from moonep_validate.served.sound import unsound

#: Check -> what it promises.
PROMISES = {
    "answered": "Both sides answer the same questions, in full, with numbers",
    "apart": "The two sides were run by themselves: neither is a copy of the other",
    "path": "The path that a side names was used on each of its ranks, for real tokens",
    "layers": "The MoE layer calls that were sampled in an engine keep the contract",
    "tokens": "A different token is a tie within the noise of this pair",
    "drift": "Log probabilities of the same tokens are no further apart than noise",
}
SAME, EXPLAINED, UNEXPLAINED, MISSING = "identical", "explained", "unexplained", "not compared"


@dataclass(frozen=True)
class PairResult:
    """One check of a pair; the fields are those of the suite's other results."""

    check: str
    status: str
    examined: int
    findings: tuple[Finding, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class PromptVerdict:
    """What became of one prompt: ``identical``, ``explained``, ``unexplained`` or ``not compared``."""

    prompt: str
    group: str
    status: str
    split: Split | None = None


@dataclass(frozen=True)
class PairVerdict:
    """The answer for a pair.

    Attributes:
        base, candidate: who answered.
        results: one for each of ``PROMISES``.
        prompts: one for each prompt of the baseline.
        noise: what healthy sides differ by, and how that is known.
        test: the drift against it; None where there is no noise to hold it against.
        drift: in numbers.
    """

    base: str
    candidate: str
    results: tuple[PairResult, ...]
    prompts: tuple[PromptVerdict, ...]
    noise: Noise
    test: Test | None
    drift: Summary

    @property
    def status(self) -> str:
        """The worst of all checks."""
        return worst([result.status for result in self.results])

    @property
    def exit_code(self) -> int:
        """That of the status."""
        return EXIT_CODES[self.status]

    def count(self, status: str) -> int:
        """How many prompts came out so."""
        return sum(one.status == status for one in self.prompts)

    @property
    def power(self) -> str:
        """One sentence: the smallest defect that this comparison would have shown."""
        if self.noise.kind == "float32":
            return f"a single log probability that is off by {FLOOR:.2g} shows"
        if self.test is None:
            return "nothing can be said of what would have shown"
        if self.test.prompts < FEWEST:
            return f"{self.test.prompts} prompts are too few for the test of drift, {FEWEST} are needed"
        tail = f"or {self.test.off_needed} of {len(self.prompts)} prompts far off"
        return f"a drift of {self.test.visible:.2g} times the noise over all prompts shows (95%), {tail}"

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON data."""
        return {
            "kind": "moonep-validate comparison",
            "base": self.base,
            "candidate": self.candidate,
            "status": self.status,
            "exit_code": self.exit_code,
            "results": [asdict(result) | {"promise": PROMISES[result.check]} for result in self.results],
            "prompts": [asdict(one) for one in self.prompts],
            "noise": asdict(self.noise),
            "test": self.test and asdict(self.test),
            "drift": asdict(self.drift),
            "power": self.power,
        }


def judge_pair(
    base: Answers, candidate: Answers, healthy: Sequence[Answers] = (), reference: Answers | None = None
) -> PairVerdict:
    """Judge a candidate against a baseline.

    Args:
        base, candidate: the two sides.
        healthy: further sides that are known to be right; what they differ by from the baseline is noise.
        reference: a third opinion, better than both; the sides' errors against it are compared.
    """
    noise = measure(base, candidate, healthy, reference)
    drifts = drifts_of(base, candidate)
    seen = drifts_of(reference, candidate) if reference is not None and noise.kind == "reference" else drifts
    exact = base.who.dtype == candidate.who.dtype == "float32"
    once = _first_of_each(base)
    sizes, quiet = (
        {name: size for name, size in found.items() if name in once}
        for found in ({name: one.size for name, one in seen.items()}, noise.sizes)
    )
    tested = test(sizes, quiet, exact) if noise.sizes else None
    prompts = tuple(_prompt(one, drifts.get(name), noise) for name, one in base.run(GREEDY).items())
    results = (
        _answered(base, candidate),
        _apart(base, candidate, *healthy, *([reference] if reference else [])),
        _path(base, candidate),
        _layers(base, candidate),
        _tokens(prompts, noise, exact),
        _drift(drifts, noise, tested),
    )
    return PairVerdict(_named(base), _named(candidate), results, prompts, noise, tested, summary(drifts))


def _first_of_each(base: Answers) -> set[str]:
    """Names of prompts, one for each sequence of ids: the same question twice is no second sample."""
    first: dict[bytes, str] = {}
    for name, one in base.run(GREEDY).items():
        first.setdefault(one.asked.tobytes(), name)
    return set(first.values())


def _named(side: Answers) -> str:
    return f"{side.name} ({side.who})" if side.name else str(side.who)


def _prompt(base: Answer, found: Drift | None, noise: Noise) -> PromptVerdict:
    if found is None:
        return PromptVerdict(base.prompt, base.group, MISSING)
    if found.split is None:
        return PromptVerdict(base.prompt, base.group, MISSING if found.cut else SAME)
    status = EXPLAINED if _tie(found.split, noise) else UNEXPLAINED
    return PromptVerdict(base.prompt, base.group, status, found.split)


def _tie(split: Split, noise: Noise) -> bool:
    """Both sides see the two tokens closer together than noise moves them: each of the two by ``largest``."""
    # A token that is not among the largest is further away than a tie can be: NaN compares as false.
    return split.base_gap <= 2 * noise.largest and split.candidate_gap <= 2 * noise.largest


def _answered(base: Answers, candidate: Answers) -> PairResult:
    mine, other = base.run(GREEDY), candidate.run(GREEDY)
    shared = [(mine[name], other[name]) for name in mine if name in other]
    findings = [
        *unsound("base", base),
        *unsound("candidate", candidate),
        *(_unanswered(name, "candidate") for name in mine if name not in other),
        *(_unanswered(name, "base") for name in other if name not in mine),
        *_other_vocabulary(base, candidate),
        *(finding for a, b in shared for finding in _unlike(a, b)),
    ]
    status = "failed" if findings else "passed" if shared else "vacuous"
    reason = "" if shared else "no prompt has an answer of both sides"
    return PairResult("answered", status, len(shared), tuple(findings), reason)


def _unanswered(name: str, side: str) -> Finding:
    return Finding(f"prompt {name}", {}, "an answer of both sides", f"none of the {side}")


def _other_vocabulary(base: Answers, candidate: Answers) -> Iterator[Finding]:
    sizes = base.who.vocab, candidate.who.vocab
    if all(sizes) and sizes[0] != sizes[1]:
        yield Finding("vocabulary of the candidate", {}, f"{sizes[0]} token ids", str(sizes[1]))


def _unlike(a: Answer, b: Answer) -> Iterator[Finding]:
    """Two answers to one prompt that were not asked the same, or of which one ends early."""
    if not _equal(a, b):
        due, came = f"the same {len(a.asked)} token ids", f"other ones ({len(b.asked)})"
        yield Finding(f"prompt {a.prompt}", {}, due, came)
    if not (a.error or b.error) and len(a.tokens) != len(b.tokens) and _prefix(a, b):
        due, came = (f"{len(one.tokens)} tokens ({one.finish})" for one in (a, b))
        yield Finding(f"length of the answer to prompt {a.prompt}", {}, due, came)


def _equal(a: Answer, b: Answer) -> bool:
    return len(a.asked) == len(b.asked) and bool((a.asked == b.asked).all())


def _prefix(a: Answer, b: Answer) -> bool:
    shared = min(len(a.tokens), len(b.tokens))
    return bool((a.tokens[:shared] == b.tokens[:shared]).all())


def _apart(base: Answers, candidate: Answers, *others: Answers) -> PairResult:
    """No side is a copy of another: a copy agrees with itself, and as a measure of noise it excuses any drift."""
    sides = (base, candidate, *others)
    copies = [
        f"{other.name or other.who} and {one.name or one.who} are one recording"
        for place, one in enumerate(sides)
        for other in sides[:place]
        if one is other or (one.recording and one.recording == other.recording)
    ]
    shared = len(base.run(GREEDY).keys() & candidate.run(GREEDY).keys())
    if not copies and base.who == candidate.who and shared and base.name == candidate.name:
        copies = [f"{base.name} is compared with itself"]
    return PairResult("apart", "vacuous" if copies else "passed", shared, (), "; ".join(copies))


def _path(base: Answers, candidate: Answers) -> PairResult:
    """A side that names MoonEP must have dispatched, and used a slot for real tokens, on each rank."""
    reasons, examined = [], 0
    for side in (base, candidate):
        named = "moonep" in f"{side.who.backend} {side.who.expects} {' '.join(side.who.arguments)}".lower()
        if side.who.path is None:
            reasons += [f"{side.who} names moonep, and nothing shows that it was used"] if named else []
            continue
        path = side.who.path
        counts = {
            "dispatches": path.dispatches,
            "used slots": path.slots_used,
            "real tokens in slots": path.real_rows,
        }
        examined += sum(map(len, counts.values()))
        for what, ranks in counts.items():
            idle = [rank for rank, count in enumerate(ranks) if count == 0]
            if idle or (not ranks and what != "real tokens in slots"):
                reasons.append(f"{side.who}: no {what} on rank {', '.join(map(str, idle)) or 'any'}")
    return PairResult(
        "path",
        "vacuous" if reasons else "passed" if examined else "not_applicable",
        examined,
        (),
        "; ".join(reasons),
    )


def _layers(base: Answers, candidate: Answers) -> PairResult:
    """What the checks of the layer said of the calls that taps wrote down."""
    asked = [(side.who, side.who.layers) for side in (base, candidate) if side.who.layers]
    known = [(who, layers) for who, layers in asked if layers.calls]
    status = worst([layers.status for _, layers in known]) if known else "not_applicable"
    reason = "; ".join(f"{who}: {layers.said}" for who, layers in known or asked)
    return PairResult("layers", status, sum(layers.calls for _, layers in known), (), reason)


def _tokens(prompts: Sequence[PromptVerdict], noise: Noise, exact: bool) -> PairResult:
    compared = [one for one in prompts if one.status != MISSING]
    splits = [one for one in compared if one.status == UNEXPLAINED]
    findings = tuple(_said(one, noise) for one in splits)
    if splits and noise.kind == "unknown":
        return PairResult("tokens", "unknown", len(compared), findings, noise.how)
    # In a coarse type a router may flip on rounding, and move a token further than any noise that was measured.
    needed = 1 if exact else fewest_beyond_chance(len(compared), 0, len(noise.sizes))
    if splits and len(splits) < needed:
        reason = (
            f"{len(splits)} unexplained; router flips on rounding can make up to {needed - 1} of {len(compared)}"
        )
        return PairResult("tokens", "passed", len(compared), (), reason)
    return PairResult(
        "tokens", "failed" if splits else "passed" if compared else "vacuous", len(compared), findings
    )


def _said(one: PromptVerdict, noise: Noise) -> Finding:
    assert one.split is not None
    split = one.split
    gaps = (
        f"gaps {split.base_gap:.3g} and {split.candidate_gap:.3g} at the base and here, noise {noise.largest:.2g}"
    )
    return Finding(
        f"token after prompt {one.prompt}",
        {"position": split.position},
        str(split.base),
        f"{split.candidate} ({gaps})",
    )


def _drift(drifts: Mapping[str, Drift], noise: Noise, tested: Test | None) -> PairResult:
    examined = sum(len(one.all) for one in drifts.values())
    if not examined:
        return PairResult("drift", "vacuous", 0, (), "no log probability of the same token came from both sides")
    if not any(one.all.any() for one in drifts.values()):
        return PairResult("drift", "passed", examined)
    if noise.kind == "float32":
        findings = tuple(_beyond(one) for one in drifts.values() if len(one.all) and abs(one.all).max() > FLOOR)
        return PairResult("drift", "failed" if findings else "passed", examined, findings)
    if tested is None:
        advice = "give --healthy (a side that is known to be right) or --reference (a third opinion in float32)"
        return PairResult("drift", "unknown", examined, (), f"{noise.how}; {advice}")
    if tested.failed:
        return PairResult("drift", "failed", examined, tuple(_further(tested, noise)))
    if tested.prompts < FEWEST:
        return PairResult(
            "drift",
            "unknown",
            examined,
            (),
            f"{tested.prompts} prompts; {FEWEST} are needed to tell drift from noise",
        )
    return PairResult("drift", "passed", examined)


def _beyond(one: Drift) -> Finding:
    values = abs(one.all)
    place = int(values.argmax())
    what = "log probability in prompt" if place < len(one.prefill) else "log probability after prompt"
    return Finding(
        f"{what} {one.prompt}",
        {"position": place},
        f"within {FLOOR:.2g}",
        f"{one.all[place]:+.3g}",
        int((values > FLOOR).sum()),
    )


def _further(tested: Test, noise: Noise) -> list[Finding]:
    found = []
    if tested.low > MARGIN:
        found.append(
            Finding(
                "drift over noise, all prompts",
                {},
                f"at most {MARGIN:g}",
                f"{tested.ratio:.3g} (at least {tested.low:.3g})",
            )
        )
    if len(tested.off) >= tested.off_needed:
        names = ", ".join(tested.off[:4])
        found.append(
            Finding(
                "prompts far beyond any noise",
                {},
                f"fewer than {tested.off_needed}",
                f"{len(tested.off)}: {names}",
            )
        )
    return found
