"""How are answers recorded? All prompts once, again in other batches, and with the other side's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from moonep_validate.served.answers import FORCED, GREEDY, Answer, Answers, make_answer
from moonep_validate.served.prompts import Prompt
from moonep_validate.served.speakers.speaker import Said, Speaker

#: A repetition: its name, and how it orders and batches the prompts.
Repetition = tuple[str, Callable[[Sequence[Prompt]], list[list[Prompt]]]]


def in_one(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """All prompts at once."""
    return [list(prompts)]


def one_by_one(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Each prompt by itself, in the reverse order."""
    return [[prompt] for prompt in reversed(prompts)]


def by_threes(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Batches of three, in the reverse order: long and short ones meet others than before."""
    turned = list(reversed(prompts))
    return [turned[first : first + 3] for first in range(0, len(turned), 3)]


#: What measures the noise of a side against itself: other batches in another order.
AGAIN: tuple[Repetition, ...] = (("again by threes", by_threes),)


def record(
    speaker: Speaker,
    prompts: Sequence[Prompt],
    top: int = 5,
    again: Sequence[Repetition] = AGAIN,
    forced: Mapping[str, Sequence[int]] | None = None,
) -> Answers:
    """All answers of a speaker.

    Args:
        speaker: an engine in this process.
        prompts: what to ask.
        top: alternatives at each place.
        again: repetitions.
        forced: prompt -> tokens of the other side that are given as its continuation; its own ones by default, so
            that two sides have the same to compare.
    """
    said: dict[str, Sequence[int]] = {}
    answers: list[Answer] = []
    for name, batches in ((GREEDY, in_one), *again):
        for prompt, one in _ask(speaker, batches(prompts), top):
            answers.append(_answer(prompt, name, one))
            if name == GREEDY:
                said[prompt.name] = one.tokens
    whole = Answers(speaker.who)
    for answer in answers:
        whole.add(answer)
    for answer in _forced(speaker, prompts, said if forced is None else forced, top):
        whole.add(answer)
    return whole


def _ask(speaker: Speaker, batches: Sequence[Sequence[Prompt]], top: int) -> Iterator[tuple[Prompt, Said]]:
    for batch in batches:
        said = speaker.say([prompt.tokens for prompt in batch], [prompt.max_tokens for prompt in batch], top)
        yield from zip(batch, said, strict=True)


def _answer(prompt: Prompt, run: str, said: Said) -> Answer:
    return make_answer(
        prompt.name,
        prompt.group,
        run,
        prompt.tokens,
        said.tokens,
        said.logprobs,
        said.top,
        said.prompt_logprobs,
        said.finish,
    )


def _forced(
    speaker: Speaker, prompts: Sequence[Prompt], forced: Mapping[str, Sequence[int]], top: int
) -> Iterator[Answer]:
    """Prompt and given continuation as one prompt: the engine says how likely each given token was."""
    given = [(prompt, list(forced[prompt.name])) for prompt in prompts if forced.get(prompt.name)]
    wholes = [[*prompt.tokens, *tokens][: speaker.longest - 1] for prompt, tokens in given]
    for (prompt, _), whole, said in zip(given, wholes, speaker.say(wholes, [1] * len(wholes), 1), strict=True):
        start = len(prompt.tokens)
        if said.prompt_logprobs:
            yield make_answer(
                prompt.name,
                prompt.group,
                FORCED,
                prompt.tokens,
                whole[start:],
                said.prompt_logprobs[start:],
            )
