"""Is an answer one at all? One log probability for each token, and ids of the vocabulary.

One hole in an otherwise good answer is a place that nobody compared, so it is a finding and not a gap.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moonep_validate.judge.verdict import Finding
from moonep_validate.served.answers import FORCED, GREEDY, Answer, Answers

#: A log probability above this is none; float32 rounding of a certain token stays far below.
ABOVE = 1e-3


def unsound(side: str, answers: Answers) -> Iterator[Finding]:
    """What is no answer, or has no numbers that can be compared.

    Args:
        side: what findings call it, ``base`` or ``candidate``.
        answers: its greedy and its forced answers are looked at.
    """
    for run in (GREEDY, FORCED):
        for name, one in answers.run(run).items():
            where = f"prompt {name}" + ("" if run == GREEDY else " with the other side's tokens")
            if one.error and run == GREEDY:
                yield Finding(f"answer of the {side} to {where}", {}, "an answer", one.error)
            if one.bad:
                yield Finding(
                    f"log probabilities of the {side} for {where}",
                    {},
                    "finite numbers",
                    "NaN or infinite",
                    one.bad,
                )
            yield from _numbers(side, where, one)
            yield from _ids(side, where, one, answers.who.vocab)


def _numbers(side: str, where: str, one: Answer) -> Iterator[Finding]:
    holes = int(np.isnan(one.logprobs).sum())
    what = f"log probabilities of the {side} for {where}"
    if holes and not one.error and not one.bad:
        came = "none" if holes == len(one.tokens) else f"{holes} of {len(one.tokens)} missing"
        at = {"position": int(np.isnan(one.logprobs).argmax())}
        yield Finding(what, at, "one for each token", came, holes)
    inner = one.prompt_logprobs[1:]
    if (holes := int(np.isnan(inner).sum())) and not one.bad:
        at = {"position": 1 + int(np.isnan(inner).argmax())}
        yield Finding(f"prompt's {what}", at, "one for each token but the first", f"{holes} missing", holes)
    for values in (one.logprobs, one.prompt_logprobs, one.top_logprobs):
        if (above := int((values > ABOVE).sum())) and not one.bad:
            yield Finding(
                what, {}, "at most 0, as logarithms of probabilities are", f"{np.nanmax(values):.3g}", above
            )


def _ids(side: str, where: str, one: Answer, vocab: int) -> Iterator[Finding]:
    for what, ids in (("tokens", one.tokens), ("alternatives", one.top_ids), ("prompt tokens", one.asked)):
        if vocab and (beyond := int((ids >= vocab).sum())):
            due = f"ids below the vocabulary's size of {vocab}"
            yield Finding(f"{what} of the {side} for {where}", {}, due, str(int(ids.max())), beyond)
    missed = _missed(one)
    if missed.any():
        place = int(missed.argmax())
        due = "the token that came, among the largest of its place"
        came = f"{one.tokens[place]} is not listed, or with another log probability"
        yield Finding(f"alternatives of the {side} for {where}", {"position": place}, due, came, int(missed.sum()))


def _missed(one: Answer) -> np.ndarray:
    """``[T]`` of bool: the token that came is not listed, though it is no tie with the last one that is."""
    if one.top_ids.size == 0:
        return np.zeros(0, dtype=bool)
    own = one.top_ids == one.tokens[:, None]
    listed = np.where(own, one.top_logprobs, np.nan)
    with np.errstate(invalid="ignore"):
        agrees = (np.abs(listed - one.logprobs[:, None]) <= ABOVE).any(axis=1)
        least = np.min(np.where(one.top_ids >= 0, one.top_logprobs, np.inf), axis=1)
        tied = ~own.any(axis=1) & (np.abs(least - one.logprobs) <= ABOVE)
    missed: np.ndarray = (one.top_ids >= 0).any(axis=1) & ~np.isnan(one.logprobs) & ~agrees & ~tied
    return missed
