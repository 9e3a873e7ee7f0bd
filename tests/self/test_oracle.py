"""The arithmetic oracles: bounds from both sides, combine to the last bit, the dense layer against a loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moonep_validate.judge.oracle.arithmetic import Arithmetic
from moonep_validate.judge.oracle.bounds import rounding_variance, within
from moonep_validate.judge.oracle.combine import combined
from moonep_validate.judge.oracle.dense import dense_layer, expert_rows


def test_rounding_variance_is_that_of_bf16() -> None:
    """Measured over random values of several binades, within 2%; exactly zero for zero."""
    generator = torch.Generator().manual_seed(3)
    for scale in (1e-3, 1.0, 700.0):
        values = (torch.rand(200_000, generator=generator, dtype=torch.float64) + 1) * scale
        error = values.bfloat16().double() - values
        assert abs(error.var().item() / rounding_variance(values).mean().item() - 1) < 0.02
    assert rounding_variance(torch.zeros(2, dtype=torch.float64)).tolist() == [0.0, 0.0]


def test_bound_is_tight_on_both_sides() -> None:
    """One part in a thousand inside six sigma is accepted, one part in a thousand outside is not."""
    want = torch.tensor([[1.0, -2.0, 0.0, float("nan")]], dtype=torch.float64)
    variance = torch.tensor([[1e-4, 4e-4, 0.0, 1.0]], dtype=torch.float64)
    step = 6 * variance.sqrt()
    assert within(want, want + 0.999 * step, variance).all()
    assert within(want, want + 1.001 * step, variance).tolist() == [[False, False, True, True]]
    assert within(want, torch.full_like(want, torch.nan), variance).tolist() == [[False, False, False, True]]
    assert within(want, torch.full_like(want, torch.inf), variance).tolist() == [[False, False, False, False]]


def test_legal_summation_orders_stay_inside_the_bound() -> None:
    """1,000 random orders and blockings of the float32 sums of one expert, none outside."""
    generator = torch.Generator().manual_seed(11)
    x, scale = torch.randn(4, 96, generator=generator).bfloat16(), torch.rand(4, generator=generator)
    gate, up = (torch.randn(2, 64, 96, generator=generator) / 10).bfloat16()
    down = (torch.randn(40, 64, generator=generator) / 8).bfloat16()
    want, variance = expert_rows(x, (gate, up, down), scale)
    ratios = []
    for _ in range(1000):
        g, u = (_shuffled_product(x.float(), w.float(), generator) for w in (gate, up))
        a = (torch.nn.functional.silu(g) * u).bfloat16().float()
        y = (_shuffled_product(a, down.float(), generator) * scale[:, None]).bfloat16().double()
        assert within(want, y, variance).all()
        ratios.append(((y - want).abs() / (6 * variance.sqrt())).median())
    assert 0.05 < torch.stack(ratios).median() < 0.5


@pytest.mark.parametrize(
    "fault", ["one term missing", "weight twice", "gate and up swapped", "half precision weight"]
)
def test_real_faults_are_outside_the_bound(fault: str) -> None:
    generator = torch.Generator().manual_seed(5)
    x, scale = torch.randn(4, 96, generator=generator).bfloat16(), torch.rand(4, generator=generator) * 0.5 + 0.1
    gate, up = (torch.randn(2, 64, 96, generator=generator) / 10).bfloat16()
    down = (torch.randn(40, 64, generator=generator) / 8).bfloat16()
    want, variance = expert_rows(x, (gate, up, down), scale)
    bad_x, bad_scale, bad_weights = x.clone(), scale, [gate, up, down]
    if fault == "one term missing":
        bad_x[:, 95] = 0
    elif fault == "weight twice":
        bad_scale = scale**2
    elif fault == "gate and up swapped":
        bad_weights = [up, gate, down]
    else:
        bad_weights = [gate.to(torch.float8_e4m3fn).bfloat16(), up, down]
    got, _ = expert_rows(bad_x, bad_weights, bad_scale, Arithmetic(exact=True))
    assert not within(want, got.bfloat16().double(), variance).all()


def test_combine_rounds_once_per_rank_and_in_order_of_k() -> None:
    """256 + 1 rounds to 256 on the holder; the same three rows on three ranks give 258."""
    rows = torch.tensor([[[256.0], [1.0], [1.0]], [[256.0], [1.0], [1.0]], [[256.0], [1.0], [1.0]]]).bfloat16()
    row = np.array([[[0, 1, 2]]])
    assert combined(rows, np.array([[[0, 0, 0]]]), row).flatten().tolist() == [258.0]
    assert combined(rows, np.array([[[0, 0, 1]]]), row).flatten().tolist() == [256.0]
    assert combined(rows, np.array([[[1, 0, 0]]]), row).flatten().tolist() == [258.0]


def test_combine_order_is_visible() -> None:
    """(2**30 - 2**30) + 1 is 1, 2**30 + (1 - 2**30) is 0: only ascending k gives the first."""
    rows = torch.tensor([[[2.0**30]], [[-(2.0**30)]], [[1.0]]]).bfloat16()
    row = np.zeros((1, 1, 3), int)
    assert combined(rows, np.array([[[0, 1, 2]]]), row).item() == 1.0
    assert combined(rows, np.array([[[0, 2, 1]]]), row).item() == 0.0


def test_combine_does_not_read_other_rows() -> None:
    rows = torch.full((2, 4, 3), torch.nan).bfloat16()
    rows[0, 1], rows[1, 2] = 2.0, 3.0
    assert combined(rows, np.array([[[0, 1]]]), np.array([[[1, 2]]])).tolist() == [[[5.0, 5.0, 5.0]]]


def test_dense_layer_equals_a_loop_over_tokens() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 3, 16, generator=generator)
    ids = torch.tensor([[[0, 2], [1, 1], [2, 0]], [[1, 0], [2, 2], [0, 1]]])
    scale = torch.rand(2, 3, 2, generator=generator)
    gate, up = torch.randn(2, 3, 5, 16, generator=generator).double()
    down = torch.randn(3, 16, 5, generator=generator).double()
    got, variance = dense_layer(hidden, ids, scale, (gate, up, down), None)
    for r in range(2):
        for s in range(3):
            want = torch.zeros(16, dtype=torch.float64)
            for k in range(2):
                e, x = int(ids[r, s, k]), hidden[r, s].double()
                g = gate[e] @ x
                want += scale[r, s, k] * (down[e] @ (g / (1 + torch.exp(-g)) * (up[e] @ x)))
            torch.testing.assert_close(got[r, s], want, rtol=1e-12, atol=1e-12)
    assert (variance > 0).all()


def _shuffled_product(x: torch.Tensor, w: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """``bf16(x @ w.T)`` with the terms in a random order, summed in blocks of a random size."""
    order = torch.randperm(x.shape[1], generator=generator)
    size = int(torch.randint(1, x.shape[1] + 1, (1,), generator=generator))
    total = torch.zeros(x.shape[0], w.shape[0])
    for block in order.split(size):
        total = total + x[:, block] @ w[:, block].T
    return total.bfloat16().float()
