"""Bytes per rank: the published numbers of Kimi-K3, upstream's buffer formulas, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moonep_validate.cases.case import CaseError
from moonep_validate.cases.layout import Layout
from moonep_validate.formats.kimi_k3 import Geometry
from moonep_validate.tools.memory import GIB, gpu_bytes, hidden_bytes, local_bytes, meta_bytes, plan, plan_bytes

Cli = Callable[..., tuple[int, str, str]]
K3 = Geometry()


def nbytes(ep: int, weight_format: str, generation: str = "B") -> dict[str, int]:
    return {line.what: line.nbytes for line in plan(K3, generation, ep, weight_format, 4096).lines}


@pytest.mark.parametrize(
    ("ep", "mxfp4", "bf16", "pools"),
    [
        (1, 1446.5, 5445.5, None),
        (8, 180.8, 680.7, (1.97, 7.40)),
        (16, 90.4, 340.3, (0.98, 3.70)),
        (32, 45.2, 170.2, (0.49, 1.85)),
    ],
)
def test_experts_and_slots_of_kimi_k3(
    ep: int, mxfp4: float, bf16: float, pools: tuple[float, float] | None
) -> None:
    packed, whole = nbytes(ep, "mxfp4"), nbytes(ep, "bf16")
    assert round(packed["experts"] / 1e9, 1) == mxfp4
    assert round(whole["experts"] / 1e9, 1) == bf16
    if pools:
        assert (round(packed["slots"] / 1e9, 2), round(whole["slots"] / 1e9, 2)) == pools
    assert packed["experts"] * ep == 82_432 * 17_547_264
    assert whole["experts"] * ep == 82_432 * 66_060_288


def test_the_claim_of_91_and_344_gb_counts_a_layer_too_many() -> None:
    """sgl-project/sglang#33249 says ~91 and ~344 GB at EP 16: that is 93 MoE layers; the release has 92."""
    more = replace(K3, moe_layers=93)
    got = [plan(more, "A", 16, form, 4096).lines[0].nbytes / 1e9 for form in ("mxfp4", "bf16")]
    assert [round(size, 2) for size in got] == [91.39, 344.04]


@pytest.mark.parametrize(
    ("sizes", "rows", "hidden", "meta", "saved"),
    [
        ((4096, 7168, 8, 256, 8), 40960, 587.2, 0.76, 0.79),
        ((4096, 3584, 16, 896, 16), 79872, 572.5, 1.68, 1.54),
        ((128, 3584, 16, 896, 16), 16384, 117.4, 0.41, 0.27),
    ],
)
def test_buffers_of_generation_b(
    sizes: tuple[int, ...], rows: int, hidden: float, meta: float, saved: float
) -> None:
    S, H, K, E, R = sizes
    layout = Layout("B", R, E, K, S, 128)
    assert layout.num_rows == rows
    assert round(hidden_bytes(layout, H) / 1e6, 1) == hidden
    assert round(meta_bytes(layout) / 1e6, 2) == meta
    assert round(plan_bytes(layout) / 1e6, 2) == saved


def test_every_term_of_the_formulas_counts() -> None:
    """By hand on sizes where no two terms are equal: R 2, E 6, K 3, S 5, padding 4, 3 experts a rank."""
    layout = Layout("B", 2, 6, 3, 5, 4)
    assert layout.num_rows == 36  # 15 + 3*6 = 33, up to 36
    words = 36 + 12 + (3 * 6 * 2 + 3 * 2 * 6 + 2 * 3 + 2 * 2)  # weights, counts, plan: 130
    assert meta_bytes(layout) == 4 * (132 + 3 * 16 + 3 + 36) == 4 * (words + 2 + 48 + 3 + 36)
    assert local_bytes(layout) == 4 * (12 + 2 + 4 + 6 + 20 + 30 + 2)
    assert plan_bytes(layout) == 4 * (15 + 6 + 12 + 2 + 144 + 2)
    few = Layout("A", 2, 6, 3, 5, 4, slots=1)
    assert few.num_rows == 33
    assert meta_bytes(few) == 4 * (36 + 12 + (36 + 42 + 2 + 4) + 3 * 16 + 3 + 33)
    assert plan_bytes(few) == 4 * (15 + 2 + 14 + 2 + 132 + 2)


