"""Where does a difference lie? A coarse map of the wrong elements, and each axis in words.

One rank, one slot, every 128th row: the shape of a fault says more than its first element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

#: Cells of a map: of all leading axes together, of the last but one, and of the last.
_CELLS = (8, 24, 64)
_MARKS = ".123456789"


def spread(shape: tuple[int, ...], where: npt.NDArray[Any], place: Callable[..., Mapping[str, int]]) -> Any:
    """A map of some elements of an array, as JSON data.

    Args:
        shape: of the array.
        where: ``[n, ndim]``, indices of the elements.
        place: index tuple -> named place; it is asked about three of them.

    Returns:
        ``axes``: name, size and text of each; ``panels``: for each of at most 8 groups of leading indices a
        list of lines, each a text of one mark a cell: ``.`` none of its elements, ``9`` all of them. None where
        there is one element.
    """
    if len(shape) == 0 or int(np.prod(shape)) < 2:
        return None
    names = _names(where, place)
    axes = [
        {"name": name, "size": size, "text": _text(name, size, np.unique(where[:, axis]).tolist())}
        for axis, (name, size) in enumerate(zip(names, shape, strict=True))
    ]
    return {"axes": axes, "panels": _panels(shape, where)}


def _names(where: npt.NDArray[Any], place: Callable[..., Mapping[str, int]]) -> list[str]:
    """The name whose value follows each axis at the first, middle and last of the elements."""
    points = [tuple(map(int, where[at])) for at in sorted({0, len(where) // 2, len(where) - 1})]
    places = [place(point) for point in points]
    names, taken = [], set[str]()
    for axis in range(where.shape[1]):
        fits = [
            name
            for name in places[0]
            if name not in taken and all(at.get(name) == p[axis] for at, p in zip(places, points, strict=True))
        ]
        # several fit where all points agree; names are in the order of the axes, the fixed ones first
        name = fits[len(fits) - (where.shape[1] - axis)] if len(fits) >= where.shape[1] - axis else None
        names.append((name or next(iter(fits), "block")).replace("_", " "))
        taken.add(names[-1].replace(" ", "_"))
    return names


def _text(name: str, size: int, found: list[int]) -> str:
    """The indices of one axis in words."""
    first, last, count = found[0], found[-1], len(found)
    if count == 1:
        return f"{name} {first}"
    if count == size:
        return f"all {size} {name}s"
    steps = {after - before for before, after in pairwise(found)}
    if steps == {1}:
        return f"{name}s {first} to {last} of {size}"
    if len(steps) == 1 and count > 2:
        return f"every {_ordinal(steps.pop())} {name}, {first} to {last} of {size}"
    return f"{count} of {size} {name}s"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"


def _panels(shape: tuple[int, ...], where: npt.NDArray[Any]) -> list[list[str]]:
    """Marks of each cell: the share of its elements that are wrong."""
    sizes = (int(np.prod(shape[:-2])), *((1, *shape)[-2:]))
    lead = (
        np.ravel_multi_index(tuple(where[:, :-2].T), shape[:-2]) if len(shape) > 2 else np.zeros(len(where), int)
    )
    row = where[:, -2] if len(shape) > 1 else np.zeros(len(where), int)
    cells = tuple(min(most, size) for most, size in zip(_CELLS, sizes, strict=True))
    at = [index * n // size for index, n, size in zip((lead, row, where[:, -1]), cells, sizes, strict=True)]
    counts = np.bincount(np.ravel_multi_index(tuple(at), cells), minlength=int(np.prod(cells))).reshape(cells)
    whole = np.ones((1, 1, 1))
    for axis, (n, size) in enumerate(zip(cells, sizes, strict=True)):
        held = np.bincount(np.arange(size) * n // size, minlength=n)
        whole = whole * held.reshape([-1 if other == axis else 1 for other in range(3)])
    marks = np.ceil(counts / whole * (len(_MARKS) - 1)).astype(int)
    return [["".join(_MARKS[mark] for mark in line) for line in panel] for panel in marks.tolist()]
