"""Why did a case not come to its end? One sentence, and what is known of every rank, from what the ranks left.

Pure functions of the ranks' flight records, stacks and exit codes: nothing here touches a process.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from moonep_validate.worlds.flight import CALL, DAMAGED, DONE, ENTER, LEAVE, RAISED, RETURN, Record

#: Stands for the exit code of a process that is gone, where nobody can know it.
GONE = 1000
#: Log lines kept of each rank.
LINES = 20
#: What a rank raises because of its peers; the cause is elsewhere.
_OF_PEERS = ("CollectiveError", "PeerFailed", "Deadlock", "DistBackendError", "DistNetworkError")
#: What gloo and NCCL say where a peer is gone.
_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
#: Frames of ours that say nothing of where a rank is.
_WRAPPERS = re.compile(r"moonep_validate/(pipeline|scenarios|sessions|trace|worlds/flight\.py)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+),? in (\S+)')


@dataclass
class Rank:
    """What is known of one rank.

    Attributes:
        records: of its last case.
        ended: its process ended, with this exit code; below 0 it is the number of a signal.
        stack: of its main thread, most recent call last, or None.
        native: the same with native frames, where a tool for that was at hand and permitted.
        problem: what is wrong with what it sent, or empty.
    """

    records: Sequence[Record]
    ended: int | None = None
    stack: str | None = None
    native: str | None = None
    problem: str = ""
    calls: list[Record] = field(init=False)
    waits: Record | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.calls = []
        for record in self.records:
            if record.kind == CALL:
                self.calls.append(record)
            elif record.kind in (RETURN, RAISED) and self.calls:
                self.calls.pop()
            elif record.kind == ENTER:
                self.waits = record
            elif record.kind == LEAVE:
                self.waits = None

    @property
    def raised(self) -> str:
        """What ended its case, as ``Type: message``, or empty; one that was caught is followed by more."""
        return self.records[-1].name if self.records and self.records[-1].kind == RAISED else ""

    @property
    def of_peers(self) -> bool:
        """Whether it raised only since a peer did not come."""
        return self.raised.startswith(_OF_PEERS) or any(words in self.raised for words in _PEER_GONE)

    @property
    def failed(self) -> bool:
        """Whether it is a cause by itself: it ended, raised, or sent what cannot be read."""
        return self.ended is not None or bool(self.problem) or bool(self.raised and not self.of_peers)

    @property
    def done(self) -> bool:
        """Whether its part of the case was over."""
        return any(record.kind == DONE for record in self.records)

    @property
    def place(self) -> str:
        """The call in which it was last, e.g. ``combine of step base``."""
        if any(record.kind == DAMAGED for record in self.records):
            return "an unknown place, since its flight record was written over"
        if not self.records:
            return "no case"
        last = self.calls[-1] if self.calls else None
        if raised := self.raised:  # where it was raised first, before it went through the calls around that
            last = next(r for r in self.records if r.kind == RAISED and r.name == raised)
        return f"{last.op} of step {last.step}" if last and last.op else "no call"

    @property
    def completed(self) -> str:
        """The last call that returned."""
        last = next((r for r in reversed(self.records) if r.kind == RETURN), None)
        return f"{last.op} of step {last.step}" if last else "none"

    @property
    def number(self) -> int:
        """The last collective that it entered."""
        return max((record.number for record in self.records), default=0)

    def turn(self, name: str) -> int:
        """How often it entered collectives of this name."""
        return sum(record.kind == ENTER and record.name == name for record in self.records)

    @property
    def waiting(self) -> str:
        """The collective that it is in, e.g. ``combine #2 (collective #17)``, or empty."""
        if self.waits is None:
            return ""
        return f"{self.waits.name} #{self.turn(self.waits.name)} (collective #{self.waits.number})"

    @property
    def at(self) -> str:
        """``file:line in function`` of its innermost frame that is no wrapper of ours, or empty."""
        frames = _FRAME.findall(self.stack or "")
        chosen = [f for f in frames if not _WRAPPERS.search(f[0]) and "importlib" not in f[0]] or frames
        return f"{PurePath(chosen[-1][0]).name}:{chosen[-1][1]} in {chosen[-1][2]}" if chosen else ""

    @property
    def state(self) -> str:
        """One phrase."""
        if self.ended is not None:
            return f"{how_ended(self.ended)} in {self.place}"
        if self.problem:
            return f"did not answer: {self.problem}"
        if self.raised and not self.of_peers:
            return f"raised {self.raised} in {self.place}"
        if self.done and not self.raised:
            return "has finished"
        if self.waits is not None:
            return f"waits in {self.waiting}"
        return f"is in {self.place}" + (f" at {self.at}" if self.at else "")

    def to_json(self, rank: int) -> dict[str, Any]:
        """As JSON data, with the last log lines."""
        start = self.records[0].seconds if self.records else 0.0
        return {
            "rank": rank,
            "state": self.state,
            "completed": self.completed,
            "collective": self.number,
            "log": [f"{record.seconds - start:8.3f} s  {record}" for record in self.records[-LINES:]],
            "stack": self.stack,
            "native": self.native,
        }


