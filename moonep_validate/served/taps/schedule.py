"""Which MoE layer calls of a served engine are written down? One in N at random places, spread over the whole run.

Every rank counts the same calls, since a dispatch is collective; so every rank chooses the same ones, and says
nothing to the others. Where as many are kept as may be, every second one goes, and from then on half as many come.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from moonep_validate.hashing import below, hashed


@dataclass(frozen=True)
class Amount:
    """How much is sampled, in each process.

    Attributes:
        every: one call in so many.
        most: calls that are kept.
        megabytes: of one call; a larger one is kept as digests, with some rows and columns.
        seconds: for all of them; then it ends.
    """

    every: int = 16
    most: int = 12
    megabytes: int = 64
    seconds: int = 30

    def __str__(self) -> str:
        return ",".join(str(getattr(self, one.name)) for one in fields(self))

    @classmethod
    def parse(cls, text: str) -> Amount:
        """Read ``str``.

        Raises:
            ValueError: for anything else.
        """
        return cls(*map(int, text.split(",")))


class Schedule:
    """The calls that are chosen.

    Args:
        every, most: see ``Amount``.
    """

    def __init__(self, every: int, most: int) -> None:
        self._every, self._most, self._stride = every, most, 1
        self._window, self._place = 0, -1

    def chooses(self, call: int) -> bool:
        """Whether a call, counted from 0, is one of them; calls are asked for in order."""
        window, place = call // self._every + 1, call % self._every
        if window != self._window:
            self._window = window
            self._place = int(below(hashed("sampled calls", self._every, window), self._every))
        return place == self._place and window % self._stride == 0

    def thinned(self, kept: list[int]) -> list[int]:
        """Of the kept calls those that go, since there are too many."""
        if len(kept) <= self._most:
            return []
        self._stride *= 2
        return [call for call in kept if (call // self._every + 1) % self._stride]
