"""The planner: golden vectors, a naive loop on thousands of random routings, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moonep_validate.cases.layout import Layout
from moonep_validate.judge.oracle.plan import make_plan
from moonep_validate.reference.planner import plan_rank
from tests.self.naive_plan import naive_plan

G1 = [[[0, 1], [0, 2], [1, 0]], [[0, 3], [1, 0], [0, 1]]]
G2 = [[[0, 0]] * 3] * 2
G3 = [[[1, 1], [0, 0]], [[0, 3], [3, 3]], [[2, 2], [0, 1]], [[0, 0], [3, 0]]]

GOLDEN: dict[str, tuple[Any, Layout, dict[str, Any]]] = {
    "G1-B": (
        G1,
        Layout("B", 2, 4, 2, 3, 4),
        {
            "num_rows": 20,
            "quotas": [[0, 4], [0, 0]],
            "alloc": [[2, 4], [4, 0], [0, 1], [0, 1]],
            "experts_to_copy": [[-1, -1], [0, -1]],
            "remote_stats": [[0, 1], [1, 0]],
            "cu_seqlens": [[4, 8, 8, 8], [4, 8, 12, 12]],
            "zero_fill_ranges": [[[2, 2], [0, 0], [0, 0], [0, 0]], [[1, 3], [5, 3], [0, 0], [0, 0]]],
            "dst": [[0, -5, 1, 20, 5, 28], [29, -25, 6, 30, 31, 7]],
        },
    ),
    "G1-A": (
        G1,
        Layout("A", 2, 4, 2, 3, 4, slots=2),
        {
            "num_rows": 18,
            "experts_to_copy": [[-1, -1], [0, -1]],
            "cu_seqlens": [[4, 8, 8, 8, 8, 8], [0, 0, 4, 8, 12, 12]],
            "dst": [[0, -5, 1, 18, 5, 26], [27, -23, 6, 28, 29, 7]],
        },
    ),
    "G1-A-one-slot": (
        G1,
        Layout("A", 2, 4, 2, 3, 4, slots=1),
        {
            "experts_to_copy": [[-1], [0]],
            "cu_seqlens": [[4, 8, 8, 8, 8], [0, 0, 4, 8, 12]],
            "dst": [[0, -5, 1, 18, 5, 26], [27, -23, 6, 28, 29, 7]],
        },
    ),
    "G2-B": (
        G2,
        Layout("B", 2, 4, 2, 3, 4),
        {
            "experts_to_copy": [[-1, -1], [0, -1]],
            "cu_seqlens": [[8, 8, 8, 8], [0, 0, 8, 8]],
            "zero_fill_ranges": [[[6, 2], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0], [6, 2], [0, 0]]],
            "dst": [[0, -2, 2, -4, 4, -6], [20, -22, 22, -24, 24, -26]],
        },
    ),
    "G2-A": (
        G2,
        Layout("A", 2, 4, 2, 3, 4, slots=2),
        {
            "num_rows": 18,
            "cu_seqlens": [[8] * 6, [0, 0, 0, 0, 8, 8]],
            "dst": [[0, -2, 2, -4, 4, -6], [18, -20, 20, -22, 22, -24]],
        },
    ),
    "G3-B": (
        G3,
        Layout("B", 4, 8, 2, 2, 2),
        {
            "num_rows": 8,
            "quotas": [[0, 0, 4, 4], [2, 0, 0, 0], [0] * 4, [0] * 4],
            "alloc": [[0, 0, 4, 3], [2, 0, 0, 1], [0, 2, 0, 0], [2, 2, 0, 0], *[[0] * 4] * 4],
            "experts_to_copy": [[3, -1], [-1, -1], [0, -1], [0, 1]],
            "remote_stats": [[1, 3], [0, 1], [1, 0], [2, 0]],
            "cu_seqlens": [[0, 2, 4, 4], [2, 4, 4, 4], [0, 0, 4, 4], [0, 0, 4, 6]],
            "zero_fill_ranges": [*[[[0, 0]] * 4] * 3, [[0, 0], [0, 0], [3, 1], [5, 1]]],
            "dst": [[0, -2, 16, -18], [18, 2, 3, 10], [8, -10, 19, 28], [24, -26, 11, 26]],
        },
    ),
    "G3-A-overflow": (
        G3,
        Layout("A", 4, 8, 2, 2, 2, slots=1),
        {
            "experts_to_copy": [[3], [-1], [0], [0]],
            "remote_stats": [[1, 2], [0, 1], [1, 0], [2, 0]],
            "cu_seqlens": [
                [0, 2, 2, 2, 2, 2, 2, 2, 4],
                [0, 0, 2, 4, 4, 4, 4, 4, 4],
                [0, 0, 0, 0, 0, 0, 0, 0, 4],
                [0, 2, 2, 2, 2, 2, 2, 2, 6],
            ],
            "dst": [[0, -2, 16, -18], [18, 2, 3, 10], [8, -10, 19, 24], [26, -28, 11, 28]],
        },
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_vectors(name: str) -> None:
    topk, layout, expected = GOLDEN[name]
    plan = make_plan(np.array(topk), layout)
    for field, value in expected.items():
        got = layout.num_rows if field == "num_rows" else getattr(plan, field).tolist()
        assert got == value, f"{name}: {field}"


@pytest.mark.parametrize("generation", ["A", "B"])
def test_agrees_with_naive_loop_on_random_routings(generation: str) -> None:
    """2,500 routings a generation, many with ties, empty experts, repeated ids and slots beyond need."""
    random = np.random.default_rng(20260728)
    for number in range(2500):
        topk, layout = _random_routing(random, generation)
        plan, expected = make_plan(topk, layout), naive_plan(topk, layout)
        assert layout.num_rows == expected.pop("num_rows"), f"routing {number}: {layout}"
        for field, value in expected.items():
            assert getattr(plan, field).tolist() == value, (
                f"routing {number}: {field} of {layout}, topk {topk.tolist()}"
            )


@pytest.mark.parametrize("ranks", [9, 33, 65, 96, 128])
def test_agrees_with_naive_loop_on_many_ranks(ranks: int) -> None:
    """Duplicates are marked with one bit per rank: every width of integer, and more than one of them."""
    topk = np.random.default_rng(ranks).integers(0, 2 * ranks, (ranks, 3, 32))
    layout = Layout("B", ranks, 2 * ranks, 32, 3, 2)
    plan, expected = make_plan(topk, layout), naive_plan(topk, layout)
    assert plan.dst.tolist() == expected["dst"]
    assert plan.cu_seqlens.tolist() == expected["cu_seqlens"]


def test_reference_planner_agrees_with_oracle() -> None:
    """The stand-in derives its own rows from the rank's side; both must give the same plan."""
    random = np.random.default_rng(7)
    for _ in range(200):
        topk, layout = _random_routing(random, "B")
        plan = make_plan(topk, layout)
        counts = torch.stack([torch.from_numpy(t).flatten().bincount(minlength=layout.E) for t in topk])
        for rank in range(layout.R):
            local = plan_rank(torch.from_numpy(topk[rank]), counts, rank, layout)
            assert local.dst.tolist() == plan.dst[rank].tolist()
            assert local.cu_seqlens.tolist() == plan.cu_seqlens[rank].tolist()
            assert local.zero_fill_ranges.tolist() == plan.zero_fill_ranges[rank].tolist()
            assert local.remote_stats.tolist() == plan.remote_stats[rank].tolist()
            assert local.experts_to_copy.tolist() == plan.experts_to_copy.tolist()


