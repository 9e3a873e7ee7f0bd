"""What does an engine look like to a comparison? It says who it is, and answers batches of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from moonep_validate.served.answers import Who


@dataclass(frozen=True)
class Said:
    """What came for one sequence.

    Attributes:
        tokens: that came.
        logprobs: of each.
        top: the largest few at each place, token id -> log probability.
        prompt_logprobs: of the asked tokens, the first one None; empty where the engine gives none.
        finish: why it ended.
        error: what went wrong in place of an answer.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float | None]
    top: Sequence[dict[int, float]]
    prompt_logprobs: Sequence[float | None] = ()
    finish: str = ""
    error: str = ""


class Speaker(Protocol):
    """An engine that serves one model; greedy, and never stopped by an end token."""

    @property
    def who(self) -> Who:
        """Who answers, as the engine itself reports it; asked after the last answer."""

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""

    @property
    def longest(self) -> int:
        """Tokens of a sequence at most."""

    def say(self, asked: Sequence[Sequence[int]], counts: Sequence[int], top: int) -> Iterable[tuple[int, Said]]:
        """Greedy answers to a batch of prompts: the index of each, in the order in which they come.

        Args:
            asked: token ids.
            counts: how many tokens shall come for each.
            top: how many of the largest log probabilities to give at each place.
        """
