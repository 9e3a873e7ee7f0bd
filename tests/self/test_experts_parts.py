"""The experts parts: each is judged by the same checks, through the path and alone; a careless one is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from moonep_validate import experts
from moonep_validate.case import Case, CaseError
from moonep_validate.engine import Job, judge, make_job, record, run_case, unmet
from moonep_validate.experts import deepgemm, fp8, torch_grouped
from moonep_validate.experts.behaviour import behaviour
from moonep_validate.experts.part import Unavailable
from moonep_validate.faults import parse_fault
from moonep_validate.hashing import hashed, normal
from moonep_validate.oracle.bounds import block_variance
from moonep_validate.oracle.dense import CHUNK, grouped_rows, pieces
from moonep_validate.oracle.judge import judge_rows, sigmas
from moonep_validate.reference.experts import grouped_experts
from moonep_validate.trace import Part
from moonep_validate.verdict import Verdict
from tests.self import fake_deep_gemm as fake

FAKE = "tests.self.fake_deep_gemm"
INTS = Case.parse("genB+R2+E6+K2+S7+H128+I128+pad5+hot:1+@slot_used")
REAL = INTS.but(fill=Case.parse("genB+R2+E6+K2+S7+fill:real").fill)
ALONE = Case.parse("genB+R2+E6+K2+S7+pad5+grouped")


@pytest.fixture(autouse=True)
def _state() -> Iterator[None]:
    before = dict(fake.state)
    yield
    fake.state.update(before)


def verdict_of(name: str, case: Case) -> Verdict:
    return run_case(make_job(experts=name), case)[1]


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


@pytest.mark.parametrize("fault", ["group-index-off-by-one", "offset-wraps", "tail-written", "weight-on-input"])
def test_faults_are_found_on_other_parts_too(fault: str) -> None:
    for case in (INTS, ALONE):
        job = make_job(experts=f"{FAKE}:bf16", faults=(fault,))
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
    trace = record(make_job(experts="torch"), INTS.but(format=Case.parse("genB+R2+E6+K2+S7+mxfp4").format))
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    experts.find.cache_clear()
    job = make_job(experts="deep_gemm")
    verdict = run_case(job, INTS)[1]
    assert verdict.status == "not_run"
    assert "experts deep_gemm: it needs a GPU" in verdict.results[0].reason
    assert (
        "--require experts=deep_gemm is not met: experts deep_gemm: it needs a GPU"
        in unmet(job, ["experts=deep_gemm"])[0]
    )
    assert unmet(make_job(experts="torch"), ["experts=torch"]) == []
    assert unmet(make_job(), ["experts=torch"]) != []
    assert isinstance(experts.probe("torch"), Part)


def test_a_part_is_asked_for_what_it_supports() -> None:
    situ = run_case(make_job(experts=f"{FAKE}:careless"), Case.parse("genB+R2+E6+K2+S7+fill:real+k3"))[1]
    assert situ.status == "not_run"
    assert "has silu; model k3 needs situ" in situ.results[0].reason
    odd = run_case(make_job(experts="torch"), Case.parse("genB+R2+E6+K2+S7+I20"))[1]
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
        make_job(experts=name)


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
    assert found["library"]["version"] == "0.0-fake"
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


def test_the_oracle_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    group = torch.tensor([2, 0, 2, 2, 0, 2, 2])
    x, factor = torch.arange(56).view(7, 8).double() / 9, torch.arange(1, 8).double()
    weights = [torch.arange(96).view(3, 4, 8) / 50, torch.arange(96).view(3, 4, 8) / 70, torch.ones(3, 8, 4)]
    whole = grouped_rows(x, group, weights, factor, exact=False)
    assert CHUNK > 2
    monkeypatch.setattr("moonep_validate.oracle.dense.CHUNK", 2)
    assert [(index, rows.tolist()) for index, rows in pieces(group)] == [
        (0, [1, 4]),
        (2, [0, 2]),
        (2, [3, 5]),
        (2, [6]),
    ]
    for one, other in zip(whole, grouped_rows(x, group, weights, factor, exact=False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_the_command_line_takes_a_part(cli: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = cli("run", "--case", str(INTS), "--experts", "torch", "--require", "experts=torch")
    assert code == 0
    assert "for experts" in out
    code, _, err = cli("run", "--case", str(INTS), "--subject", "vllm", "--experts", "torch")
    assert (code, "has its own experts" in err) == (4, True)


def test_rough_variances_of_a_gpu_are_above_the_exact_ones_and_near(monkeypatch: pytest.MonkeyPatch) -> None:
    x, factor = normal(hashed("x", 0, torch.arange(9)[:, None], torch.arange(256))), torch.full((9,), 0.7)
    shapes = ((1, 128, 256), (1, 128, 256), (1, 256, 128))
    weights = [normal(hashed(f"w{n}", 0, torch.arange(a * b * c))).view(a, b, c) / c for n, (a, b, c) in enumerate(shapes)]  # fmt: skip
    for rounds in ((), ("fp8_inputs", "fp8_weights"), ("silu", "route_weight", "weighted_activation")):
        exact = grouped_rows(x, torch.zeros(9).long(), weights, factor, exact=False, rounds=rounds)
        with monkeypatch.context() as patch:
            patch.setattr("moonep_validate.oracle.dense._rough", lambda device: torch.float32)
            rough = grouped_rows(x, torch.zeros(9).long(), weights, factor, exact=False, rounds=rounds)
        assert torch.equal(exact[0], rough[0])
        ratio = rough[1] / exact[1]
        assert 0.9999 < float(ratio.min()) < float(ratio.max()) < 1.07, rounds


def test_more_elements_may_be_farther_off() -> None:
    """6 deviations are 2e-9 of a normal error: of 2.3e8 elements, each second layer would have one."""
    assert sigmas(10**5) == 6
    assert 6.9 < sigmas(65536 * 3584) < 7.0


def test_streaming_judgement_agrees_with_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right rows pass, one wrong element is found in its row and group, NaN is never right, rows of none are left out."""
    monkeypatch.setattr("moonep_validate.oracle.dense.CHUNK", 3)
    group = torch.tensor([2, 0, -1, 2, 0, 2, 2, 2])
    x = (torch.arange(256).view(8, 32) / 90).bfloat16()
    weights = [((torch.arange(n).view(shape) % 23 - 11) / 20).bfloat16() for n, shape in ((1536, (3, 16, 32)), (1536, (3, 16, 32)), (1536, (3, 32, 16)))]  # fmt: skip
    factor = torch.linspace(0.2, 0.9, 8)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    order = torch.tensor([1, 4, 0, 3, 5, 6, 7])
    out = torch.full((8, 32), torch.nan, dtype=torch.bfloat16)
    out[order] = grouped_experts(x[order], factor[order], ends, weights)
    judged = judge_rows(x, out, group, weights, factor, exact=False)
    assert (judged.elements, judged.wrong) == (7 * 32, 0)
    assert 0.5 < judged.worst < 6
    out[5, 7] += 2
    judged = judge_rows(x, out, group, weights, factor, exact=False)
    assert (judged.wrong, judged.row, judged.group, judged.column) == (1, 5, 2, 7)
    out[4, 1] = torch.nan
    judged = judge_rows(x, out, group, weights, factor, exact=False)
    assert (judged.wrong, judged.worst, judged.row) == (2, torch.inf, 4)
    assert judge_rows(x[:1], out[:1], torch.tensor([-1]), weights, factor[:1], exact=False).elements == 0


@pytest.mark.parametrize("line", ["genB+R4+E8+K2+S9+hot:5+mxfp4", "genA+R2+E6+K2+S7+pad5+mxfp4+grouped"])
def test_a_sample_of_rows_is_enough_to_judge_the_experts(line: str) -> None:
    """With ``columns``, P1 judges rows that are kept whole, packed weights of their groups included; never padding."""
    job = Job(keep="columns")
    examined = [r.examined for r in run_case(job, Case.parse(line))[1].results if r.check == "P1"]
    assert min(examined) >= 2 * 3 * 128
    faulty = Job(keep="columns", faults=(parse_fault("group-index-off-by-one"),))
    results = run_case(faulty, Case.parse(line))[1].results
    assert "failed" in {r.status for r in results if r.check == "P1"}


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
