"""The experts parts: each is judged by the same checks, through the path and alone; a careless one is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.faults import parse_fault
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.judge import judge
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.record import record
from moonep_validate.pipeline.require import unmet
from moonep_validate.pipeline.run import run_case
from moonep_validate.subjects import experts
from moonep_validate.subjects.experts import torch_grouped
from moonep_validate.subjects.experts.implementation import Unavailable
from tests.self import fake_deep_gemm as fake
from tests.self.parts import job_here

FAKE = "tests.self.fake_deep_gemm"
INTS = Case.parse("genB+R2+E6+K2+S7+H128+I128+pad5+hot:1+@slot_used")
ALONE = Case.parse("genB+R2+E6+K2+S7+pad5+grouped")


@pytest.fixture(autouse=True)
def _state() -> Iterator[None]:
    before = dict(fake.state)
    yield
    fake.state.update(before)


def verdict_of(name: str, case: Case) -> Verdict:
    return run_case(job_here(name), case)[1]


@pytest.mark.parametrize(
    "name", ["reference", "float64", "torch", f"{FAKE}:bf16", f"{FAKE}:blocks", f"{FAKE}:early"]
)
@pytest.mark.parametrize("fill", ["ints", "real"])
@pytest.mark.parametrize("line", ["genB+R2+E6+K2+S7+pad5+hot:1", "genA+R2+E6+K2+S7+pad5+hot:1+mxfp4", "genB+R2+E6+K2+S7+pad5+grouped"])  # fmt: skip
def test_a_right_part_passes(name: str, fill: str, line: str) -> None:
    verdict = verdict_of(name, Case.parse(line if fill == "ints" else f"{line}+fill:real"))
    assert verdict.ok, verdict.diagnosis
    origin = {"torch": "real"}.get(name, "reference" if ":" not in name else "stand-in")
    assert verdict.parts["experts"].level == origin
    assert {r.level for r in verdict.results if r.check == "P1" and r.examined} == {origin}


@pytest.mark.parametrize("name", ["torch", f"{FAKE}:bf16", f"{FAKE}:blocks"])
def test_situ_is_computed_where_the_model_has_it(name: str) -> None:
    assert verdict_of(name, Case.parse("genB+R2+E6+K2+S7+pad5+fill:real+k3+grouped")).ok
    assert verdict_of(name, Case.parse("genB+R2+E6+K2+S7+pad5+zipf:1.0+fill:real+k3")).ok


@pytest.mark.parametrize("fault", ["group-index-off-by-one", "offset-wraps", "tail-written", "weight-on-input"])
def test_faults_are_found_on_other_parts_too(fault: str) -> None:
    for case in (INTS, ALONE):
        job = job_here(f"{FAKE}:bf16", fault)
        first = run_case(job, case)[1].first
        assert first is not None, (fault, case)
        assert first.stage == "experts"
        assert f"--experts {FAKE}:bf16 --fault {fault}" in run_case(job, case)[1].command


@pytest.mark.parametrize(
    "fault", ["nibbles-exchanged", "scale-rows-shuffled", "group-id-per-tile", "situ-for-silu"]
)
@pytest.mark.parametrize("fill", ["ints", "real"])
def test_groups_alone_find_faults_in_packed_weights(fault: str, fill: str) -> None:
    case = Case.parse("genB+R1+E4+K2+S9+H32+I64+pad5+mxfp4+grouped" + "+fill:real" * (fill == "real"))
    job = Job(faults=(parse_fault(f"{fault}:rank=0"),))
    first = run_case(job, case)[1].first
    assert first is not None
    assert (first.check, first.stage) == ("P1", "experts")


def test_every_shape_of_groups_is_computed() -> None:
    trace = record(Job(), ALONE)
    steps = [step for step in trace.steps() if step not in ("open", "close", "load 0")]
    assert len(steps) == 8
    counted = {r.step: r.examined for r in judge(trace).results if r.check == "P1"}
    width, groups = ALONE.H, 6
    assert counted["one_row"] == 2 * groups * width
    assert counted["first_group"] == counted["last_group"] == 2 * (3 * 5 + 1) * width
    assert counted["around_padding"] == 2 * (4 + 6 + 0 + 10 + 4 + 6) * width


def test_packed_weights_arrive_as_bytes_and_are_decoded_where_a_part_needs_it() -> None:
    trace = record(
        make_job(Options(experts="torch")), INTS.but(format=Case.parse("genB+R2+E6+K2+S7+mxfp4").format)
    )
    call = next(c for c in trace.calls[1] if c.op == "experts")
    assert call.info["decoded"] is True
    assert call.tensors["weight_gate"].dtype == torch.uint8
    assert tuple(call.tensors["weight_gate"].shape) == (6, 128, 64)
    assert tuple(call.tensors["weight_down_scale"].shape) == (6, 128, 4)


def test_marked_slots_of_packed_weights_change_sign() -> None:
    case = Case.parse("genB+R4+E8+K2+S9+hot:5+mxfp4+marked_slots+@slot_used")
    assert run_case(Job(), case)[1].ok
    first = run_case(Job(faults=(parse_fault("source-row-for-slot"),)), case)[1].first
    assert first is not None
    assert first.check == "P1"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("genB+R2+E4+K2+S3+H48+mxfp4", "H=48: mxfp4 shares a scale among 32 values"),
        ("genB+R2+E4+K2+S3+I40+mxfp4", "the next larger I is 64"),
        ("genB+R2+E4+K2+S3+mxfp4+grads", "packed weights have no gradients"),
    ],
)
def test_packed_geometry_is_checked(line: str, message: str) -> None:
    with pytest.raises(CaseError, match=message):
        Case.parse(line)


@pytest.mark.parametrize(("H", "I", "portable"), [(128, 128, False), (512, 1024, True), (3584, 3072, True), (256, 256, False)])  # fmt: skip
def test_packed_weights_are_portable_where_hardware_takes_their_bytes(H: int, I: int, portable: bool) -> None:
    assert Case("B", 2, 4, 2, 3, H=H, I=I, format=Case.parse("genB+R2+E4+K2+S3+mxfp4").format).portable == portable


def test_what_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # experts from outside are asked in another process
    job = make_job(Options(experts="deep_gemm"))
    verdict = run_case(job, INTS)[1]
    assert verdict.status == "not_run"
    assert "experts deep_gemm: it needs a GPU" in verdict.results[0].reason
    assert (
        "--require experts=deep_gemm is not met: experts deep_gemm: it needs a GPU"
        in unmet(job, ["experts=deep_gemm"])[0]
    )
    assert unmet(make_job(Options(experts="torch")), ["experts=torch"]) == []
    assert unmet(make_job(), ["experts=torch"]) != []
    assert experts.identify("torch").part is not None


def test_a_part_is_asked_for_what_it_supports() -> None:
    situ = run_case(job_here(f"{FAKE}:careless"), Case.parse("genB+R2+E6+K2+S7+fill:real+k3"))[1]
    assert situ.status == "not_run"
    assert "has silu; model k3 needs situ" in situ.results[0].reason
    odd = run_case(make_job(Options(experts="torch")), Case.parse("genB+R2+E6+K2+S7+I20"))[1]
    assert "I=20: torch's grouped matrix product" in odd.results[0].reason


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torhc", "known are reference, float64, torch"),
        ("torch:gpu", "torch runs on cpu or cuda, not 'gpu'"),
        ("no_such_module:f", "cannot be had: ModuleNotFoundError"),
        (f"{FAKE}:nothing", "cannot be had: AttributeError"),
    ],
)
def test_bad_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(CaseError, match=message):
        make_job(Options(experts=name))


@pytest.mark.parametrize("text", ["swigluoai", "silu:7", "situ:4,24", "situ:4"])
def test_activations_without_oracle_are_refused(text: str) -> None:
    with pytest.raises(CaseError, match="oracle"):
        experts.activation_named(text)
    assert [experts.activation_named(one) for one in ("silu", "situ", "situ:4,25")] == ["silu", "situ", "situ"]


def test_weight_place_is_what_the_rounding_says() -> None:
    places = {name: experts.find(f"{FAKE}:{name}").weight_at for name in ("bf16", "early")}
    assert places == {"bf16": "after_w2", "early": "before_w2"}


def test_a_grouped_product_that_is_wrong_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda x, w, offs: x @ w[0] + 1, raising=False)
    with pytest.raises(Unavailable, match="wrong on a product of ones"):
        torch_grouped.make("cpu")


def test_the_command_line_takes_a_part(cli: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = cli("run", "--case", str(INTS), "--experts", "torch", "--require", "experts=torch")
    assert code == 0
    assert "for experts" in out
    code, _, err = cli("run", "--case", str(INTS), "--subject", "vllm", "--experts", "torch")
    assert (code, "has its own experts" in err) == (4, True)


@pytest.mark.parametrize("line", ["genB+R4+E8+K2+S9+hot:5+mxfp4", "genA+R2+E6+K2+S7+pad5+mxfp4+grouped"])
def test_a_sample_of_rows_is_enough_to_judge_the_experts(line: str) -> None:
    """With ``columns``, P1 judges rows that are kept whole, packed weights of their groups included; never padding."""
    job = Job(recording="columns")
    examined = [r.examined for r in run_case(job, Case.parse(line))[1].results if r.check == "P1"]
    assert min(examined) >= 2 * 3 * 128
    faulty = Job(recording="columns", faults=(parse_fault("group-index-off-by-one"),))
    results = run_case(faulty, Case.parse(line))[1].results
    assert "failed" in {r.status for r in results if r.check == "P1"}
