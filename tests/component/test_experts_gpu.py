"""The compute stage on one GPU at the proportions of Kimi-K3: each part against float64, and what that costs.

Run: ``pytest -m gpu -s tests/component/test_experts_gpu.py`` on a machine with one GPU of 80 GB or more. Each part
that cannot run here is skipped with its reason. Printed: the layer's own time, the time of the three float64 products
that no oracle can do without, and the time of the whole verification.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.formats import fp8
from moonep_validate.hashing import hashed, normal, unit
from moonep_validate.judge.oracle.arithmetic import Arithmetic
from moonep_validate.judge.oracle.dense import pieces
from moonep_validate.judge.oracle.judge import judge_rows
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.run import run_case
from moonep_validate.reference.experts import swiglu
from moonep_validate.subjects import experts
from moonep_validate.subjects.experts import deepgemm
from moonep_validate.subjects.experts.behaviour import behaviour
from moonep_validate.subjects.experts.implementation import Experts, Unavailable
from moonep_validate.subjects.experts.permute import row_groups, tile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} sees no GPU"),
]

GROUPS, H, I, ROWS, PAD = 112, 3584, 3072, 65536, 128
#: An empty group, one row, and the alignment with one less and one more; the rest share what is left, unevenly.
SPECIAL = (0, 1, PAD - 1, PAD, PAD + 1)
PARTS = ("torch:cuda", "deep_gemm", "deep_gemm_fp8")
CASES = (
    "genB+R1+E4+K2+S9+pad128+grouped",
    "genB+R1+E4+K2+S9+H256+I384+pad128+fill:real+grouped",
    "genB+R1+E4+K2+S9+H256+I384+fill:real+mxfp4+grouped",
    "genB+R1+E4+K2+S9+H256+I128+fill:real+k3+grouped",
    "genB+R4+E8+K2+S9+hot:5+@slot_used",
    "genA+R4+E8+K2+S9+pad128+fill:real+hot:5+mxfp4+@slot_used",
    "genB+R4+E8+K2+S9+hot:6+mxfp4+marked_slots+@slot_used",
)


@dataclass(frozen=True)
class Layer:
    """One rank's compute stage."""

    rows: Tensor
    factors: Tensor
    ends: Tensor
    group: Tensor  # of each row, -1 for padding and tail
    weights: list[Tensor]


def lengths() -> Tensor:
    shares = torch.linspace(0.2, 3.0, GROUPS - len(SPECIAL)).double()
    left = ROWS - sum(SPECIAL)
    counts = (shares / shares.sum() * left).floor().long()
    counts[-1] += left - counts.sum()
    return torch.cat([torch.tensor(SPECIAL), counts])


@pytest.fixture(scope="module")
def layer() -> Layer:
    device = torch.device("cuda")
    counts = lengths()
    padded = -(-counts // PAD) * PAD
    ends = padded.cumsum(0)
    num_rows = int(ends[-1]) + 3 * PAD
    group = row_groups(ends.int(), num_rows)
    place = torch.arange(num_rows)
    index = group.clamp(min=0).long()
    group = torch.where(place < (ends - padded + counts)[index], group, -1).to(device)
    columns = torch.arange(H, device=device)
    rows = torch.empty(num_rows, H, dtype=torch.bfloat16, device=device)
    for part in torch.arange(num_rows, device=device).split(8192):
        rows[part] = normal(hashed("gpu rows", 0, part[:, None], columns)).bfloat16()
    factors = unit(hashed("gpu factors", 0, torch.arange(num_rows, device=device))).float()
    rows[group < 0], factors[group < 0] = 0, 0
    rows[int(ends[-1]) :] = torch.nan
    weights = [stack(name, *shape) for name, shape in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I)))]
    return Layer(rows, factors, ends.int().to(device), group, weights)


def stack(name: str, height: int, width: int) -> Tensor:
    whole = torch.empty(GROUPS, height, width, dtype=torch.bfloat16, device="cuda")
    row, column = torch.arange(height, device="cuda")[:, None], torch.arange(width, device="cuda")
    for expert in range(GROUPS):
        whole[expert] = (normal(hashed(f"gpu {name}", 0, expert, row, column)) * width**-0.5).bfloat16()
    return whole


def seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """Median time of a call after one to warm up, the device idle before and after."""
    call()
    taken = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return median(taken)