def test_generations_differ_in_rounding_and_slots_only() -> None:
    a, b = nbytes(16, "mxfp4", "A"), nbytes(16, "mxfp4", "B")
    assert {what for what in a if a[what] != b[what]} <= {"row buffer", "saved plan", "route weights and counts"}
    four = plan(K3, "A", 16, "mxfp4", 4096, slots=4)
    assert {line.what: line.nbytes for line in four.lines}["slots"] == 4 * 17_547_264


def test_memory_is_mapped_in_whole_pages() -> None:
    lines = {line.what: line.nbytes for line in plan(K3, "A", 16, "mxfp4", 4096).lines}
    assert lines["row buffer"] % 2**21 == 0
    assert 0 <= lines["row buffer"] - hidden_bytes(Layout("A", 16, 896, 16, 4096, 128), 3584) < 2**21
    assert lines["route weights and counts"] == 2**21


@pytest.mark.parametrize(
    ("name", "gib"), [("h100", 79.1), ("H200", 139.8), ("b200", 178.3), ("24", 24.0), ("0.5", 0.5)]
)
def test_gpus_by_name_or_size(name: str, gib: float) -> None:
    assert gpu_bytes(name) == round(gib * GIB)


@pytest.mark.parametrize("name", ["h20", "-1", "0", "nan", "inf", "1e9"])
def test_a_gpu_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(CaseError, match="known: h100, h200, b200, or a number of GiB"):
        gpu_bytes(name)


def test_command_says_what_fits(cli: Cli) -> None:
    code, out, _ = cli("memory", "--model", "kimi-k3", "--ep", "16", "--format", "mxfp4", "--gpu", "h200")
    assert code == 0
    assert "experts                               90.4 GB (84.2 GiB)  56 of 896 experts in 92 layers" in out
    assert out.count("fits h200 (150.1 GB (139.8 GiB)): 58.1 GB (54.1 GiB) are left for everything else") == 2
    code, out, _ = cli("memory", "--ep", "16", "--format", "bf16", "--gpu", "h200")
    assert code == 1
    assert "does not fit h200 (150.1 GB (139.8 GiB)): 194.5 GB (181.2 GiB) are missing" in out
    assert cli("memory", "--ep", "16", "--format", "bf16")[0] == 0  # no GPU to judge by


def test_command_as_json_and_by_layer(cli: Cli) -> None:
    code, out, _ = cli(
        "memory", "--ep", "8", "--layers", "1", "--tokens", "128", "--gpu", "2.1", "--slots", "3", "--json"
    )
    assert code == 1  # generation B keeps all its slots
    value = json.loads(out)
    assert [one["generation"] for one in value["plans"]] == ["A", "B"]
    a, b = value["plans"]
    assert (a["rows"], b["rows"]) == (30496, 30592)
    assert a["lines"][0]["nbytes"] == 112 * 17_547_264
    assert (a["fits"], b["fits"]) == (True, False)
    assert a["total_bytes"] == sum(line["nbytes"] for line in a["lines"])
    assert b["left_bytes"] == value["gpu_bytes"] - b["total_bytes"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ep", "36"], "--ep 36 does not divide the 896 experts of the model; near it: --ep 28, 32, 56, 64"),
        (["--format", "int4"], "--format is 'int4'; known: bf16, fp8, mxfp4"),
        (["--model", "kimi-k9"], "--model is 'kimi-k9'; known: kimi-k3, or the folder of a checkpoint"),
        (["--gpu", "tpu"], "--gpu is 'tpu'"),
        (["--tokens", "0"], "'--tokens'"),
    ],
)
def test_bad_options_are_usage_errors(cli: Cli, arguments: list[str], words: str) -> None:
    code, out, err = cli("memory", *arguments)
    assert (code, out) == (4, "")
    assert words in err


def test_a_checkpoint_gives_its_own_sizes(cli: Cli, tmp_path: Path) -> None:
    geometry = K3.scaled(16, num_experts=12, top_k=3, moe_layers=5)
    (tmp_path / "config.json").write_text(json.dumps(geometry.config()))
    code, out, _ = cli("memory", "--model", str(tmp_path), "--ep", "4", "--json")
    assert code == 0
    assert json.loads(out)["plans"][1]["lines"][0]["nbytes"] == 3 * 5 * 3 * 224 * 192 * 17 // 32
