"""Answers for the tests of `compare`: made up, with known drift."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from moonep_validate.served.answers import GREEDY, Answer, Answers, Who, make_answer

BASE = Who("fake", "1", dtype="bfloat16")
EXACT = Who("fake", "1", dtype="float32")


def answer(
    name: str,
    tokens: Iterable[int] = (5, 6),
    logprobs: Iterable[float | None] = (-1.0, -2.0),
    asked: Iterable[int] = (9, 10, 11),
    prompt_logprobs: Iterable[float | None] = (None, -3.0, -4.0),
    run: str = GREEDY,
    top: Iterable[dict[int, float]] = (),
    error: str = "",
) -> Answer:
    return make_answer(name, "short", run, asked, tokens, logprobs, top, prompt_logprobs, "length", error)


def side(who: Who, answers: Iterable[Answer], name: str = "") -> Answers:
    made = Answers(who, name=name or str(who))
    for one in answers:
        made.add(one)
    return made


def noisy(who: Who, name: str, count: int, size: float, seed: int, again: float = 0.0, length: int = 8) -> Answers:
    """A side whose log probabilities are those of seed 0 and normal noise of ``size``; equal tokens."""
    right, own = np.random.default_rng(0), np.random.default_rng(seed)
    made = []
    for number in range(count):
        true = right.uniform(-5, -1, 2 * length)
        tokens = list(range(20, 20 + length))
        for run, spread in (("greedy", size), *([("again", again)] if again else [])):
            values = true + spread * own.standard_normal(2 * length)
            asked = [number + 2, *tokens[1:]]
            first = [None, *values[1:length].tolist()]
            made.append(answer(f"p{number}", tokens, values[length:].tolist(), asked, first, run))
    return side(who, made, name)


def changed(one: Answer, **changes: object) -> Answer:
    return replace(one, **changes)  # type: ignore[arg-type]