def autopsy(ranks: Sequence[Rank], silent: float | None = None) -> dict[str, Any]:
    """What is known of a case that did not come to its end, as JSON data.

    Args:
        ranks: in rank order.
        silent: seconds without a sign from any rank, where that is why it was ended.
    """
    return {
        "diagnosis": diagnosis(ranks),
        "silent": silent,
        "ranks": [one.to_json(rank) for rank, one in enumerate(ranks)],
    }


def diagnosis(ranks: Sequence[Rank]) -> str:
    """One sentence that names the rank which did it, and in what."""
    failed = [rank for rank, one in enumerate(ranks) if one.failed]
    if failed:  # the first to fail; an exit leaves no time of its own, but its last record does
        first = min(failed, key=lambda rank: (ranks[rank].ended is None, _last(ranks[rank])))
        return _failure(first, ranks) + _waiting(ranks)
    waiting = {one.waiting for one in ranks if one.waits is not None}
    away = [rank for rank, one in enumerate(ranks) if one.waits is None]
    if not waiting:
        return _listed(ranks, [rank for rank in away if not ranks[rank].done] or away) or "no rank left a sign"
    if not away and len(waiting) == 1:
        return f"all ranks wait in {waiting.pop()}: it was entered by all, and does not complete"
    if not away and len({one.waits.number for one in ranks if one.waits}) == 1:
        return f"ranks are in different collectives: {_listed(ranks, range(len(ranks)))}"
    return _missing(ranks)


def _failure(rank: int, ranks: Sequence[Rank]) -> str:
    """What a rank that ended or raised died of."""
    one = ranks[rank]
    if any(record.kind == RAISED and "device-side assert" in record.name for record in one.records):
        ended = "" if one.ended is None else f", and its process {how_ended(one.ended)}"  # it cannot clean up
        return f"CUDA device-side assert on rank {rank} in {one.place}: its context is poisoned{ended}"
    if one.ended is not None:
        return f"rank {rank} {how_ended(one.ended)} in {one.place}"
    if one.problem:
        return f"rank {rank} did not answer: {one.problem}"
    if "OutOfMemoryError" in one.raised or "MemoryError" in one.raised or "out of memory" in one.raised:
        return f"out of memory on rank {rank} in {one.place}: {one.raised}"
    return f"rank {rank} raised {one.raised} in {one.place}"


def _waiting(ranks: Sequence[Rank]) -> str:
    """Who waits meanwhile, as the end of a sentence."""
    groups: dict[str, list[int]] = {}
    for rank, one in enumerate(ranks):
        if not one.failed and one.waits is not None:
            groups.setdefault(one.waiting, []).append(rank)
    return "".join(f"; {_ranks(members)} in {name}" for name, members in groups.items())


def _missing(ranks: Sequence[Rank]) -> str:
    """Who never entered the collective in which the others wait: the earliest one that some wait in."""
    waits = [one.waits for one in ranks if one.waits is not None]
    first = min(waits, key=lambda record: record.number)
    inside = [rank for rank, one in enumerate(ranks) if one.waits is not None and one.waits.name == first.name]
    inside = [rank for rank in inside if ranks[rank].number == first.number]
    name = ranks[inside[0]].waiting
    others = [rank for rank in range(len(ranks)) if rank not in inside]
    verb = "waits" if len(inside) == 1 else "wait"
    return f"{_names(others)} never entered {name}; {_names(inside)} {verb} in it; {_listed(ranks, others)}"


def _listed(ranks: Sequence[Rank], chosen: Sequence[int]) -> str:
    return "; ".join(f"rank {rank} {ranks[rank].state}" for rank in chosen)


def _ranks(members: list[int]) -> str:
    return f"{_names(members)} {'waits' if len(members) == 1 else 'wait'}"


def _names(members: Sequence[int]) -> str:
    return f"rank{'s' * (len(members) > 1)} {', '.join(map(str, members))}"


def how_ended(code: int) -> str:
    """An exit code in words."""
    if code == GONE:
        return "ended (torchrun knows how)"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    return f"ended with signal {-code}{name}"


def _last(one: Rank) -> float:
    """When it raised, or else its last sign."""
    return next(
        (r.seconds for r in one.records if r.kind == RAISED), one.records[-1].seconds if one.records else 0.0
    )
