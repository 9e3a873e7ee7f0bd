"""How far are two answers apart? Log probabilities of the same tokens after the same tokens, place by place.

Only places with equal inputs are compared: all of a prompt, the answer up to and with the first different token,
and all of an answer that was forced. So drift does not depend on which tokens came.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

from moonep_validate.served.answers import Answer, Floats


@dataclass(frozen=True)
class Split:
    """The first place at which two answers to one prompt differ.

    Attributes:
        position: index of the token.
        base, candidate: the two tokens.
        base_gap, candidate_gap: by how much each side prefers its own token to the other's; NaN where the other
            token is not among the largest that were given.
    """

    position: int
    base: int
    candidate: int
    base_gap: float
    candidate_gap: float


@dataclass(frozen=True, eq=False)
class Drift:
    """Two answers to one prompt.

    Attributes:
        prompt, group: of which.
        prefill: float64, candidate minus base at each token of the prompt (and of a forced answer).
        decode: float64, the same at each token that came, up to the first different one.
        kl: float64, Kullback-Leibler divergence over the largest at each place of ``decode``, a lower bound.
        split: the first different token, or None.
        cut: the answers are equal as far as the shorter one goes, and one is shorter.
    """

    prompt: str
    group: str
    prefill: Floats
    decode: Floats
    kl: Floats
    split: Split | None
    cut: bool

    @property
    def all(self) -> Floats:
        """All differences."""
        return np.concatenate([self.prefill, self.decode])

    @property
    def size(self) -> float:
        """Root mean square of the differences; NaN for none."""
        values = self.all
        return float(np.sqrt(np.mean(values**2))) if len(values) else float("nan")


def drift(base: Answer, candidate: Answer, forced: Iterable[tuple[Answer, Answer]] = ()) -> Drift:
    """Compare two answers to one prompt.

    Args:
        base, candidate: greedy answers.
        forced: pairs of forced answers of the two sides with the same tokens.
    """
    shared = min(len(base.tokens), len(candidate.tokens))
    differ = np.flatnonzero(base.tokens[:shared] != candidate.tokens[:shared])
    end = int(differ[0]) if len(differ) else shared
    prefill = [candidate.prompt_logprobs - base.prompt_logprobs] if _both_prompts(base, candidate) else []
    prefill += [mine.logprobs - theirs.logprobs for theirs, mine in forced]
    split = _split(base, candidate, end) if len(differ) else None
    return Drift(
        base.prompt,
        base.group,
        _known(np.concatenate(prefill)) if prefill else np.zeros(0),
        _known(candidate.logprobs[:end] - base.logprobs[:end]),
        _divergence(base, candidate, end),
        split,
        not len(differ) and len(base.tokens) != len(candidate.tokens),
    )


def _both_prompts(base: Answer, candidate: Answer) -> bool:
    return len(base.prompt_logprobs) > 0 and len(candidate.prompt_logprobs) > 0


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def _split(base: Answer, candidate: Answer, place: int) -> Split:
    mine, other = int(base.tokens[place]), int(candidate.tokens[place])
    return Split(place, mine, other, _gap(base, place, mine, other), _gap(candidate, place, other, mine))


def _gap(answer: Answer, place: int, own: int, other: int) -> float:
    """Log probability of the own token minus that of the other one."""
    return _of(answer, place, own) - _of(answer, place, other)


def _of(answer: Answer, place: int, token: int) -> float:
    if token == answer.tokens[place]:
        return float(answer.logprobs[place])
    if len(answer.top_ids) <= place:
        return float("nan")
    found = np.flatnonzero(answer.top_ids[place] == token)
    return float(answer.top_logprobs[place][found[0]]) if len(found) else float("nan")


def _divergence(base: Answer, candidate: Answer, end: int) -> Floats:
    """Sum of p * (log p - log q) over the tokens that both sides list, and of the rest as one token."""
    if not end or not base.top_ids.size or not candidate.top_ids.size:
        return np.zeros(0)
    ids, others = base.top_ids[:end], candidate.top_ids[:end]
    same = (ids[:, :, None] == others[:, None, :]) & (ids >= 0)[:, :, None]
    listed, where = same.any(axis=2), same.argmax(axis=2)
    p = np.where(listed, base.top_logprobs[:end], -np.inf)
    q = np.where(listed, np.take_along_axis(candidate.top_logprobs[:end], where, axis=1), 0.0)
    terms = np.where(listed, np.exp(p) * (np.where(listed, p, 0.0) - q), 0.0).sum(axis=1)
    rest_p = np.clip(1.0 - np.where(listed, np.exp(p), 0.0).sum(axis=1), 0.0, None)
    rest_q = np.clip(1.0 - np.where(listed, np.exp(q), 0.0).sum(axis=1), 1e-300, None)
    rest = np.where(rest_p > 0, rest_p * (np.log(np.clip(rest_p, 1e-300, None)) - np.log(rest_q)), 0.0)
    divergence: Floats = np.clip(terms + rest, 0.0, None)
    return divergence


@dataclass(frozen=True)
class Summary:
    """Drift over all places of many answers, in natural logarithms.

    Attributes:
        places: how many were compared.
        mean, p99, largest: of the absolute differences.
        prompt, position: where the largest is; positions of an answer begin after those of its prompt.
        trend: mean absolute difference in the later half of the answers over that in the earlier half; 1 is none,
            NaN where it cannot be told.
        kl: mean Kullback-Leibler divergence.
    """

    places: int
    mean: float
    p99: float
    largest: float
    prompt: str
    position: int
    trend: float
    kl: float


def summary(drifts: Mapping[str, Drift]) -> Summary:
    """Numbers over all answers of a pair."""
    values = {name: np.abs(one.all) for name, one in drifts.items()}
    every = np.concatenate([np.zeros(0), *values.values()])
    if not len(every):
        return Summary(0, 0.0, 0.0, 0.0, "", 0, float("nan"), 0.0)
    worst = max((name for name in values if len(values[name])), key=lambda name: float(values[name].max()))
    halves = [np.array_split(np.abs(one.decode), 2) for one in drifts.values() if len(one.decode) > 1]
    early, late = (np.concatenate([np.zeros(0), *(half[i] for half in halves)]) for i in (0, 1))
    trend = float(late.mean() / early.mean()) if len(early) and early.mean() > 0 else float("nan")
    kl = np.fromiter(chain.from_iterable(one.kl for one in drifts.values()), float)
    return Summary(
        len(every),
        float(every.mean()),
        float(np.quantile(every, 0.99)),
        float(every.max()),
        worst,
        int(values[worst].argmax()),
        trend,
        float(kl.mean()) if len(kl) else 0.0,
    )
