"""Where was each rank last? A ring of records in a mapped file, which outlives its process however that ends.

The recorder tells when a call begins and ends, ``Logged`` when a rank enters and leaves a collective of its
``Comm``, and ``watch_torch`` does so for code from outside that calls ``torch.distributed`` by itself. Only the
outermost collective counts, so each has one number, the same on every rank that does the same.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonep_validate.worlds.comm import CollectiveError, Deadlock, PeerFailed

CASE, CALL, RETURN, ENTER, LEAVE, RAISED, DONE = "case", "call", "return", "enter", "leave", "raised", "done"
#: Stands for a log that is none, since something wrote over it.
DAMAGED = "damaged"
_KINDS = (CASE, CALL, RETURN, ENTER, LEAVE, RAISED, DONE)
_HEAD = struct.Struct("<QQ")
#: 224 bytes: time, number, kind, and as much of step, operation and name as a sentence shows.
_RECORD = struct.Struct("<dIB64s24s123s")
#: Under a megabyte a rank; a case has some hundred records, and of a loop without end the last ones matter.
_CAPACITY = 4096
#: A larger count is none.
_MOST = 2**40
_SIZE = _HEAD.size + _CAPACITY * _RECORD.size
_RAISED = "no collective, having raised "

#: Functions of torch.distributed in which a rank waits for others.
TORCH_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "recv",
)


@dataclass(frozen=True)
class Record:
    """One line of a rank's log.

    Attributes:
        seconds: monotonic clock of the host.
        kind: one of ``case``, ``call``, ``return``, ``enter``, ``leave``, ``raised``, ``done``.
        number: of the collective within the case, counted from 1; 0 where none is meant.
        step, op: the call it happened in.
        name: the collective, the case, or what was raised.
    """

    seconds: float
    kind: str
    number: int
    step: str
    op: str
    name: str

    def __str__(self) -> str:
        where = f"{self.op} of step {self.step}" if self.op else ""
        what = f"{self.name} (collective #{self.number})" if self.number else self.name
        return f"{self.kind:6} {' in '.join(filter(None, (what, where)))}"


class Flight:
    """The writing end, for one rank.

    Args:
        path: of the ring file; made anew.

    Raises:
        OSError: if there is no room for it.
    """

    def __init__(self, path: Path) -> None:
        reserve(path)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        _HEAD.pack_into(self._map, 0, 0, 0)
        self._count = self._begin = self._number = 0
        self._depth = 0
        self._calls: list[tuple[str, str]] = []

    @property
    def count(self) -> int:
        """Records so far."""
        return self._count

    def begin(self, case: str) -> None:
        """A new case; collectives are counted from here."""
        self._begin, self._number, self._depth = self._count, 0, 0
        self._calls.clear()
        self.note(CASE, case)

    def tell(self, step: str, op: str, done: bool) -> None:
        """A call began or ended; fits ``Recorder``, which also tells of a call that raises, from its handler."""
        if not done:
            self._calls.append((step, op))
            self.note(CALL)
            return
        error = sys.exc_info()[1]
        self.note(RETURN) if error is None else self.raised(error)
        if self._calls:
            self._calls.pop()

    def raised(self, error: BaseException) -> None:
        """An exception leaves a call, or the case."""
        self.note(RAISED, f"{type(error).__name__}: {' '.join(str(error).split())}")

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """A collective from entering to leaving; one in another is part of it. One that raises is never left."""
        self._depth += 1
        outermost = self._depth == 1
        if outermost:
            self._number += 1
            self.note(ENTER, name, self._number)
        try:
            yield
            if outermost:
                self.note(LEAVE, name, self._number)
        finally:
            self._depth = max(self._depth - 1, 0)

    @contextmanager
    def hushed(self) -> Iterator[None]:
        """Collectives of our own are no part of the log."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def note(self, kind: str, name: str = "", number: int = 0) -> None:
        """Add one record; the count is written last, so that a reader never sees half of one."""
        step, op = self._calls[-1] if self._calls else ("", "")
        place = _HEAD.size + self._count % _CAPACITY * _RECORD.size
        texts = (_bytes(step)[:64], _bytes(op)[:24], _bytes(name)[:123])
        _RECORD.pack_into(self._map, place, time.monotonic(), number, _KINDS.index(kind), *texts)
        self._count += 1
        _HEAD.pack_into(self._map, 0, self._count, self._begin)


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # messages of modules may hold what is no character


