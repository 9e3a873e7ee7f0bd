"""How often did each rank dispatch, use a slot, compute real rows from one? Counts in files that outlive it."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from moonep_validate.served.answers import PathTaken

#: rank, number of ranks, dispatches, dispatches with a used slot, real rows in slots.
_FORM = struct.Struct("<5q")


class Counts:
    """The counts of this process, mapped: an engine is often ended by a signal.

    Args:
        folder: of the files; this process writes one, at the first Buffer.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._values = folder, [0] * 5
        self._map: mmap.mmap | None = None

    def place(self, rank: int, size: int) -> None:
        """Say which rank of how many this is."""
        self._values[:2] = rank, size
        self.add(0, 0, 0)

    def add(self, *more: int) -> None:
        """Add to the three counts."""
        self._values[2:] = [a + b for a, b in zip(self._values[2:], more, strict=True)]
        if self._map is None:
            path = self._folder / f"{os.getpid()}.counts"
            path.write_bytes(bytes(_FORM.size))
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _FORM.size)
        self._map[:] = _FORM.pack(*self._values)


def count(buffer: Any, folder: Path) -> None:
    """Put counting methods on a Buffer class."""
    counts = Counts(folder)
    buffer.__init__ = _placed(buffer.__init__, counts)
    buffer.dispatch = _counted(buffer.dispatch, counts)


def _placed(method: Callable[..., Any], counts: Counts) -> Callable[..., Any]:
    @wraps(method)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        from torch import distributed

        method(self, *args, **kwargs)
        self.__moonep_slots__ = kwargs.get("B") or 0
        if distributed.is_initialized():
            group = kwargs.get("group")
            counts.place(distributed.get_rank(group), distributed.get_world_size(group))
        else:
            counts.place(0, 1)

    return construct


def _counted(method: Callable[..., Any], counts: Counts) -> Callable[..., Any]:
    @wraps(method)
    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = method(self, *args, **kwargs)
        used = bool((out[3].experts_to_copy >= 0).any())
        counts.add(1, int(used), real_rows(out[1], out[2], self.__moonep_slots__) if used else 0)
        return out

    return dispatch


def real_rows(row_weights: Any, cu_seqlens: Any, slots: int) -> int:
    """Rows of slots with a route weight; an engine pads with tokens of weight zero.

    Args:
        row_weights: float32 ``[NvS]``, or None.
        cu_seqlens: int32 ``[E + B]``, the end of each group of rows; the last ``slots`` groups are slots.
        slots: B.
    """
    if row_weights is None or not slots or len(cu_seqlens) <= slots:
        return 0
    first, end = int(cu_seqlens[-slots - 1]), int(cu_seqlens[-1])
    return int((row_weights[first:end] != 0).sum())


def path_taken(folder: Path) -> PathTaken:
    """What all processes counted; a rank that counted nothing has zeros."""
    ranks: dict[int, list[int]] = {}
    size = 0
    for path in sorted(folder.glob("*.counts")):
        data = path.read_bytes()
        if len(data) == _FORM.size:
            rank, of, *more = _FORM.unpack(data)
            size = max(size, of)
            ranks[rank] = [a + b for a, b in zip(ranks.get(rank, [0] * 3), more, strict=True)]
    columns = [[ranks.get(rank, [0] * 3)[column] for rank in range(size)] for column in range(3)]
    return PathTaken(*columns)


def variables(folder: Path, path: str | None, samples: str = "") -> Mapping[str, str]:
    """Variables of an engine's processes that bring the taps in.

    Args:
        folder: for the counts; it exists.
        path: PYTHONPATH that they would have otherwise.
        samples: how many MoE layer calls are written down, as ``schedule.Amount`` spells it; empty for none.
    """
    import moonep_validate

    ours = [str(Path(__file__).parent / "site"), str(Path(moonep_validate.__file__).parents[1])]
    told = {"MOONEP_VALIDATE_TAPS": str(folder), "MOONEP_VALIDATE_SAMPLES": samples}
    return {**told, "PYTHONPATH": os.pathsep.join(filter(None, [*ours, path]))}
