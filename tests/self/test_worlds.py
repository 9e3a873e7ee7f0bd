"""The threads world: order, deadlocks, failures and hangs, each with the same answer on all ranks."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from moonep_validate.worlds import threads
from moonep_validate.worlds.comm import Abandoned, Comm, Deadlock, PeerFailed, agree, all_to_all, barrier


def test_collectives_deliver_in_rank_order() -> None:
    seen: dict[int, object] = {}

    def body(comm: Comm) -> None:
        gathered = comm.exchange("gather", comm.rank * 10)
        sent = [torch.tensor([comm.rank, d]) for d in range(comm.size)]
        received = [t.tolist() for t in all_to_all(comm, "swap", sent)]
        verdict = agree(comm, "agree", f"no {comm.rank}" if comm.rank >= 2 else None)
        seen[comm.rank] = (gathered, received, verdict)

    assert [o.error for o in threads.run(body, 4, 5)] == [None] * 4
    for rank in range(4):
        assert seen[rank] == ([0, 10, 20, 30], [[s, rank] for s in range(4)], "rank 2: no 2")


def test_the_baton_makes_runs_deterministic() -> None:
    def order() -> list[int]:
        log: list[int] = []

        def body(comm: Comm) -> None:
            for _ in range(3):
                log.append(comm.rank)
                barrier(comm)

        threads.run(body, 3, 5)
        return log

    first = order()
    assert first[:3] == [0, 1, 2]
    assert sorted(first) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert all(order() == first for _ in range(20))


def test_symmetric_memory_is_one_tensor() -> None:
    seen = {}

    def body(comm: Comm) -> None:
        pool = comm.symmetric("pool", (3,), torch.float32)
        pool[comm.rank] = comm.rank + 1
        barrier(comm)
        seen[comm.rank] = pool[:, 0].tolist()

    threads.run(body, 3, 5)
    assert list(seen.values()) == [[1.0, 2.0, 3.0]] * 3


def test_a_rank_that_raises_stops_all() -> None:
    def body(comm: Comm) -> None:
        barrier(comm, "first")
        if comm.rank == 1:
            raise ValueError("bad row")
        barrier(comm, "second")

    errors = [o.error for o in threads.run(body, 3, 5)]
    assert isinstance(errors[1], ValueError)
    assert isinstance(errors[0], PeerFailed)
    assert isinstance(errors[2], PeerFailed)
    assert str(errors[0]) == str(errors[2]) == "rank 1 raised ValueError: bad row"


@pytest.mark.parametrize("late", ["returns", "enters another"])
def test_a_missed_collective_is_a_deadlock_at_once(late: str) -> None:
    def body(comm: Comm) -> None:
        barrier(comm, "first")
        if comm.rank == 2:
            if late == "enters another":
                barrier(comm, "other")
            return
        barrier(comm, "second")

    start = time.monotonic()
    errors = [o.error for o in threads.run(body, 3, 60)]
    assert time.monotonic() - start < 5
    assert isinstance(errors[0], Deadlock)
    place = "has ended" if late == "returns" else "waits in other (collective #2)"
    assert (
        str(errors[0])
        == f"rank 0 waits in second (collective #2); rank 1 waits in second (collective #2); rank 2 {place}"
    )


def test_a_rank_that_never_returns_is_abandoned_after_the_deadline() -> None:
    stopped = threading.Event()

    def endless(comm: Comm) -> None:
        barrier(comm)
        try:
            while comm.rank == 1:
                time.sleep(0.01)
        except Abandoned:
            stopped.set()
            raise
        barrier(comm, "never complete")

    start = time.monotonic()
    outcomes = threads.run(endless, 3, 0.5)
    assert 0.5 <= time.monotonic() - start < 3
    assert "endless" in (outcomes[1].stack or "")
    assert [o.stack for o in outcomes[::2]] == [None, None]
    assert str(outcomes[0].error) == "rank 1 kept running past the deadline"
    assert stopped.wait(5), "the endless Python loop goes on after its rank was abandoned"


def test_slow_but_moving_ranks_are_not_hung() -> None:
    def body(comm: Comm) -> None:
        for _ in range(6):
            time.sleep(0.1)
            barrier(comm)

    assert all(o.error is None and o.stack is None for o in threads.run(body, 2, 0.6))