def test_rows_never_exceed_the_buffer() -> None:
    """G-STATIC: for legal input cu_seqlens[-1] <= NvS, also where almost every row is padding."""
    random = np.random.default_rng(39039)
    layout = Layout("A", 64, 384, 8, 8, 128)
    topk = random.integers(0, 384, (64, 8, 8))
    assert make_plan(topk, layout).cu_seqlens.max() <= layout.num_rows == 1588


@pytest.mark.parametrize(
    ("topk", "message"),
    [
        ([[[0], [4]]], "expert id 4 at rank 0, token 1, k 0 is outside 0..3"),
        ([[[-1], [0]]], "expert id -1 at rank 0, token 0, k 0 is outside 0..3; MoonEP has no sentinel id"),
        ([[[0]]], "R=1 rows of S*K=2 are needed"),
    ],
)
def test_bad_routing_is_refused(topk: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is compared below
        make_plan(np.array(topk), Layout("B", 1, 4, 1, 2, 1))
    assert message in str(error.value)


def _random_routing(random: np.random.Generator, generation: str) -> tuple[Any, Layout]:
    R, per_rank = int(random.integers(1, 7)), int(random.integers(1, 6))
    K, S = int(random.integers(1, 6)), int(random.integers(1, 8))
    slots = int(random.integers(1, per_rank + 3)) if generation == "A" else None
    layout = Layout(generation, R, R * per_rank, K, S, int(random.integers(1, 9)), slots)
    kind = random.integers(0, 3)
    if kind == 0:
        topk = random.integers(0, layout.E, (R, S, K))
    elif kind == 1:  # few experts: heavy load, many ties and repeated ids
        topk = random.choice(random.integers(0, layout.E, 2), (R, S, K))
    else:
        popularity = random.lognormal(0, 2, layout.E)
        topk = random.choice(layout.E, (R, S, K), p=popularity / popularity.sum())
    return topk, layout
