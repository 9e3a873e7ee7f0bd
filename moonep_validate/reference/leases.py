"""Did each read see the write that it was promised? Stamps beside the data, written and read in its order.

A lease is memory of one rank that others write or read: the rows of dispatch, their sums in combine, the slots of
prefetch. Each writer stamps the lease with the number of its write before the first and after the last element, in
memory that all ranks map; each reader notes all stamps before and after it reads. The notes are the history that
checks H1 to H4 judge: a stamp that is too old, too new, or half written proves a missing wait, whatever the data
was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moonep_validate.worlds.comm import Comm

AREAS = ("rows", "sums", "slots")


@dataclass
class Read:
    """One read: which lease, who wrote it, and the stamps ``[begin, end]`` of each writer around it.

    Attributes:
        area, owner: the lease.
        writers: ranks that must have made the write ``turn`` by then.
        turn: number of the write that is promised.
        before, after: int64 ``[R, 2]`` on the device, or None where nothing can be stamped.
    """

    area: str
    owner: int
    writers: list[int]
    turn: int
    before: Tensor | None = None
    after: Tensor | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON data; waits for the device."""
        stamps = {
            when: None if tensor is None else tensor.tolist()
            for when, tensor in (("before", self.before), ("after", self.after))
        }
        named = {name: getattr(self, name) for name in ("area", "owner", "writers", "turn")}
        return {**named, **stamps}


@dataclass
class Leases:
    """Stamps and history of one Buffer on one rank; constructing it is collective.

    Attributes:
        turns: area -> number of the last write to it, the same on every rank.
        history: reads since the last ``drain``.
    """

    comm: Comm
    turns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AREAS, 0))
    history: list[Read] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.comm.size
        self._stamps = self.comm.symmetric("stamps", (len(AREAS), size, 2), torch.int64)
        self._stamps[self.comm.rank].zero_()
        self._peers = self.comm.peers(self._stamps)
        self.comm.exchange("stamps ready", None)  # or a rank would zero what a peer has stamped already

    @contextmanager
    def writing(self, area: str, owners: Sequence[int]) -> Iterator[None]:
        """Stamp a write of this rank to the leases of ``owners``; the next turn of the area."""
        self.turns[area] += 1
        self._stamp(area, owners, 0)
        yield
        self._stamp(area, owners, 1)

    @contextmanager
    def reading(self, area: str, owner: int, turn: int | None = None, by: int | None = None) -> Iterator[None]:
        """Note a read of this rank.

        Args:
            area, owner: the lease.
            turn: what the contract promises, by default the last one.
            by: the only rank that writes this lease; by default all do.
        """
        writers = list(range(self.comm.size)) if by is None else [by]
        read = Read(area, owner, writers, self.turns[area] if turn is None else turn)
        # Twice: a write that had not ended shows before the read, one that began too early only after it.
        read.before = self._seen(area, owner)
        yield
        read.after = self._seen(area, owner)
        if not _capturing():
            self.history.append(read)

    def drain(self) -> list[Read]:
        """The reads since the last call."""
        reads, self.history = self.history, []
        return reads

    def _stamp(self, area: str, owners: Sequence[int], end: int) -> None:
        if self._peers is not None and not _capturing():
            for owner in owners:
                self._peers[owner][AREAS.index(area), self.comm.rank, end] = self.turns[area]

    def _seen(self, area: str, owner: int) -> Tensor | None:
        if self._peers is None or _capturing():
            return None
        return self._peers[owner][AREAS.index(area)].clone()


def _capturing() -> bool:
    """Whether a CUDA graph is being captured: it would replay one turn for ever."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
