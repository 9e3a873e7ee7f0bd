"""How do R ranks run in one process, deterministically? As threads that pass a baton.

Only the rank that holds the baton runs. It hands the baton on when it waits in a collective or ends, always
to the next runnable rank in rank order, so two runs interleave in the same way. If no rank can run while some
still wait, that is a deadlock, known at once and without a timer. A rank that keeps the baton longer than the
deadline is hung: its stack is taken, the others are released, and its thread is abandoned.

A disturbed world hands the baton to any runnable rank, as its seed says, also at pauses between collectives: each
seed is another interleaving, and the same seed is the same one again.

Code from outside this project never runs in this world.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor

from moonep_validate.worlds.comm import Abandoned, CollectiveError, Comm, Deadlock, Outcome, PeerFailed

T = TypeVar("T")


class _Collectives:
    """What a ``Comm`` has beside ``exchange``, of all ranks or of some."""

    device = torch.device("cpu")
    baton: _Baton
    rank: int
    size: int

    def exchange(self, name: str, value: T) -> list[T]:
        """See ``Comm.exchange``."""
        raise NotImplementedError

    def fence(self, name: str, memory: Tensor) -> None:
        """See ``Comm.fence``."""
        self.exchange(name, None)

    def symmetric(self, name: str, shape: Sequence[int], dtype: Any) -> Tensor:
        """See ``Comm.symmetric``; here all ranks get the same tensor."""
        mine = torch.empty((self.size, *shape), dtype=dtype) if self.rank == 0 else None
        shared = self.exchange(f"symmetric {name}", mine)[0]
        assert shared is not None
        self.baton.shared[shared.data_ptr()] = shared
        return shared

    def peers(self, tensor: Tensor) -> Sequence[Tensor] | None:
        """See ``Comm.peers``."""
        return tensor.unbind(0) if tensor.data_ptr() in self.baton.shared else None


class _Rank(_Collectives):
    """One rank's end of the baton."""

    def __init__(self, baton: _Baton, rank: int, size: int) -> None:
        self.baton, self.rank, self.size = baton, rank, size
        # A lock of its own: handing on wakes the rank whose turn it is and no other, so that the scheduler of the
        # system has no say in the order.
        self.turn = threading.Lock()  # held while it is another rank's turn
        self.turn.acquire()  # nobody runs before ``run`` lets rank 0 go: all tasks are in their threads by then
        self.waits_in: str | None = None
        self.among: Sequence[_Rank] = ()
        self.calls = 0
        self.value: Any = None
        self.received: list[Any] | None = None
        self.failure: type[CollectiveError] | None = None
        self.ended, self.finished = False, threading.Event()
        self.outcome = Outcome()

    def exchange(self, name: str, value: T) -> list[T]:
        """See ``Comm.exchange``."""
        self.calls += 1
        # The number is part of the name: ranks in two calls of one collective have not met.
        return self.meet(f"{name} (collective #{self.calls})", value, self.baton.ranks)

    def meet(self, name: str, value: T, among: Sequence[_Rank]) -> list[T]:
        """The same among some ranks, which say the same name."""
        if self.failure:
            raise self.failure(self.baton.diagnosis)
        self.waits_in, self.value, self.among = name, value, among
        self.baton.release(self)
        self.turn.acquire()
        if self.failure:
            raise self.failure(self.baton.diagnosis)
        assert self.received is not None
        return self.received

    def split(self, groups: Sequence[Sequence[int]]) -> _Group:
        """See ``Comm.split``."""
        self.exchange("split into groups", None)
        mine = next(group for group in groups if self.rank in group)
        return _Group(self, [self.baton.ranks[rank] for rank in mine])

    def pause(self, name: str) -> None:
        """See ``Comm.pause``: another rank may go on."""
        if self.baton.random is not None and not self.failure:
            self.baton.yield_turn(self)

    def disturb(self, seed: int) -> None:
        """See ``Comm.disturb``."""
        self.baton.random = self.baton.random or Random(seed)


class _Group(_Collectives):
    """Some ranks in an order of their own, as one of them sees them."""

    def __init__(self, whole: _Rank, members: Sequence[_Rank]) -> None:
        self.whole, self.members, self.baton = whole, members, whole.baton
        self.rank, self.size = members.index(whole), len(members)
        self.calls = 0

    def exchange(self, name: str, value: T) -> list[T]:
        """See ``Comm.exchange``."""
        self.calls += 1
        ranks = ", ".join(str(member.rank) for member in self.members)
        return self.whole.meet(f"{name} (collective #{self.calls} of ranks {ranks})", value, self.members)

    def split(self, groups: Sequence[Sequence[int]]) -> _Group:
        """See ``Comm.split``."""
        self.exchange("split into groups", None)
        mine = next(group for group in groups if self.rank in group)
        return _Group(self.whole, [self.members[rank] for rank in mine])

    def pause(self, name: str) -> None:
        """See ``Comm.pause``."""
        self.whole.pause(name)

    def disturb(self, seed: int) -> None:
        """See ``Comm.disturb``."""
        self.whole.disturb(seed)


