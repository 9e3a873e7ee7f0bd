"""What is a side of a comparison? One text: a file of answers, or an engine and a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moonep_validate.errors import CaseError
from moonep_validate.served.answers import GREEDY, Answers, read
from moonep_validate.served.child import answered
from moonep_validate.served.request import Asked, Request
from moonep_validate.served.speak import SPEAKERS


@dataclass(frozen=True)
class Plan:
    """What is asked of each side that is started.

    Attributes:
        prompts, seed: of the built-in prompts.
        dtype: of engines in process.
        deadline: seconds for all answers of a side.
    """

    prompts: int
    seed: int
    dtype: str
    deadline: float


def answers_of(side: str, plan: Plan, base: Answers | None = None) -> Answers:
    """The answers of a side.

    Args:
        side: ``FILE.jsonl``, or ``ENGINE:MODEL``.
        plan: what to ask an engine.
        base: the other side, whose questions are asked again and whose tokens are forced.

    Raises:
        CaseError: for a side of another form, a file that cannot be read, or an engine that does not answer.
    """
    if side.endswith(".jsonl"):
        return read(Path(side))
    engine, colon, model = side.partition(":")
    if not colon or not model:
        known = ", ".join(f"{name}:DIR" for name in SPEAKERS)
        raise CaseError(f"{side} is no side; write FILE.jsonl, {known}")
    asked = base.run(GREEDY).values() if base else ()
    prompts = [Asked(one.prompt, one.group, one.asked.tolist(), max(1, len(one.tokens))) for one in asked]
    forced = {one.prompt: one.tokens.tolist() for one in asked}
    request = Request(
        engine, model, "", plan.dtype, count=plan.prompts, seed=plan.seed, prompts=prompts, forced=forced
    )
    found = answered(request, plan.deadline)
    found.name = side
    return found
