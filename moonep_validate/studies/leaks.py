"""Does something grow without end? A rule over what a process held while it ran many cases.

A process takes what it needs once: imports, caches, arenas. So its first third is not counted, nor its first
``WARM`` samples, in which each drawn case ran once. The rest is cut into five equal parts. What is kept for good
raises the least that is held in a part above that of the part before, every time; what comes and goes does not:
five numbers in any order rise by chance once in 120 times. So a growth must be as large as a leak: four more of
what is counted, or ``BYTES``, of which the later steps have their share, for what levels off is no leak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from moonep_validate.worlds.held import Held, newer

#: Samples of a process that are never counted, and the fewest that it must have to be judged.
WARM, LEAST = 5, 25
_PARTS = 5
#: Growth below this is the allocator's: fragments of arenas, pages that are not given back.
BYTES = 2**21
_OF_BYTES = ("memory", "GPU memory", "shared memory")
#: The share of the growth that the last two of four steps must have; an even growth has a half.
_STILL = 0.25
_NAMES = 3


@dataclass
class Series:
    """What one process held, sample by sample.

    Attributes:
        who: the process, as a reader knows it: ``rank 1 of 4``.
        cases: how many cases it had run at each sample.
        values: subject -> its value at each sample; one that appeared later is 0 before.
        first, last: subject -> names in the first sample that counts, and in the last one.
    """

    who: str
    cases: list[int] = field(default_factory=list)
    values: dict[str, list[int]] = field(default_factory=dict)
    first: dict[str, list[str]] = field(default_factory=dict)
    last: dict[str, list[str]] = field(default_factory=dict)

    def add(self, cases: int, held: Held) -> None:
        """Take a sample."""
        self.cases.append(cases)
        for subject in held.keys() | self.values.keys():
            line = self.values.setdefault(subject, [])
            value = held[subject][0] if subject in held else 0
            line += [0] * (len(self.cases) - 1 - len(line)) + [value]
        self.last = {subject: names for subject, (_, names) in held.items() if names}
        if len(self.cases) <= WARM + 1:
            self.first = self.last

    @property
    def judged(self) -> bool:
        """Whether it is long enough to say anything."""
        return len(self.cases) >= LEAST


def leaks(series: Series) -> list[str]:
    """What grows without end in one process, a sentence each; nothing if it was not watched for long enough."""
    if not series.judged:
        return []
    return [
        _sentence(series, subject, parts)
        for subject, values in sorted(series.values.items())
        if _grows(parts := _least(values), subject in _OF_BYTES)
    ]


def _start(samples: int) -> int:
    return max(WARM, samples // 3)


def _least(values: Sequence[int]) -> list[int]:
    """The least that was held in each of the equal parts that count."""
    begin = _start(len(values))
    edges = [begin + (len(values) - begin) * part // _PARTS for part in range(_PARTS + 1)]
    return [min(values[a:b]) for a, b in pairwise(edges)]


def _grows(parts: Sequence[int], bytes_: bool) -> bool:
    """Whether five parts show a growth without end."""
    steps = [after - before for before, after in pairwise(parts)]
    if min(steps) <= 0:
        return False
    return not bytes_ or (sum(steps) >= BYTES and sum(steps[2:]) >= _STILL * sum(steps))


def _sentence(series: Series, subject: str, parts: Sequence[int]) -> str:
    over = series.cases[-1] - series.cases[_start(len(series.cases))]
    names = newer(series.first.get(subject, []), series.last.get(subject, []))
    shown = dict.fromkeys(reversed(names))
    new = f"; new: {', '.join(list(shown)[:_NAMES])}" if names else ""
    unit = " bytes" if subject in _OF_BYTES else ""
    least = ", ".join(f"{part:,}" for part in parts)
    return (
        f"leak: {series.who}: {subject}: more with every case, at least {least}{unit} in five equal parts of "
        f"{over} cases{new}"
    )
