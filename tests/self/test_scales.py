"""The fill ``scales``: all scales and codes of MXFP4 reach a decoder, and one that is wrong on any of them fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.cases.profiles import profile
from moonep_validate.data.problem import batch, expert_weights, stored
from moonep_validate.formats import mxfp4
from moonep_validate.formats.stored import FORMATS
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.run import run_case
from moonep_validate.reference.experts import grouped_experts, swiglu

LAYER = Case.parse("genB+R2+E4+K2+S17+pad4+hot:1+fill:scales+mxfp4+@slot_used")
ALONE = Case.parse("genB+R1+E4+K2+S9+pad8+fill:scales+mxfp4+grouped")
ALL_BYTES = set(range(2, 253))

#: What is wrong with the decoder below; None: nothing.
wrong: dict[str, Callable[[Tensor, Tensor], Tensor] | None] = {"decode": None}


def careless(rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Sequence[Tensor]) -> Tensor:
    decode = wrong["decode"] or (lambda codes, scale: mxfp4.decode(codes, scale, torch.bfloat16))
    values = [decode(codes, scale) for codes, scale in zip(weights[:3], weights[3:], strict=True)]
    return grouped_experts(rows, row_weights, cu_seqlens, values, swiglu)


careless.formats = ("mxfp4",)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _right_again() -> Iterator[None]:
    yield
    wrong["decode"] = None


def verdict_with(decode: Callable[[Tensor, Tensor], Tensor] | None, case: Case) -> Verdict:
    wrong["decode"] = decode
    return run_case(careless_job(), case)[1]


@cache
def careless_job() -> Job:
    """Runs in this process, where ``wrong`` is; experts from outside run in workers otherwise."""
    return replace(make_job(Options(experts="tests.self.test_scales:careless")), world="threads")


def assert_caught(decode: Callable[[Tensor, Tensor], Tensor], what: object, case: Case = ALONE) -> None:
    first = verdict_with(decode, case).first
    assert first is not None, what
    assert (first.check, first.stage) == ("P1", "experts"), what


def clamped(codes: Tensor, scale: Tensor) -> Tensor:
    """The bytes that every other mxfp4 case keeps to."""
    return mxfp4.decode(codes, scale.clamp(121, 131), torch.bfloat16)


def int8_per_expert(codes: Tensor, scale: Tensor) -> Tensor:
    values = mxfp4.decode(codes, scale, torch.float64)
    unit = values.abs().amax(dim=(1, 2), keepdim=True) / 127
    return ((values / unit).round() * unit).bfloat16()


def one_scale_per_128(codes: Tensor, scale: Tensor) -> Tensor:
    values = mxfp4.decode(codes, scale, torch.float64).nan_to_num()  # unused slots hold NaN
    largest = scale.unflatten(-1, (-1, 4)).amax(-1, keepdim=True).repeat_interleave(4, -1).flatten(-2)
    again = mxfp4.encode_elements(values / mxfp4.scale_values(largest, torch.float64).repeat_interleave(32, -1))
    return mxfp4.decode(mxfp4.pack(again), largest, torch.bfloat16)


def float16_values(codes: Tensor, scale: Tensor) -> Tensor:
    return mxfp4.decode(codes, scale).half().bfloat16()


def test_weights_walk_through_all_scales_and_codes() -> None:
    weights = expert_weights(LAYER, 0)
    packed = stored(LAYER, weights)
    form = FORMATS["mxfp4"]
    for name, values in zip(
        ("gate", "up", "down"), form.values([packed[n] for n in form.names], torch.float64), strict=True
    ):
        assert torch.equal(values, weights[name].double()), name  # nothing is lost in the packing
        assert set(packed[f"{name}_scale"].unique().tolist()) == ALL_BYTES, name
        codes = mxfp4.unpack(packed[name]).unflatten(-1, (-1, 16, 2))
        for nibble in range(2):
            assert torch.equal(
                codes[..., nibble].sort(-1)[0], torch.arange(16).expand(codes.shape[:-1]).to(torch.uint8)
            ), name
    for expert, name in ((0, "gate"), (1, "up")):  # one expert has one matrix of a single block of 128 x 128
        assert set(packed[f"{name}_scale"][expert].unique().tolist()) == ALL_BYTES
    largest = max(float(tensor.abs().max()) for tensor in weights.values())
    smallest = min(float(tensor[tensor != 0].abs().min()) for tensor in weights.values())
    assert (largest, smallest) == (6 * 2.0**125, 2.0**-126)


def test_what_is_computed_with_them_stays_in_range() -> None:
    weights = {name: tensor.double() for name, tensor in expert_weights(LAYER, 0).items()}
    x = batch(LAYER, 0).hidden.double()
    gate, up = x @ weights["gate"].mT, x @ weights["up"].mT
    inner = torch.nn.functional.silu(gate) * up
    out = inner @ weights["down"].mT
    for tensor, top in ((gate, 2.0**70), (up, 2.0**70), (inner, 2.0**80), (out, 2.0**80)):
        assert 0 < float(tensor.abs().max()) < top
    terms = weights["gate"][0, 64] * x[0]  # of one sum: blocks of 32 columns of one size, scales 2**124 apart
    sizes = terms.unflatten(0, (4, 32)).abs().amax(-1)
    assert float(sizes.max() / sizes.min()) < 32


@pytest.mark.parametrize("case", [LAYER, ALONE])
def test_right_decoders_pass(case: Case) -> None:
    assert verdict_with(None, case).ok
    for name in ("reference", "float64", "torch"):
        verdict = run_case(make_job(Options(experts=name)), case)[1]
        assert verdict.ok, verdict.diagnosis


@pytest.mark.parametrize("decode", [clamped, int8_per_expert, one_scale_per_128, float16_values])
@pytest.mark.parametrize("case", [LAYER, ALONE])
def test_requantised_or_clamped_weights_are_found(decode: Callable[[Tensor, Tensor], Tensor], case: Case) -> None:
    assert_caught(decode, decode.__name__, case)


def test_no_other_case_of_the_profile_finds_clamped_scales() -> None:
    lines = [case for case in profile("default") if case.format.name == "mxfp4" and case.fill.name != "scales"]
    assert len(lines) >= 4
    assert all(verdict_with(clamped, case).ok for case in lines)


@pytest.mark.parametrize("byte", [2, 3, 20, 63, 64, 96, 120, 121, 127, 132, 160, 191, 192, 240, 251, 252])
def test_a_scale_that_is_wrong_is_found(byte: int) -> None:
    def decode(codes: Tensor, scale: Tensor) -> Tensor:
        other = byte - 1 if byte > 127 else byte + 1
        return mxfp4.decode(codes, torch.where(scale == byte, other, scale), torch.bfloat16)

    assert_caught(decode, byte)


@pytest.mark.parametrize("nibble", [0, 1])
@pytest.mark.parametrize("code", [code for code in range(16) if code not in (0, 8)])
def test_a_code_that_is_wrong_is_found(code: int, nibble: int) -> None:
    other = code ^ 8 if code % 2 else code - 1

    def decode(codes: Tensor, scale: Tensor) -> Tensor:
        elements = mxfp4.unpack(codes)
        here = torch.arange(elements.shape[-1]) % 2 == nibble
        changed = torch.where((elements == code) & here, other, elements).to(torch.uint8)
        return mxfp4.decode(mxfp4.pack(changed), scale, torch.bfloat16)

    assert_caught(decode, (code, nibble))


def test_limits_of_the_fill() -> None:
    with pytest.raises(
        CaseError, match="H=72: fill:scales gives each 32 columns a scale; the next larger H is 96"
    ):
        Case.parse("genB+R2+E4+K2+S3+H72+fill:scales")
    with pytest.raises(CaseError, match="scenario variants: fill:scales runs base, two_poisons"):
        Case.parse("genB+R2+E4+K2+S3+fill:scales+variants")
    for line in ("H32+I32", "H64+I96", "H256+I160"):
        verdict = run_case(make_job(Options()), Case.parse(f"genA+R2+E4+K2+S7+{line}+fill:scales+mxfp4"))[1]
        assert verdict.ok, verdict.diagnosis


def test_powers_rise_evenly() -> None:
    from moonep_validate.data.scales import _rising

    assert _rising(128, 63).unique().tolist() == list(range(-63, 64))
    assert (_rising(1, 62).tolist(), _rising(2, 62).tolist()) == ([0], [-62, 62])
    assert all(b >= a for a, b in pairwise(_rising(5, 62).tolist()))
