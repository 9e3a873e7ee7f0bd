"""A format is one value in one file: here is a new one, and everything that handles weights asks it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.cases.vocabulary import VOCABULARY, add_format
from moonep_validate.faults import parse_fault
from moonep_validate.formats import FormatError, fp8
from moonep_validate.formats.stored import FORMATS
from moonep_validate.formats.weight_format import Piece, WeightFormat
from moonep_validate.judge.oracle.offsets import offsets
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.run import run_case
from moonep_validate.studies.shrink import _changes
from moonep_validate.tools.memory import MODELS, plan

# The file of the new format: int8 codes, offset by 128, under a float32 scale per row and 64 columns.


def _encode(values: Tensor) -> tuple[Tensor, ...]:
    blocks = values.float().unflatten(-1, (-1, 64))
    scale = torch.exp2((blocks.abs().amax(-1).clamp(min=2.0**-100) / 127).log2().ceil())
    return ((blocks / scale[..., None]).round() + 128).flatten(-2).to(torch.uint8), scale


def _decode(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    assert scale is not None
    values: Tensor = ((codes.to(dtype) - 128).unflatten(-1, (-1, 64)) * scale.to(dtype)[..., None]).flatten(-2)
    return values


def _negate(codes: Tensor) -> None:
    codes.copy_(256 - codes.int())


def _refuse(name: str, scale: Tensor) -> None:
    if bool((scale <= 0).any()):
        raise FormatError(f"{name} has a scale that is not above zero")


TOY = WeightFormat(
    name="toy8",
    summary="int8 codes, offset by 128, with a float32 scale per 64 values",
    codes=Piece("uint8"),
    scale=Piece("float32", columns=64),
    block=64,
    encode=_encode,
    decode=_decode,
    negate=_negate,
    refuse=_refuse,
    misreadings={"with its offset taken for 127": lambda codes: codes + 1},
)


@pytest.fixture(autouse=True)
def _toy() -> Iterator[None]:
    add_format(TOY)
    yield
    del FORMATS["toy8"], VOCABULARY["toy8"]


def first_of(case: str, fault: str) -> tuple[str, str, str]:
    first = run_case(Job(faults=(parse_fault(fault),)), Case.parse(case))[1].first
    assert first is not None, (case, fault)
    return first.stage, first.check, first.findings[0].actual if first.findings else first.reason


def verdict_of(line: str, experts: str = "reference") -> Verdict:
    return run_case(make_job(Options(experts=experts)), Case.parse(line))[1]


@pytest.mark.parametrize("form", ["toy8", "fp8", "mxfp4", "bf16"])
@pytest.mark.parametrize("generation", ["A", "B"])
@pytest.mark.parametrize("fill", ["ints", "real"])
@pytest.mark.parametrize("scenario", ["base", "two_poisons", "marked_slots", "life", "grouped"])
def test_a_right_path_passes_in_every_format(form: str, generation: str, fill: str, scenario: str) -> None:
    verdict = verdict_of(f"gen{generation}+R2+E4+K2+S7+pad5+hot:1+fill:{fill}+{form}+{scenario}")
    assert verdict.ok, verdict.diagnosis
    checks = {r.check: r.examined for r in verdict.results if r.examined}
    assert checks["P1"] > 0
    assert scenario == "grouped" or checks["W1"] > 0


@pytest.mark.parametrize("form", ["toy8", "fp8"])
def test_a_part_that_does_not_take_the_format_gets_its_values(form: str) -> None:
    for fill in ("ints", "real"):
        assert verdict_of(f"genB+R2+E4+K2+S7+hot:1+fill:{fill}+{form}", "torch").ok


@pytest.mark.parametrize("form", ["toy8", "fp8"])
@pytest.mark.parametrize(
    ("fault", "stage", "check"),
    [
        ("slot-not-filled", "prefetch", "W1"),
        ("scales-left-behind", "prefetch", "W1"),
        ("unused-slot-written", "prefetch", "W2"),
        ("scales-of-next-expert", "experts", "P1"),
        ("scale-bias-off-by-one", "experts", "P1"),
    ],
)
def test_faults_are_found_in_a_new_format(form: str, fault: str, stage: str, check: str) -> None:
    assert first_of(f"genB+R4+E8+K2+S9+hot:5+fill:real+{form}+@slot_used", fault)[:2] == (stage, check)


def test_a_wrong_row_is_named_by_the_mistakes_of_the_format() -> None:
    case = "genB+R1+E4+K2+S9+H64+I64+pad5+fill:real+toy8+grouped"
    assert "it is the row with the scales of group 1" in first_of(case, "scales-of-next-expert:rank=0")[2]


def test_a_format_says_what_it_needs() -> None:
    with pytest.raises(CaseError, match=r"H=96: toy8 shares a scale among 64 values.*next larger H is 128"):
        Case.parse("genB+R2+E4+K2+S3+H96+toy8")
    with pytest.raises(CaseError, match="I=64: fp8 shares a scale among 128 x 128 values"):
        Case.parse("genB+R2+E4+K2+S3+I64+fp8")
    with pytest.raises(CaseError, match="grads with fp8: packed weights have no gradients"):
        Case.parse("genB+R2+E4+K2+S3+fp8+grads")
    with pytest.raises(CaseError, match="unknown part 'fp9'"):
        Case.parse("genB+R2+E4+K2+S3+fp9")
    assert Case.parse("genB+R2+E4+K2+S3+H8192+I8192+fp8").portable
    assert not Case.parse("genB+R2+E4+K2+S3+H4096+I8192+fp8").portable  # 8192 bytes of scales
    assert Case.parse("genB+R2+E4+K2+S3+H512+I512+toy8").portable


def test_sizes_follow_from_the_format() -> None:
    assert TOY.expert_bytes(128, 64) == 3 * (128 * 64 + 128 * 4)
    assert FORMATS["fp8"].expert_bytes(256, 384) == 3 * (256 * 384 + 2 * 3 * 4)
    assert FORMATS["bf16"].expert_bytes(256, 384) == 3 * 256 * 384 * 2
    own = {form: plan(MODELS["kimi-k3"], "B", 16, form, 64).lines[0].nbytes for form in ("fp8", "bf16", "toy8")}
    assert 0.5 < own["fp8"] / own["bf16"] < 0.5002
    assert own["toy8"] / own["bf16"] == 0.5 * (1 + 4 / 64)
    found = {one.what: one.stride for one in offsets(Case.parse("genB+R2+E4+K2+S3+H128+I256+toy8"))}
    assert found["packed codes of a group, in bytes: group * I * H"] == 128 * 256
    assert found["scales of a group: group * I * H / 64"] == 512
    smaller = list(_changes(Case.parse("genB+R2+E4+K2+S3+H128+I256+toy8")))
    assert {"H": 64} in smaller
    assert {"I": 64} in smaller


def test_bad_scales_are_refused_at_load() -> None:
    good = torch.ones(2, 3)
    FORMATS["fp8"].refuse_scales("rank 0", {"gate": torch.zeros(2), "gate_scale": good})
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        scale = good.clone()
        scale[1, 2] = bad
        with pytest.raises(FormatError, match=r"rank 0: up_scale\[1, 2\] is scale .*1 of 6 scales are none"):
            FORMATS["fp8"].refuse_scales("rank 0", {"gate_scale": good, "up_scale": scale})


def test_fp8_weights_decode_to_what_was_quantised() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(2, 256, 128, generator=generator).bfloat16()
    weight[0, :128] *= 1000
    codes, scale = fp8.quantise_weight(weight)
    assert tuple(scale.shape) == (2, 2, 1)
    values = fp8.dequantise_weight(codes.view(torch.uint8), scale, torch.float64)
    assert values[1, 130, 7] == codes[1, 130, 7].double() * scale[1, 1, 0].double()
    steps = scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2) * 2.0**-9
    allowed = torch.maximum(weight.double().abs() * 2.0**-4, steps / 2)  # half a step, that of subnormals at least
    assert bool(((values - weight.double()).abs() <= allowed).all())
    assert torch.equal(fp8.dequantise_weight(codes, scale, torch.bfloat16).double(), values)


def test_cases_are_read_without_torch() -> None:
    code = "import sys; from moonep_validate.cases.case import Case; Case.parse('genB+R2+E4+K2+S3+fp8').portable"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)
