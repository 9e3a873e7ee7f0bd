"""The oracle of expert rows for large layers: in pieces, streaming, and as rough as a GPU computes its variances."""

from __future__ import annotations

import pytest
import torch

from moonep_validate.hashing import hashed, normal
from moonep_validate.judge.oracle.arithmetic import Arithmetic
from moonep_validate.judge.oracle.dense import CHUNK, grouped_rows, pieces
from moonep_validate.judge.oracle.judge import judge_rows, sigmas
from moonep_validate.reference.experts import grouped_experts


def test_the_oracle_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    group = torch.tensor([2, 0, 2, 2, 0, 2, 2])
    x, factor = torch.arange(56).view(7, 8).double() / 9, torch.arange(1, 8).double()
    weights = [torch.arange(96).view(3, 4, 8) / 50, torch.arange(96).view(3, 4, 8) / 70, torch.ones(3, 8, 4)]
    whole = grouped_rows(x, group, weights, factor, Arithmetic())
    assert CHUNK > 2
    monkeypatch.setattr("moonep_validate.judge.oracle.dense.CHUNK", 2)
    assert [(index, rows.tolist()) for index, rows in pieces(group)] == [
        (0, [1, 4]),
        (2, [0, 2]),
        (2, [3, 5]),
        (2, [6]),
    ]
    for one, other in zip(whole, grouped_rows(x, group, weights, factor, Arithmetic()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_rough_variances_of_a_gpu_are_above_the_exact_ones_and_near(monkeypatch: pytest.MonkeyPatch) -> None:
    x, factor = normal(hashed("x", 0, torch.arange(9)[:, None], torch.arange(256))), torch.full((9,), 0.7)
    shapes = ((1, 128, 256), (1, 128, 256), (1, 256, 128))
    weights = [normal(hashed(f"w{n}", 0, torch.arange(a * b * c))).view(a, b, c) / c for n, (a, b, c) in enumerate(shapes)]  # fmt: skip
    for rounds in ((), ("fp8_inputs", "fp8_weights"), ("silu", "route_weight", "weighted_activation")):
        exact = grouped_rows(x, torch.zeros(9).long(), weights, factor, Arithmetic(rounds=rounds))
        with monkeypatch.context() as patch:
            patch.setattr("moonep_validate.judge.oracle.dense._rough", lambda device: torch.float32)
            rough = grouped_rows(x, torch.zeros(9).long(), weights, factor, Arithmetic(rounds=rounds))
        assert torch.equal(exact[0], rough[0])
        ratio = rough[1] / exact[1]
        assert 0.9999 < float(ratio.min()) < float(ratio.max()) < 1.07, rounds


def test_more_elements_may_be_farther_off() -> None:
    """6 deviations are 2e-9 of a normal error: of 2.3e8 elements, each second layer would have one."""
    assert sigmas(10**5) == 6
    assert 6.9 < sigmas(65536 * 3584) < 7.0


def test_streaming_judgement_agrees_with_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right rows pass, one wrong element is found in its row and group, NaN is never right, rows of none are left out."""
    monkeypatch.setattr("moonep_validate.judge.oracle.dense.CHUNK", 3)
    group = torch.tensor([2, 0, -1, 2, 0, 2, 2, 2])
    x = (torch.arange(256).view(8, 32) / 90).bfloat16()
    weights = [((torch.arange(n).view(shape) % 23 - 11) / 20).bfloat16() for n, shape in ((1536, (3, 16, 32)), (1536, (3, 16, 32)), (1536, (3, 32, 16)))]  # fmt: skip
    factor = torch.linspace(0.2, 0.9, 8)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    order = torch.tensor([1, 4, 0, 3, 5, 6, 7])
    out = torch.full((8, 32), torch.nan, dtype=torch.bfloat16)
    out[order] = grouped_experts(x[order], factor[order], ends, weights)
    judged = judge_rows(x, out, group, weights, factor, Arithmetic())
    assert (judged.elements, judged.wrong) == (7 * 32, 0)
    assert 0.5 < judged.worst < 6
    out[5, 7] += 2
    judged = judge_rows(x, out, group, weights, factor, Arithmetic())
    assert (judged.wrong, judged.row, judged.group, judged.column) == (1, 5, 2, 7)
    out[4, 1] = torch.nan
    judged = judge_rows(x, out, group, weights, factor, Arithmetic())
    assert (judged.wrong, judged.worst, judged.row) == (2, torch.inf, 4)
    assert judge_rows(x[:1], out[:1], torch.tensor([-1]), weights, factor[:1], Arithmetic()).elements == 0
