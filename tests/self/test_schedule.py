"""Launch orders are legal and varied; disturbed worlds replay by seed; missing waits are found within few seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.run import run_case
from moonep_validate.sessions.schedule import OPS, Launch, interleaving, launches
from moonep_validate.studies.races import cases, races
from moonep_validate.worlds import threads
from moonep_validate.worlds.comm import Comm, barrier

SEEDS = range(200)


def illegal(batches: Sequence[Launch], order: Sequence[tuple[str, int]]) -> str | None:
    """The first rule that a whole order breaks, told without looking at how it was made."""
    at = {entry: place for place, entry in enumerate(order)}
    if sorted(order) != sorted((op, batch) for batch in range(len(batches)) for op in OPS):
        return "an operation is missing"
    for batch in range(len(batches)):
        if not at["dispatch", batch] < at["prefetch", batch] < at["experts", batch] < at["combine", batch]:
            return "out of order"
    numbers = range(len(batches))
    pairs = [(a, b) for a in numbers for b in numbers if a != b and batches[a].buffer == batches[b].buffer]
    return next((broken for pair in pairs if (broken := between(batches, order, at, *pair))), None)


def between(
    batches: Sequence[Launch],
    order: Sequence[tuple[str, int]],
    at: dict[tuple[str, int], int],
    one: int,
    other: int,
) -> str | None:
    """What two batches of one Buffer do to each other."""
    if at["prefetch", one] < at["prefetch", other] < at["experts", one]:
        return "slots taken"
    for op in ("dispatch", "combine"):
        if batches[one].zero_copy and at["dispatch", one] < at[op, other] < at["combine", one]:
            return f"view overwritten by a {op}"
    after = order[at["experts", one] : at["prefetch", other]]
    same = [op for op, batch in after if batches[batch].buffer == batches[one].buffer]
    if after and not {"dispatch", "combine"} & set(same):
        return "no collective before the next push"
    return None


def test_every_schedule_is_legal_and_they_differ() -> None:
    seen = set()
    for seed in SEEDS:
        batches = launches(3, 2, seed)
        order = interleaving(batches, seed)
        assert illegal(batches, order) is None, (seed, illegal(batches, order))
        assert order == interleaving(batches, seed)
        seen.add(tuple(order))
    assert len(seen) > 100
    kinds = [one for seed in SEEDS for one in launches(3, 2, seed)]
    assert {(f.buffer, f.zero_copy, f.asynchronous) for f in kinds} == {
        (buffer, *flags) for buffer in (0, 1) for flags in ((a, b) for a in (False, True) for b in (False, True))
    }


def test_orders_of_one_batch_at_a_time_are_not_all() -> None:
    overlapping = sum(
        any(order[i][1] != order[i + 1][1] for i in range(len(order) - 1) if order[i][0] != "combine")
        for order in (interleaving(launches(3, 2, seed), seed) for seed in SEEDS)
    )
    assert overlapping > 150


def test_a_disturbed_world_is_another_interleaving_and_the_same_again() -> None:
    def order(seed: int | None) -> list[int]:
        log: list[int] = []

        def body(comm: Comm) -> None:
            if seed is not None:
                comm.disturb(seed)
            for _ in range(4):
                log.append(comm.rank)
                comm.pause("between")
                log.append(comm.rank)
                barrier(comm)

        assert [outcome.error for outcome in threads.run(body, 3, 5)] == [None] * 3
        return log

    plain = order(None)
    assert plain[:6] == [0, 0, 1, 1, 2, 2]
    disturbed = [order(seed) for seed in range(10)]
    assert len({tuple(one) for one in disturbed}) == 10
    assert all(order(seed) == disturbed[seed] for seed in range(10))
    for one in disturbed:  # whoever is early, nobody passes a barrier before all are there
        assert sorted(one[:6]) == sorted(one[6:12]) == [0, 0, 1, 1, 2, 2]


def test_a_rank_that_raises_ends_a_disturbed_world() -> None:
    def body(comm: Comm) -> None:
        comm.disturb(3)
        comm.pause("first")
        if comm.rank == 1:
            raise ValueError("bad row")
        comm.pause("second")
        barrier(comm, "third")

    errors = [type(outcome.error).__name__ for outcome in threads.run(body, 4, 5)]
    assert errors == ["PeerFailed", "ValueError", "PeerFailed", "PeerFailed"]


def test_memory_of_peers_is_reached_by_the_tensor_itself_only() -> None:
    def body(comm: Comm) -> None:
        pool = comm.symmetric("pool", (3,), torch.float32)
        peers = comm.peers(pool)
        assert peers is not None
        peers[(comm.rank + 1) % comm.size].fill_(comm.rank)
        comm.fence("written", pool)
        assert pool[comm.rank].tolist() == [(comm.rank - 1) % comm.size] * 3
        assert comm.peers(torch.zeros(comm.size, 3)) is None

    assert [outcome.error for outcome in threads.run(body, 3, 5)] == [None] * 3


#: Fault of order -> within how many seeds it must be found.
WITHIN = {
    "no-dispatch-exit-fence": 1,
    "no-combine-prologue-fence": 1,
    "no-prefetch-exit-fence": 2,
    "slots-reused-early": 16,
    "view-used-after-dispatch": 8,
}


@pytest.mark.parametrize("fault", WITHIN)
def test_a_missing_wait_is_found_within_so_many_seeds(fault: str) -> None:
    job = make_job(Options(fault=(fault,)))
    seeds = (case for case in cases(0, 2) if case.generation == "B")
    result = races(lambda case: run_case(job, case, exercised=False)[1], seeds, 60, WITHIN[fault])
    assert result.first is not None
    assert {verdict.first.check for verdict in result.failures if verdict.first} & {"H1", "H2", "H3", "H4"}


def test_no_schedule_breaks_the_reference() -> None:
    job = make_job()
    result = races(lambda case: run_case(job, case)[1], cases(0), 60, 12)
    assert (result.tried, result.failures) == (12, []), result.line
    assert result.line.startswith("12 seeds in ")


def test_races_says_which_numbers_of_ranks_there_are() -> None:
    with pytest.raises(CaseError, match="--ranks 3: races has R = 2, 4"):
        next(cases(0, 3))


def test_a_seed_is_a_number() -> None:
    with pytest.raises(CaseError, match="in_flight"):
        Case.parse("genB+R2+E4+K2+S4+in_flight:x")


def test_races_says_at_once_that_there_is_no_gpu(cli: Callable[..., tuple[int, str, str]]) -> None:
    if torch.cuda.device_count() >= 2:
        pytest.skip("there are GPUs")
    code, _, err = cli("races", "--device", "cuda", "--time", "1")
    assert code == 4
    assert "--device cuda needs a GPU for each of 2 ranks; torch sees" in err


def test_races_prints_what_it_found(cli: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = cli("races", "--ranks", "2", "--seeds", "2", "--fault", "no-dispatch-exit-fence")
    assert code == 1
    assert "2 failed, the first at seed 0" in out
    assert "failed at stage dispatch (check H1 rows-read-in-time:" in out
