"""What is a side of a comparison? One text: a file of answers, a recipe, a URL, or an engine and a model."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from moonep_validate.errors import CaseError
from moonep_validate.served import samples
from moonep_validate.served.answers import GREEDY, Answer, Answers, read, write
from moonep_validate.served.child import answered
from moonep_validate.served.prompts import Prompt, make_prompts, read_prompts
from moonep_validate.served.recipe import Recipe, read_recipe
from moonep_validate.served.record import AGAIN, record
from moonep_validate.served.request import Asked, Request
from moonep_validate.served.server import Server, running
from moonep_validate.served.speak import SPEAKERS
from moonep_validate.served.store import Store
from moonep_validate.served.taps.counting import path_taken, variables
from moonep_validate.served.taps.schedule import Amount


@dataclass(frozen=True)
class Questions:
    """What is asked of each side that is started.

    Attributes:
        prompts, seed: of the built-in prompts.
        dtype: of engines in process.
        deadline: seconds for all answers of a side.
        own: file of the user's own prompts.
        tell: is told how many answers came, and how many there will be.
    """

    prompts: int
    seed: int
    dtype: str
    deadline: float
    own: Path | None = None
    tell: Callable[[int, int], None] = lambda done, total: None


def answers_of(side: str, questions: Questions, base: Answers | None = None, save: Path | None = None) -> Answers:
    """The answers of a side.

    Args:
        side: ``FILE.jsonl``, ``FILE.toml``, ``http://…``, or ``ENGINE:MODEL``.
        questions: what to ask an engine.
        base: the other side, whose questions are asked again and whose tokens are forced.
        save: file that keeps the answers, of a server as they come.

    Raises:
        CaseError: for a side of another form, a file that cannot be read, or an engine that does not answer.
    """
    found = _answers(side, questions, base, save)
    found.name = side
    if save:
        write(found, save)
    return found


def _answers(side: str, questions: Questions, base: Answers | None, save: Path | None) -> Answers:
    if side.endswith(".jsonl"):
        return read(Path(side))
    recipe = _recipe(side, questions)
    if recipe.in_process:
        return _in_process(recipe, questions, base, save)
    return _from_server(recipe, questions, base, save)


def _recipe(side: str, questions: Questions) -> Recipe:
    if side.endswith(".toml"):
        return read_recipe(Path(side))
    if side.startswith(("http://", "https://")):
        return Recipe("server", url=side.rstrip("/").removesuffix("/v1"), deadline=questions.deadline)
    engine, colon, model = side.partition(":")
    if not colon or not model:
        known = ", ".join(f"{name}:DIR" for name in SPEAKERS)
        raise CaseError(f"{side} is no side; write FILE.jsonl, RECIPE.toml, http://HOST:PORT, {known}")
    return Recipe(engine, model, in_process=True, dtype=questions.dtype, deadline=questions.deadline)


def _asked_before(questions: Questions, base: Answers | None) -> list[Prompt]:
    """The base's prompts with as many tokens as came there, or the user's own."""
    if base is not None:
        return [
            Prompt(one.prompt, one.group, tuple(one.asked.tolist()), max(1, len(one.tokens)))
            for one in base.run(GREEDY).values()
        ]
    return read_prompts(questions.own) if questions.own else []


def _forced(base: Answers | None) -> dict[str, list[int]]:
    return {name: one.tokens.tolist() for name, one in base.run(GREEDY).items()} if base else {}


def _in_process(recipe: Recipe, questions: Questions, base: Answers | None, save: Path | None) -> Answers:
    with tempfile.TemporaryDirectory(prefix="moonep-taps-") as folder:
        environment = _environment(recipe, Path(folder))
        request = Request(
            recipe.engine,
            recipe.model,
            "",
            recipe.dtype or questions.dtype,
            options=_options(recipe.arguments),
            count=questions.prompts,
            seed=questions.seed,
            prompts=[Asked.of(prompt) for prompt in _asked_before(questions, base)],
            forced=_forced(base),
        )
        log = Path(recipe.log) if recipe.log else None
        found = answered(
            request, recipe.deadline, recipe.python, environment, log, ranks=recipe.ranks, hide=recipe.hide
        )
        return _with_path(found, recipe, Path(folder), save)


def _options(arguments: Sequence[str]) -> dict[str, Any]:
    """``name=value`` with values of JSON, or texts."""
    found: dict[str, Any] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise CaseError(f"argument {argument} of an engine in process: name=value is needed")
        found[name.lstrip("-").replace("-", "_")] = value
        with suppress(ValueError):
            found[name.lstrip("-").replace("-", "_")] = json.loads(value)
    return found


def _environment(recipe: Recipe, folder: Path) -> dict[str, str]:
    path = recipe.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    amount = str(Amount(recipe.sample_every, recipe.samples)) if recipe.samples else ""
    return {**recipe.environment, **(variables(folder, path, amount) if recipe.expects else {})}


def _with_path(found: Answers, recipe: Recipe, folder: Path, save: Path | None) -> Answers:
    """With what the taps counted, and the verdict on the calls that they sampled, whose traces are kept."""
    if not recipe.expects:
        return found
    layers, traces = samples.judged(samples.collect(folder), samples.stopped(folder))
    if save and traces:
        samples.save(traces, save.with_suffix(".samples"))
    return replace(found, who=replace(found.who, expects=recipe.expects, path=path_taken(folder), layers=layers))


def _from_server(recipe: Recipe, questions: Questions, base: Answers | None, save: Path | None) -> Answers:
    from moonep_validate.served.speakers.remote import ready

    with tempfile.TemporaryDirectory(prefix="moonep-taps-") as folder:
        recipe = replace(recipe, environment=_environment(recipe, Path(folder)))
        server = nullcontext(None) if recipe.url else running(recipe, partial(ready, recipe))
        with server as living:
            found = _ask(recipe, questions, base, save, living)
        return _with_path(found, recipe, Path(folder), save)


def _ask(
    recipe: Recipe, questions: Questions, base: Answers | None, save: Path | None, server: Server | None
) -> Answers:
    from moonep_validate.served.speakers.remote import Remote

    speaker = Remote(recipe, server.url if server else recipe.url, server.died if server else lambda: None)
    prompts = _asked_before(questions, base)
    prompts = prompts or make_prompts(speaker.vocab, questions.prompts, questions.seed, speaker.longest - 1)
    store = Store(save, speaker.who) if save else None
    total, done = len(prompts) * (2 + len(AGAIN)), 0

    def keep(answer: Answer) -> None:
        nonlocal done
        done += 1
        questions.tell(done, total)
        if store:
            store.keep(answer)

    try:
        return record(
            speaker, prompts, forced=_forced(base) or None, known=store.known if store else None, keep=keep
        )
    finally:
        if store:
            store.close()
