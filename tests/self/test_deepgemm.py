"""The adapter to DeepGEMM on its contract: tiles, alignment, FP8, guard rows, and what a build is asked before use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moonep_validate.cases.case import Case
from moonep_validate.formats import fp8
from moonep_validate.hashing import hashed, normal
from moonep_validate.judge.oracle.arithmetic import Arithmetic
from moonep_validate.judge.oracle.bounds import block_variance
from moonep_validate.judge.oracle.dense import grouped_rows
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.run import run_case
from moonep_validate.reference.experts import swiglu
from moonep_validate.subjects import experts
from moonep_validate.subjects.experts import deepgemm
from moonep_validate.subjects.experts.behaviour import behaviour
from moonep_validate.subjects.experts.implementation import Unavailable
from tests.self import fake_deep_gemm as fake
from tests.self.parts import job_here

FAKE = "tests.self.fake_deep_gemm"
INTS = Case.parse("genB+R2+E6+K2+S7+H128+I128+pad5+hot:1+@slot_used")
REAL = INTS.but(fill=Case.parse("genB+R2+E6+K2+S7+fill:real").fill)


@pytest.fixture(autouse=True)
def _state() -> Iterator[None]:
    before = dict(fake.state)
    yield
    fake.state.update(before)


def verdict_of(name: str, case: Case) -> Verdict:
    return run_case(job_here(name), case)[1]


def test_tiles_that_ignore_the_alignment_are_caught_and_named() -> None:
    first = verdict_of(f"{FAKE}:careless", INTS).first
    assert first is not None
    assert (first.check, first.stage) == ("P1", "experts")
    assert "it is the row of group 0, expert 0" in str(first.findings[0])
    fake.state["alignment"] = 5  # where the groups fit, nothing is wrong
    assert verdict_of(f"{FAKE}:careless", INTS).ok


def test_a_part_that_moves_no_rows_refuses_groups_that_do_not_fit() -> None:
    first = verdict_of(f"{FAKE}:strict", INTS).first
    assert first is not None
    assert (first.check, first.stage) == ("F1", "experts")
    assert "one group id is read per tile of 32 rows" in str(first.findings[0])
    assert verdict_of(f"{FAKE}:strict", INTS.but(pad=64)).ok


def test_the_alignment_is_read_at_each_call() -> None:
    fake.state["alignment"] = 64
    assert verdict_of(f"{FAKE}:strict", INTS.but(pad=64)).ok
    fake.state["alignment"] = 128
    assert verdict_of(f"{FAKE}:strict", INTS.but(pad=64)).status == "failed"


def test_a_write_behind_the_output_is_caught_by_guard_rows() -> None:
    fake.state["behind"] = 2
    first = verdict_of(f"{FAKE}:bf16", INTS).first
    assert first is not None
    assert "m_grouped_bf16_gemm_nt_contiguous wrote row" in str(first.findings[0])


def test_fp8_needs_its_declared_rounding_and_no_more() -> None:
    """The bound has power: the same kernel without the declaration fails, and on exact data nothing is rounded."""
    assert verdict_of(f"{FAKE}:blocks", REAL).ok
    undeclared = verdict_of(f"{FAKE}:undeclared", REAL).first
    assert undeclared is not None
    assert (undeclared.check, undeclared.status) == ("P1", "failed")
    assert verdict_of(f"{FAKE}:undeclared", INTS).ok


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_build_is_tried_before_it_is_used(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deepgemm.attempt(fake.library(), kind, "cpu")
    name, right = deepgemm.ENTRIES[kind], getattr(fake, deepgemm.ENTRIES[kind])

    def off_by_one(a: object, b: object, d: torch.Tensor, ids: torch.Tensor) -> None:
        right(a, b, d, (ids - 1).clamp(min=0))

    monkeypatch.setattr(fake, name, off_by_one)
    with pytest.raises(Unavailable, match="is wrong on a product of ones"):
        deepgemm.attempt(fake.library(), kind, "cpu")


@pytest.mark.parametrize(("kind", "none"), [("bf16", "x @ W0"), ("fp8", "zeros")])
def test_what_a_build_does_with_rows_of_no_group_is_recorded(kind: str, none: str) -> None:
    found = behaviour(fake.library(), kind, "cpu")
    assert found["library"]["file"].endswith("fake_deep_gemm.py")
    assert (found["alignment"], found["tile_of_no_group"], found["last_tile"]) == (32, none, none)
    assert (found["rest_of_a_tile"], found["id_inside_a_tile"]) == ("x @ W1", "first row's")


def test_a_build_that_raises_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise RuntimeError("layout  assertion")

    monkeypatch.setattr(fake, deepgemm.ENTRIES["bf16"], refuse)
    assert behaviour(fake.library(), "bf16", "cpu")["raised"] == "RuntimeError: layout assertion"


def test_fp8_scales_are_powers_of_two_and_values_come_back() -> None:
    x = torch.linspace(-3, 3, 256).bfloat16().repeat(5, 1)
    x[3, 7], x[4] = torch.nan, 0
    codes, scale = fp8.quantise_rows(x)
    assert (tuple(codes.shape), tuple(scale.shape)) == ((5, 256), (5, 2))
    assert scale[3, 0] == scale[4, 1] == 1
    back = codes.float() * scale.repeat_interleave(128, dim=1)
    assert bool(((back - x.float()).abs()[:3] <= x.float().abs()[:3] * 2.0**-4 + 1e-3).all())
    codes, scale = fp8.quantise_weight(torch.full((2, 128, 256), 96.0).bfloat16())
    assert bool((codes.float() * scale[0, 0, 0] == 96).all())
    variance = block_variance(torch.tensor([[224.0] * 100 + [0.0] * 100 + [1e-9] * 100]).double(), 1)
    assert bool((variance[0, 100:200] == 0).all()), "zeros are exact"
    assert variance[0, 0] == (2.0**4) ** 2 / 12  # 224 = 1.75 * 2**7, and E4M3 has 3 bits behind the point
    assert variance[0, 201] > 0


def test_an_early_build_gets_its_scales_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def align(scales: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(scales.shape))
        return scales.T.contiguous().T

    monkeypatch.setattr(fake, "get_col_major_tma_aligned_tensor", align, raising=False)
    deepgemm.attempt(fake.library(), "fp8", "cpu")
    assert seen == [(96, 2)]
    monkeypatch.setattr(fake, "transform_sf_into_required_layout", None, raising=False)
    deepgemm.attempt(fake.library(), "fp8", "cpu")
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["bf16", "blocks"])
def test_bounds_of_declared_rounding_are_neither_loose_nor_tight(kind: str) -> None:
    """Of a normal error half are within 0.67 standard deviations; of these 33,000 elements none is 6 off."""
    seed, H, I = 1, 256, 128
    rows = normal(hashed("rows", seed, torch.arange(128)[:, None], torch.arange(H))).bfloat16()
    index = torch.arange(2)[:, None, None]
    shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    weights = [
        (normal(hashed(n, seed, index, torch.arange(a)[:, None], torch.arange(b))) * b**-0.5).bfloat16()
        for n, (a, b) in shapes.items()
    ]
    factors, ends = torch.linspace(0.1, 0.9, 128), torch.tensor([64, 128], dtype=torch.int32)
    part = experts.find(f"{FAKE}:{kind}")
    out = part.compute(rows, factors, ends, weights, swiglu)
    group = torch.arange(2).repeat_interleave(64)
    want, variance = grouped_rows(rows, group, weights, factors, Arithmetic(rounds=part.part.rounds))
    off = (out.double() - want).abs() / variance.sqrt()
    assert 0.62 < float(off.median()) < 0.74
    assert 3 < float(off.max()) < 6
