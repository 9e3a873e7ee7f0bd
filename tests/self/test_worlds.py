"""Worlds: order, deadlocks, failures and hangs in threads; the same bytes and the same findings in processes."""

from __future__ import annotations

import pickle
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from moonep_validate.cases.case import Case, CaseError, Spec
from moonep_validate.faults import FAULTS
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.record import record
from moonep_validate.pipeline.run import run_case
from moonep_validate.pipeline.selection import select_cases
from moonep_validate.trace.trace import same_bits
from moonep_validate.worlds import local, processes, threads
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

    errors = [o.error for o in threads.run(body, 3, 3600)]  # known at once, or this test never ends
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
    assert time.monotonic() - start >= 0.5
    assert "endless" in (outcomes[1].stack or "")
    assert [o.stack for o in outcomes[::2]] == [None, None]
    assert str(outcomes[0].error) == "rank 1 kept running past the deadline"
    assert stopped.wait(60), "the endless Python loop goes on after its rank was abandoned"


def test_slow_but_moving_ranks_are_not_hung() -> None:
    def body(comm: Comm) -> None:
        for _ in range(6):
            time.sleep(0.1)
            barrier(comm)

    assert all(o.error is None and o.stack is None for o in threads.run(body, 2, 0.6))


CASE = Case.parse("genB+R4+E8+K2+S9+H24+I20+hot:5+@slot_used")


def test_the_reference_records_the_same_bytes_in_processes() -> None:
    job = make_job(Options(world="processes"))
    trace, verdict = run_case(job, CASE)
    assert verdict.ok, verdict.diagnosis
    assert verdict.level == "reference"
    assert verdict.command == f"moonep-validate run --case '{CASE}' --world processes"
    assert trace.digest() == record(Job(), CASE).digest()


def test_tensors_that_share_memory_travel_too() -> None:
    case = Case.parse("genB+R4+E8+K2+S3+H64+hot:1+fill:real+k3")
    trace, verdict = run_case(make_job(Options(world="processes")), case)
    assert verdict.ok, verdict.diagnosis
    assert trace.digest() == record(Job(), case).digest()


@pytest.mark.parametrize(
    "fault",
    ["routes-swap-experts", "row-of-another-token", "slot-not-filled", "duplicates-added-twice", "rank-raises"],
)
def test_faults_are_found_at_the_same_stage_in_processes(fault: str) -> None:
    here, there = (
        run_case(make_job(Options(world=w, fault=(fault,))), CASE)[1].first for w in ("threads", "processes")
    )
    assert here is not None
    assert there is not None
    assert (there.stage, there.check, there.status) == (here.stage, here.check, here.status)
    assert there.stage == FAULTS[fault].stage


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world": "mars"}, "--world is 'mars'; known: threads, processes"),
        ({"world": "threads", "device": "cuda"}, "on cuda each rank is a process with a GPU of its own"),
        ({"world": "threads", "moonep_module": "json"}, r"code from outside \(json\) runs in processes only"),
    ],
)
def test_worlds_that_do_not_fit_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(CaseError, match=message):
        make_job(Options(**options))  # type: ignore[arg-type]


def test_cases_are_chosen_by_ranks_and_grouped_by_buffer_key() -> None:
    cases = [CASE, CASE.but(S=5), CASE.but(seed=1), CASE.but(R=2)]
    job = make_job(Options(world="processes"))
    assert select_cases(job, cases, 4) == [CASE.but(S=5), CASE, CASE.but(seed=1)]
    assert select_cases(job, cases, 4, keep_order=True) == cases[:3]
    assert select_cases(Job(), cases, None) == cases
    with pytest.raises(CaseError, match=r"--ranks 3: no case has R=3; there are cases of R = 2, 4"):
        select_cases(job, cases, 3)
    there = torch.cuda.device_count()
    with pytest.raises(CaseError, match=f"--device cuda needs a GPU for each of 4 ranks; torch sees {there}"):
        select_cases(make_job(Options(device="cuda")), cases, 4)


def test_a_case_on_more_gpus_than_there_are_is_not_run() -> None:
    there = torch.cuda.device_count()
    trace = record(
        make_job(Options(device="cuda")), CASE.but(R=there + 1, E=there + 1, routing=Spec("uniform"), witnesses=())
    )
    assert trace.not_run == f"--device cuda needs a GPU for each of {there + 1} ranks; torch sees {there}"


def test_an_aged_pool_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    young = processes.pool(1, {})
    assert processes.pool(1, {}) is young
    monkeypatch.setattr(processes, "OLD_CASES", 0)
    assert young.aged
    other = processes.pool(1, {})
    assert other is not young
    assert not young.alive


def test_a_first_case_of_a_key_has_a_longer_deadline() -> None:
    assert make_job(Options(deadline=4.0)).deadline_at_first == 12.0
    job = replace(
        make_job(Options(world="processes", fault=("rank-never-returns",), deadline=0.5)), first_deadline=2.0
    )
    case = CASE.but(H=8, I=8)
    assert run_case(job, case)[0].autopsy["silent"] == 2.0


def test_values_travel_between_local_ranks_bit_for_bit() -> None:
    sent: dict[str, Any] = {
        "a": torch.tensor([[1.0, float("nan")]], dtype=torch.bfloat16),
        "b": [torch.zeros(0, 3), "text", None],
    }
    got = pickle.loads(local._packed(sent))
    assert same_bits(got["a"], sent["a"])
    assert (got["b"][0].shape, got["b"][1:]) == ((0, 3), ["text", None])
    got["a"][0, 0] = 2  # it may be written
