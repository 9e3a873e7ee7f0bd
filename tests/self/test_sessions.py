"""Sessions that differ from their case: other sizes, or some of the ranks; each is judged as what it is."""

from __future__ import annotations

import pytest

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.judge.facts import steps_of
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.judge import judge
from moonep_validate.pipeline.record import record
from moonep_validate.trace.trace import Trace, TraceError
from moonep_validate.worlds import threads
from moonep_validate.worlds.comm import Comm

SHAPES = Case.parse("genB+R2+E6+K2+S7+H24+I8+pad5+hot:1+shapes")
GROUPS = Case.parse("genB+R4+E12+K3+S7+H24+I8+pad5+hot:1+groups")


def test_each_step_has_the_sizes_of_its_session() -> None:
    steps = steps_of(record(Job(), SHAPES))
    assert (steps["base"].case.E, steps["base"].case.K) == (6, 2)
    for name, size in {"E": 12, "K": 3, "S": 8, "H": 48, "I": 16, "pad": 10}.items():
        for step in (steps[f"other_{name}"], steps[f"other_{name}_again"]):
            assert getattr(step.case, name) == size
            assert sum(getattr(step.case, n) != getattr(SHAPES, n) for n in "EKSHI") == (name != "pad")
    assert steps["other_I"].tap("experts", "weight_down").shape == (2, 6, 24, 16)


def test_each_group_is_judged_by_its_own_ranks() -> None:
    trace = record(Job(), GROUPS)
    steps = steps_of(trace)
    ranks = {name: list(steps[name].ranks) for name in ("base", "turned_0", "turned_1", "halves_0", "halves_1")}
    assert list(ranks.values()) == [[0, 1, 2, 3], [3, 1], [0, 2], [2, 3], [0, 1]]
    assert steps["turned_0"].case.R == 2
    assert steps["turned_0"].call("dispatch", 0) is next(
        call for call in trace.calls[3] if (call.step, call.op) == ("turned_0", "dispatch")
    )
    first, second = (steps[f"turned_{number}"].tap("dispatch", "hidden") for number in (0, 1))
    assert not first.equal(second)


def test_what_a_file_says_of_its_sessions_is_checked() -> None:
    trace = record(Job(), GROUPS)
    calls = [call for calls in trace.calls for call in calls if call.step == "turned_0"]
    for call in calls:
        call.info["differs"] = {**call.info["differs"], "ranks": [1, 9]}
    with pytest.raises(CaseError, match=r"R=2 names the ranks \[1, 9\] of R=4"):
        judge(trace)
    calls[0].info["differs"] = {"R": "two"}
    with pytest.raises(TraceError, match="differs"):
        Trace.from_bytes(trace.to_bytes(), "a file")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("genB+R2+E8+K2+S9+groups", "groups needs an even R of 4 or more, not R=2"),
        ("genB+R4+E8+K2+S9+hot_rank:3+groups", "hot_rank: rank 3 is outside 0..1"),
        ("genB+R2+E8+K32+S9+shapes", "shapes needs sessions with {'K': 33}"),
    ],
)
def test_a_case_whose_sessions_cannot_run_is_refused(line: str, says: str) -> None:
    with pytest.raises(CaseError) as error:
        Case.parse(line)
    assert says in str(error.value)


def test_groups_of_threads_meet_among_themselves() -> None:
    met: dict[int, list[int]] = {}

    def on_rank(comm: Comm) -> None:
        group = comm.split([(3, 1), (0, 2)])
        for _ in range(1 + 2 * (comm.rank % 2)):  # one group has more collectives than the other
            met[comm.rank] = group.exchange("numbers", comm.rank)
        comm.exchange("all", None)
        assert (group.rank, group.size) == (met[comm.rank].index(comm.rank), 2)

    outcomes = threads.run(on_rank, 4, 5.0)
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert met == {0: [0, 2], 1: [3, 1], 2: [0, 2], 3: [3, 1]}


def test_a_rank_that_leaves_its_group_is_a_deadlock() -> None:
    def on_rank(comm: Comm) -> None:
        group = comm.split([(0, 1), (2, 3)])
        if comm.rank != 3:
            group.exchange("numbers", None)

    errors = [outcome.error for outcome in threads.run(on_rank, 4, 5.0)]
    assert [type(error).__name__ for error in errors] == ["NoneType", "NoneType", "Deadlock", "NoneType"]
    assert "rank 2 waits in numbers (collective #1 of ranks 2, 3)" in str(errors[2])