def float64_products(layer: Layer) -> None:
    """The three products of the dense definition and nothing else."""
    counted = torch.nonzero(layer.group >= 0)[:, 0]
    for index, part in pieces(layer.group[counted]):
        x = layer.rows[counted[part]].double()
        gate, up, down = (weight[index].double() for weight in layer.weights)
        (x @ gate.T).mul_(x @ up.T) @ down.T


def found(name: str) -> Experts:
    try:
        return experts.find(name)
    except Unavailable as reason:
        pytest.skip(f"experts {name}: {reason}")


def bare(name: str, layer: Layer) -> Callable[[], Any]:
    """The layer's own work: no guard rows, tiles and quantised weights made beforehand."""
    part = found(name)
    if name == "torch:cuda":
        return partial(part.compute, layer.rows, layer.factors, layer.ends, layer.weights, swiglu)
    kind = "fp8" if name == "deep_gemm_fp8" else "bf16"
    library = deepgemm.Library(deepgemm.find(kind, "cuda").module, guarded=False)
    tiles = tile(layer.ends, len(layer.rows), library.alignment())
    weights: Sequence[Any] = [fp8.quantise_weight(w) for w in layer.weights] if kind == "fp8" else layer.weights
    return partial(deepgemm.layer, library, kind, tiles, layer.rows, layer.factors, weights, swiglu)


@pytest.mark.parametrize("name", PARTS)
def test_a_layer_of_kimi_k3_is_right_and_judging_it_is_not_dear(name: str, layer: Layer) -> None:
    part = found(name)
    out = part.compute(layer.rows, layer.factors, layer.ends, layer.weights, swiglu)
    judge = partial(
        judge_rows, layer.rows, out, layer.group, layer.weights, layer.factors, Arithmetic(rounds=part.part.rounds)
    )
    judged = judge()
    own, floor, whole = seconds(bare(name, layer)), seconds(partial(float64_products, layer)), seconds(judge)
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"\n{name} ({part.part.package} {part.part.version}): layer {own * 1e3:.1f} ms, float64 products "
        f"{floor * 1e3:.1f} ms, verification {whole * 1e3:.1f} ms (target {(3 * own + floor) * 1e3:.1f} ms), "
        f"worst {judged.worst:.2f} sigma, peak {memory:.1f} GiB"
    )
    assert judged.elements == ROWS * H
    assert judged.wrong == 0, str(judged)
    assert judged.worst > 1, "a bound that nothing comes near proves nothing"
    if "fp8" not in name:  # the target is set by the BF16 layer
        assert whole <= 3 * own + floor


@pytest.mark.parametrize("name", PARTS)
def test_weights_of_a_neighbour_are_seen(name: str, layer: Layer) -> None:
    """The negative control at this size: groups 3 and 4 exchange their down projections."""
    part = found(name)
    order = list(range(GROUPS))
    order[3], order[4] = 4, 3
    wrong = [*layer.weights[:2], layer.weights[2][order]]
    out = part.compute(layer.rows, layer.factors, layer.ends, wrong, swiglu)
    judged = judge_rows(
        layer.rows, out, layer.group, layer.weights, layer.factors, Arithmetic(rounds=part.part.rounds)
    )
    assert judged.group in (3, 4)
    assert judged.wrong > 0.5 * H * (2 * PAD + 1)


@pytest.mark.parametrize("line", CASES)
@pytest.mark.parametrize("name", PARTS)
def test_cases_pass_on_each_part(name: str, line: str) -> None:
    found(name)
    verdict = run_case(make_job(Options(experts=name)), Case.parse(line))[1]
    assert verdict.ok, verdict.diagnosis
    assert verdict.parts["experts"].level == "real"


@pytest.mark.parametrize("kind", deepgemm.ENTRIES)
def test_what_deep_gemm_does_with_rows_of_no_group_is_recorded(kind: str) -> None:
    try:
        library = deepgemm.find(kind, "cuda")
    except Unavailable as reason:
        pytest.skip(str(reason))
    said = behaviour(library, kind, "cuda")
    print("\n" + json.dumps(said))
    assert "raised" not in said


def test_fp8_times_fp4_says_why_it_does_not_run() -> None:
    with pytest.raises(Unavailable, match=r"SM100|is not written"):
        experts.find("deep_gemm_fp8_fp4")