class _Baton:
    """Who runs next."""

    def __init__(self, size: int) -> None:
        self.ranks = [_Rank(self, rank, size) for rank in range(size)]
        self.holder = 0
        self.handovers = 0
        self.diagnosis = ""
        self.over = threading.Event()
        self.random: Random | None = None  # of a disturbed world
        self.shared: dict[int, Tensor] = {}  # symmetric memory by address; kept, so that no other gets its place

    def yield_turn(self, holder: _Rank) -> None:
        """Hand the baton to any runnable rank, the holder among them, and wait until it comes back."""
        following = self._any_of([holder, *self._all_runnable(holder)])
        if following is not holder:
            self._hand_to(following)
            holder.turn.acquire()
            if holder.failure:
                raise holder.failure(holder.baton.diagnosis)

    def release(self, holder: _Rank) -> None:
        """Hand on to the next runnable rank in rank order.

        The rank that completes a collective goes on itself, which saves a change of threads.
        """
        following = self._complete(holder) or self._runnable(holder) or self._fail_waiting()
        if following is None:
            self.over.set()
        else:
            self._hand_to(following)

    def _hand_to(self, following: _Rank) -> None:
        self.holder = following.rank
        self.handovers += 1
        following.turn.release()

    def _complete(self, holder: _Rank) -> _Rank | None:
        """Deliver the values if every rank of the holder's collective is in it."""
        among = holder.among
        if holder.waits_in is None or any(rank.waits_in != holder.waits_in for rank in among):
            return None
        values = [rank.value for rank in among]
        for rank in among:
            rank.received, rank.waits_in = values, None
        return self._any_of(among) if self.random else holder

    def _runnable(self, holder: _Rank) -> _Rank | None:
        """The next rank after the holder that neither waits nor has ended."""
        runnable = self._all_runnable(holder)
        return self._any_of(runnable) if runnable and self.random else next(iter(runnable), None)

    def _all_runnable(self, holder: _Rank) -> list[_Rank]:
        """All ranks but the holder that neither wait nor have ended, from the one after it on."""
        place = holder.rank + 1
        others = (*self.ranks[place:], *self.ranks[: holder.rank])
        return [rank for rank in others if rank.waits_in is None and not rank.ended]

    def _any_of(self, ranks: Sequence[_Rank]) -> _Rank:
        assert self.random is not None
        return self.random.choice(ranks)

    def _fail_waiting(self) -> _Rank | None:
        """No rank can run: tell those that wait why, and let the first of them go on with that."""
        waiting = [rank for rank in self.ranks if not rank.ended]
        raised = [rank for rank in self.ranks if rank.ended and rank.outcome.error]
        places = [
            f"rank {r.rank} " + (f"waits in {r.waits_in}" if r.waits_in else "has ended") for r in self.ranks
        ]
        self.diagnosis = "; ".join(places)
        kind: type[CollectiveError] = Deadlock
        if raised:
            error = raised[0].outcome.error
            self.diagnosis = f"rank {raised[0].rank} raised {type(error).__name__}: {error}"
            kind = PeerFailed
        for rank in waiting:
            rank.failure, rank.waits_in = kind, None
        return waiting[0] if waiting else None


def run(function: Callable[[Comm], None], size: int, deadline: float) -> list[Outcome]:
    """Run ``function`` on every rank.

    Args:
        function: the SPMD program; what it raises becomes the rank's outcome.
        size: number of ranks.
        deadline: seconds that a rank may keep the baton, i.e. the limit of each step between collectives.

    Returns:
        One outcome per rank. A hung rank's thread is abandoned, everything else has ended.
    """
    baton = _Baton(size)
    workers = [_idle.pop() if _idle else _Worker() for _ in range(size)]
    for rank, worker in zip(baton.ranks, workers, strict=True):
        worker.tasks.put(partial(_body, rank, function))
    baton.ranks[0].turn.release()
    seen, since = -1, time.monotonic()
    # A hang is seen at most a twentieth of the deadline late, and waiting costs nothing meanwhile.
    while not baton.over.wait(timeout=deadline / 20):
        # Handovers are the sign of life: a long case of short turns is alive, one long turn is not.
        if baton.handovers != seen:
            seen, since = baton.handovers, time.monotonic()
        elif time.monotonic() - since > deadline:
            _abandon(baton, workers)
            return [rank.outcome for rank in baton.ranks]
    _idle.extend(workers)
    return [rank.outcome for rank in baton.ranks]


def _body(rank: _Rank, function: Callable[[Comm], None]) -> None:
    rank.turn.acquire()
    try:
        if rank.failure:
            raise rank.failure(rank.baton.diagnosis)
        function(rank)
    except BaseException as error:  # an exception on a rank is data, judged later
        rank.outcome.error = error
    rank.ended = True
    rank.finished.set()
    # A rank whose stack was taken lost the baton then: what it does later must not wake anybody.
    if rank.outcome.stack is None:
        rank.baton.release(rank)


class _Worker:
    """A thread that runs ranks of one case after another; torch spends over a millisecond on each new thread."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while True:
            self.tasks.get()()


_idle: list[_Worker] = []


def _abandon(baton: _Baton, workers: Sequence[_Worker]) -> None:
    """Take the holder's stack, stop its Python code, release the others; none of the workers is used again."""
    stuck = baton.ranks[baton.holder]
    thread = workers[stuck.rank].thread
    assert thread.ident is not None
    frame = sys._current_frames().get(thread.ident)
    stuck.outcome.stack = "".join(traceback.format_stack(frame)) if frame else "(no Python frame)"
    # Python code ends at its next bytecode. Native code that never returns keeps its thread: a daemon, which no
    # later case gets.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Abandoned))
    for rank in baton.ranks:
        if rank is not stuck and not rank.ended:
            rank.failure, rank.baton = PeerFailed, _Baton(0)  # nobody to hand on to
            rank.baton.diagnosis = f"rank {stuck.rank} kept running past the deadline"
            rank.turn.release()
    # The others end before the next case begins: they write to the trace that is judged from here on.
    for rank in baton.ranks:
        if rank is not stuck:
            rank.finished.wait()