def reserve(path: Path) -> None:
    """Make the ring file, with room that the disk really has: else a rank that writes to it is killed.

    Raises:
        OSError: if there is no room; it names the file.
    """
    with path.open("a+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, _SIZE)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from None


def read(path: Path) -> list[Record]:
    """The records of the last case, oldest first; none if there is no such file.

    A module may write anything into the file: then there is one record, of kind ``damaged``.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_SIZE)
    except OSError:
        return []
    if len(data) < _HEAD.size:
        return []
    count, begin = _HEAD.unpack_from(data)
    if begin > count or count > _MOST or (begin == count and count):
        return [_damaged()]
    try:
        return [_record(data, index) for index in range(max(begin, count - _CAPACITY), count)]
    except (struct.error, IndexError):
        return [_damaged()]


def _record(data: bytes, index: int) -> Record:
    seconds, number, kind, *texts = _RECORD.unpack_from(data, _HEAD.size + index % _CAPACITY * _RECORD.size)
    step, op, name = (text.rstrip(b"\0").decode(errors="ignore") for text in texts)
    return Record(seconds, _KINDS[kind], number, step, op, name)


def _damaged() -> Record:
    return Record(0.0, DAMAGED, 0, "", "", "its flight record was written over")


class Progress:
    """How many records some ranks have written, read without copying the files.

    Args:
        paths: of their ring files; a file that is not there yet counts as empty.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)

    def counts(self) -> tuple[int, ...]:
        """One count per rank."""
        return tuple(_count(path) for path in self.paths)


def _count(path: Path) -> int:
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD.size)
    except OSError:
        return 0
    return int(_HEAD.unpack(head)[0]) if len(head) == _HEAD.size else 0


def phases(records: Sequence[Record]) -> list[list[Any]]:
    """``[step, op, done]`` of each call that a rank entered, in order."""
    calls: list[list[Any]] = []
    for record in records:
        if record.kind == CALL:
            calls.append([record.step, record.op, False])
        elif record.kind == RETURN:
            same = (call for call in reversed(calls) if call == [record.step, record.op, False])
            if (call := next(same, None)) is not None:
                call[2] = True
    return calls


class Logged:
    """A ``Comm`` whose collectives are written down; everything else is the inner one's.

    Args:
        comm: what does the work.
        flight: where to write.
    """

    def __init__(self, comm: Any, flight: Flight) -> None:
        self.inner, self.flight = comm, flight

    def exchange(self, name: str, value: Any) -> Any:
        """See ``Comm.exchange``."""
        with self.flight.collective(name), _told():
            return self.inner.exchange(name, value)

    def fence(self, name: str, memory: Any) -> None:
        """See ``Comm.fence``; on a GPU the host does not wait, and so leaves it at once."""
        with self.flight.collective(name), _told():
            self.inner.fence(name, memory)

    def symmetric(self, name: str, shape: Sequence[int], dtype: Any) -> Any:
        """See ``Comm.symmetric``."""
        with self.flight.collective(f"symmetric {name}"), _told():
            return self.inner.symmetric(name, shape, dtype)

    def split(self, groups: Sequence[Sequence[int]]) -> Logged:
        """See ``Comm.split``."""
        with self.flight.collective("split into groups"), _told():
            return Logged(self.inner.split(groups), self.flight)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def tell_peers(comm: Logged, error: BaseException) -> None:
    """Let the peers know that this rank raised: it enters a collective of that name in place of theirs."""
    with suppress(CollectiveError), comm.flight.hushed():
        comm.inner.exchange(f"{_RAISED}{type(error).__name__}: {error}", None)


def finish(comm: Logged) -> None:
    """Enter a collective of its own at the end of a case, so that peers that are still in one do not wait."""
    with comm.flight.hushed(), _told():
        comm.inner.exchange("the end of the case", None)


@contextmanager
def _told() -> Iterator[None]:
    """A peer that entered the collective of ``tell_peers`` is one that raised, and no deadlock."""
    try:
        yield
    except Deadlock as error:
        for place in str(error).split("; "):
            if f"is in {_RAISED}" in place:
                raise PeerFailed(place.replace(f"is in {_RAISED}", "raised ")) from None
        raise


def watch_torch(flight: Flight) -> None:
    """From now on, write down the collectives of ``torch.distributed`` that any code in this process calls.

    Only for processes of our own: it replaces the module's functions. What was imported by name before is missed.
    """
    import torch.distributed as dist

    for name in TORCH_COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, _watched(flight, name, getattr(dist, name)))


def _watched(flight: Flight, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with flight.collective(name):
            return function(*args, **kwargs)

    return watched
