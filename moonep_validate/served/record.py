"""How are answers recorded? All prompts once, again in other batches, and with the other side's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

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
    known: Answers | None = None,
    keep: Callable[[Answer], None] = lambda answer: None,
) -> Answers:
    """All answers of a speaker.

    Args:
        speaker: an engine in this process, or a server.
        prompts: what to ask.
        top: alternatives at each place.
        again: repetitions.
        forced: prompt -> tokens of the other side that are given as its continuation; its own ones by default, so
            that two sides have the same to compare.
        known: answers of an earlier try, which are not asked for again.
        keep: is told each answer as it comes.
    """
    whole = Answers(speaker.who)
    for name, batches in ((GREEDY, in_one), *again):
        open_ones = _take_known(whole, known, name, prompts)
        for prompt, said in _ask(speaker, batches(open_ones), top):
            _take(whole, keep, _answer(prompt, name, said))
    given = forced or {name: one.tokens.tolist() for name, one in whole.run(GREEDY).items()}
    open_ones = [one for one in _take_known(whole, known, FORCED, prompts, given) if given.get(one.name)]
    for answer in _forced(speaker, open_ones, given):
        _take(whole, keep, answer)
    return replace(whole, who=speaker.who)


def _take(whole: Answers, keep: Callable[[Answer], None], answer: Answer) -> None:
    whole.add(answer)
    keep(answer)


def _take_known(
    whole: Answers,
    known: Answers | None,
    run: str,
    prompts: Sequence[Prompt],
    given: Mapping[str, Sequence[int]] | None = None,
) -> list[Prompt]:
    """Take the answers that are known to the same questions; the prompts that are left."""
    found, left = known.run(run) if known else {}, []
    for prompt in prompts:
        one = found.get(prompt.name)
        same = one is not None and not one.error and one.asked.tolist() == list(prompt.tokens)
        if one and same and (given is None or one.tokens.tolist() == list(given.get(prompt.name, ()))):
            whole.add(one)
        else:
            left.append(prompt)
    return left


def _ask(speaker: Speaker, batches: Sequence[Sequence[Prompt]], top: int) -> Iterator[tuple[Prompt, Said]]:
    for batch in batches:
        said = speaker.say([prompt.tokens for prompt in batch], [prompt.max_tokens for prompt in batch], top)
        yield from ((batch[index], one) for index, one in said)


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
        said.error,
    )


def _forced(speaker: Speaker, prompts: Sequence[Prompt], given: Mapping[str, Sequence[int]]) -> Iterator[Answer]:
    """Prompt and given continuation as one prompt: the engine says how likely each given token was."""
    wholes = [[*prompt.tokens, *given[prompt.name]][: speaker.longest - 1] for prompt in prompts]
    for index, said in speaker.say(wholes, [1] * len(wholes), 1):
        prompt, whole = prompts[index], wholes[index]
        start = len(prompt.tokens)
        if said.prompt_logprobs:
            values = said.prompt_logprobs[start:]
            yield make_answer(prompt.name, prompt.group, FORCED, prompt.tokens, whole[start:], values)
