"""Damaged and altered input: no traceback, no hang, one line, and no pass of what was not recorded."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from moonep_validate.judge.facts import tally
from moonep_validate.pipeline.judge import judge
from moonep_validate.trace.trace import Trace
from tests.self.attacks import ATTACKS, within

#: Examples in CI, and by hand or nightly.
COUNTS = {
    "cases": (400, 20_000),
    "traces": (200, 4_000),
    "folders": (60, 1_000),
    "plans": (400, 20_000),
    "waivers": (300, 8_000),
    "checkpoints": (150, 4_000),
}


def attack(name: str, count: int) -> Counter[str]:
    """How often each outcome came."""
    outcomes: Counter[str] = Counter()

    def one(number: int) -> None:
        with within():
            outcomes[ATTACKS[name](random.Random(number))] += 1

    profile = settings(
        max_examples=count,
        phases=(Phase.explicit, Phase.generate),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    seed(0)(profile(given(st.integers(0, 2**64 - 1))(one)))()
    return outcomes


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_damaged_or_altered_is_refused_in_one_line(name: str) -> None:
    outcomes = attack(name, COUNTS[name][0])
    assert outcomes["refused"] > sum(outcomes.values()) // 4, f"{outcomes}: most attacks change nothing"
    assert outcomes["refused"] < sum(outcomes.values()), f"{outcomes}: nothing gets past the first check"


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_the_same_by_the_thousand(name: str) -> None:
    assert attack(name, COUNTS[name][1])["refused"]


@pytest.mark.parametrize("name", ["topk_ids", "experts_to_copy", "dst", "cu_seqlens"])
def test_a_number_that_is_no_id_costs_no_memory(name: str, recorded: Callable[..., Trace]) -> None:
    """What a subject returns may be anything: 2**31 - 1 took 10 GB where ids are counted."""
    trace = recorded()
    for calls in trace.calls:
        for call in calls:
            if name in call.tensors:
                call.tensors[name].view(-1)[0] = 2**31 - 1
    tracemalloc.start()
    try:
        assert judge(trace).status in ("failed", "unknown")
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()
    assert tally(np.array([[0, -1, 2**31], [1, 1, 2]]), 2).tolist() == [1, 2]


def test_a_hang_is_seen() -> None:
    def forever() -> None:
        while True:
            pass

    with pytest.raises(AssertionError, match="no answer within 1 s"), within(1):
        forever()


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_an_attack_is_the_same_for_the_same_seed(attack: Callable[[random.Random], str]) -> None:
    for number in range(5):
        assert attack(random.Random(number)) == attack(random.Random(number))
