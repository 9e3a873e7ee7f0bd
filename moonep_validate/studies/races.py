"""Do ranks stay right when they run at odds? Seeds of the scenario in_flight, as many as fit in a time.

Each seed launches three batches on two Buffers in another legal order, with other delays (schedule.py, and
``disturb`` of the worlds). On right code none may fail; with a fault of order, the number of seeds until the first
that fails says how fast it is found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.judge.verdict import Verdict

#: Geometries in turn: zero-copy views, slots, padding, generations and numbers of ranks differ.
GEOMETRIES = (
    "genB+R2+E6+K4+S7+H24+I8+hot:1",
    "genA+R2+E6+K4+S7+H24+I8+hot:1",
    "genB+R4+E8+K2+S9+H24+I8+hot:5",
    "genA+R4+E8+K2+S9+H24+I8+hot:5",
    "genB+R4+E16+K4+S9+H24+I8+fill:real+zipf:1.0",
    "genA+R4+E16+K4+S9+H24+I8+slots2+zipf:1.0",
)


@dataclass
class Races:
    """What the seeds gave.

    Attributes:
        tried: how many ran.
        failures: verdicts that are no pass.
        first: how many seeds it took to the first of them, or None.
        seconds: how long all took.
    """

    tried: int = 0
    failures: list[Verdict] = field(default_factory=list)
    first: int | None = None
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """One line for people."""
        found = f"the first at seed {self.first}" if self.failures else "none failed"
        return f"{self.tried} seeds in {self.seconds:.0f} s, {len(self.failures)} failed, {found}"


def cases(seed: int, ranks: int | None = None) -> Iterator[Case]:
    """Case lines without end, from a seed on.

    Raises:
        CaseError: if no geometry has that number of ranks.
    """
    lines = [Case.parse(text) for text in GEOMETRIES]
    chosen = [c for c in lines if ranks in (None, c.R)]
    if not chosen:
        raise CaseError(f"--ranks {ranks}: races has R = {', '.join(map(str, sorted({c.R for c in lines})))}")
    for number in count(seed):
        yield Case.parse(f"{chosen[number % len(chosen)]}+in_flight:{number}")


def races(
    judged: Callable[[Case], Verdict], lines: Iterator[Case], seconds: float, most: int | None = None
) -> Races:
    """Run seeds until the time is over.

    Args:
        judged: runs a case.
        lines: see ``cases``.
        seconds: after which no further seed begins.
        most: number of seeds after which to stop too.
    """
    result, begin = Races(), time.monotonic()
    for number, case in enumerate(lines):
        if time.monotonic() - begin > seconds or number == most:
            break
        verdict = judged(case)
        result.tried += 1
        if not verdict.ok and verdict.override is None:
            result.failures.append(verdict)
            result.first = number if result.first is None else result.first
    result.seconds = time.monotonic() - begin
    return result
