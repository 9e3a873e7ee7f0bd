"""Which ratios of ``bench ep`` were agreed beforehand, and what is beyond them? A file that names its machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moonep_validate.cases.case import CaseError
from moonep_validate.studies.bench_ep import WAYS, Point
from moonep_validate.trace.schema import build, decoded, parsed, read_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

_LIMIT = 2**20


@dataclass(frozen=True)
class AtMost:
    """One agreed ratio: the median of ``way`` over ``over`` in the same turn.

    Attributes:
        max_vio, tokens: where it holds; None: everywhere.
    """

    way: str
    over: str
    ratio: float
    max_vio: float | None = None
    tokens: int | None = None

    def holds(self, point: Point) -> bool:
        """Whether it was agreed for this point."""
        return self.max_vio in (None, point.max_vio) and self.tokens in (None, point.tokens)


@dataclass(frozen=True)
class Thresholds:
    """A file: the machine that it was agreed for, and its ratios."""

    device: str
    ranks: int
    at_most: tuple[AtMost, ...]


def read_thresholds(path: Path, device: str, ranks: int) -> Thresholds:
    """The file.

    Raises:
        CaseError: if it cannot be read, agrees on nothing, names a way that is not known, or another machine.
    """
    try:
        found = build(Thresholds, parsed(decoded(read_bytes(path, _LIMIT)), tomllib.loads))
    except (OSError, ValueError) as error:  # SchemaError among them
        reason = error.strerror if isinstance(error, OSError) else error
        raise CaseError(f"--thresholds {path}: {reason}") from None
    if (found.device, found.ranks) != (device, ranks):
        raise CaseError(
            f"--thresholds {path} was agreed for {found.ranks} ranks on {found.device}; "
            f"here are {ranks} on {device}"
        )
    if not found.at_most:
        raise CaseError(f"--thresholds {path} has no [[at_most]]: nothing would be compared")
    for name in (name for one in found.at_most for name in (one.way, one.over)):
        if name not in WAYS:
            raise CaseError(
                f"--thresholds {path}: {name!r} is no way to compute a layer; known: {', '.join(WAYS)}"
            )
    return found


def beyond(agreed: Thresholds, points: Sequence[Point]) -> list[str]:
    """What is beyond its threshold, one sentence each.

    Raises:
        CaseError: if a threshold holds at none of the points.
    """
    found = []
    for one in agreed.at_most:
        mine = [point for point in points if one.holds(point)]
        if not mine:
            raise CaseError(f"--thresholds: MaxVio {one.max_vio} with {one.tokens} tokens was not measured")
        for point in mine:
            middle, lower, upper = point.ratio(one.way, one.over)
            if not middle <= one.ratio:
                found.append(
                    f"{one.way} takes {middle:.2f} ({lower:.2f} to {upper:.2f}) times {one.over}, agreed are "
                    f"{one.ratio:g}: {point.case}"
                )
    return found
