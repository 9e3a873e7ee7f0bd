"""Engines' own loaders, in a process of their own on the CPU: do the checkpoints' bytes arrive?

What ``run --loader`` judges, with the known defects of docs/found.md waived; and a conversion and a decoder that are
plain torch, so that they run here.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from moonep_validate.formats import identity, layouts, mxfp4
from moonep_validate.formats.oracles import all_pairs
from moonep_validate.judge.waivers import waivers_of
from moonep_validate.subjects.engines.sglang import declare_torchvision
from moonep_validate.subjects.loaders import KNOWN, loader
from moonep_validate.subjects.loaders.variants import faults_of, variants_of
from moonep_validate.tools.loaders import inspect

pytestmark = pytest.mark.filterwarnings("ignore")  # engines warn at import; that is not what is judged here


@pytest.fixture(scope="session")
def subject(pytestconfig: pytest.Config) -> str:
    name: str = pytestconfig.getoption("--moonep-subject") or "reference"
    if name not in KNOWN:
        pytest.skip(f"{name}: its loaders are not known here; known: {', '.join(KNOWN)}")
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed here")
    return name


def test_every_byte_of_every_expert_arrives_but_for_known_defects(subject: str) -> None:
    report = inspect(subject, None, waivers=waivers_of(None))
    told = {one.name: one for one in report.told}
    assert {name: one.lines for name, one in told.items() if one.status == "failed"} == {}
    for path, how in loader(subject).paths.items():
        for variant in variants_of(path, how):
            wanted = faults_of(variant) if variant.controlled else []
            assert list(told[variant.name].faults) == wanted, variant.name
    assert report.exit_code == 0


def test_vllms_scale_tiles_are_ours(subject: str) -> None:
    """What its CUTLASS backend does to scales; row-major scales, the usual mistake, are not the same."""
    if subject != "vllm":
        pytest.skip("vLLM's")
    swizzle = import_module("vllm.model_executor.layers.fused_moe.experts.cutlass_moe").swizzle_mxfp4_scales
    for rows, groups in ((384, 7), (224, 6), (100, 3), (3072, 112)):
        scale = identity.weights(rows, groups * mxfp4.BLOCK, 1, 2, "w1")[1]
        got = swizzle(scale, rows, groups * mxfp4.BLOCK)
        assert torch.equal(got.flatten(), layouts.to_blocked(scale)), (rows, groups)
        assert not torch.equal(layouts.from_blocked(got.flatten(), rows, groups), scale.roll(1, 0))


def test_sglangs_own_decoder_agrees_on_all_pairs(subject: str) -> None:
    """Its quantiser is not judged: in 0.5.23 it raises, since its class takes no arguments."""
    if subject != "sglang":
        pytest.skip("SGLang's")
    declare_torchvision()
    util = import_module("sglang.srt.layers.quantization.mxfp4_tensor").MXFP4QuantizeUtil
    packed, scale = (one[:255] for one in all_pairs())
    got = util.dequantize(packed, torch.float32, scale, [mxfp4.BLOCK])
    assert torch.equal(got, mxfp4.decode(packed, scale))
    wrong = util.dequantize(layouts.swap_nibbles(packed), torch.float32, scale, [mxfp4.BLOCK])
    assert not torch.equal(wrong, got)
