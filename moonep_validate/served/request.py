"""What does an engine in a process of its own get to do? One request as JSON, one file of answers back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moonep_validate.served.prompts import Prompt


@dataclass(frozen=True)
class Asked:
    """One prompt of a request, see ``prompts.Prompt``."""

    name: str
    group: str
    tokens: list[int]
    max_tokens: int

    @classmethod
    def of(cls, prompt: Prompt) -> Asked:
        """From a prompt."""
        return cls(prompt.name, prompt.group, list(prompt.tokens), prompt.max_tokens)

    @property
    def prompt(self) -> Prompt:
        """As a prompt."""
        return Prompt(self.name, self.group, tuple(self.tokens), self.max_tokens)


@dataclass(frozen=True)
class Request:
    """What ``speak`` does.

    Attributes:
        engine: one of ``speak.SPEAKERS``.
        model, dtype, options: for its constructor.
        count, seed: of the built-in prompts, where ``prompts`` is empty: the engine knows its vocabulary.
        prompts: the user's own.
        top: alternatives at each place.
        again: repetitions, 0 or 1.
        forced: prompt -> tokens of the other side; empty: its own.
        out: file of answers to write.
    """

    engine: str
    model: str
    out: str
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)
    count: int = 32
    seed: int = 0
    prompts: list[Asked] = field(default_factory=list)
    top: int = 5
    again: int = 1
    forced: dict[str, list[int]] = field(default_factory=dict)


def out_of_rank(out: str, rank: int, ranks: int) -> str:
    """The file that a rank writes."""
    return out if ranks == 1 else f"{out}.{rank}"


def share(prompts: Sequence[Prompt], rank: int, ranks: int) -> list[Prompt]:
    """A rank's prompts: equally many on each, so that ranks keep step; the first ones fill up."""
    missing = -len(prompts) % ranks
    return [*prompts, *prompts[:missing]][rank::ranks]
