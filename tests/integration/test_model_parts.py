"""An engine's own router and SiTU, called in this process, against the oracle of the model k3.

Only the code that runs without a GPU is reached: routers in torch, uncompiled. Their fused kernels are not judged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.data.k3 import (
    SCALING_FACTOR,
    SITU_BETA,
    SITU_LINEAR_BETA,
    model_hidden,
    model_weights,
)
from moonep_validate.data.problem import batch
from moonep_validate.judge.oracle import k3 as oracle
from moonep_validate.judge.oracle.activation import SITU
from moonep_validate.judge.oracle.bounds import rounding_variance, within
from moonep_validate.subjects.engines.sglang import declare_torchvision

pytestmark = pytest.mark.filterwarnings("ignore")  # engines warn at import; that is not what is judged here

CASE = Case.parse("genA+R2+E64+K8+S40+zipf:1.0+fill:real+k3")
Router = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]  # hidden, logits, bias, K -> weights, ids

_SGLANG = "sglang.srt.layers.moe.topk"
_VLLM = "vllm.model_executor.layers.fused_moe.router.grouped_topk_router"
_SCALED = {"routed_scaling_factor": SCALING_FACTOR, "apply_routed_scaling_factor_on_output": True}
#: engine -> function -> (module, arguments after the number of experts per token).
ROUTERS: dict[str, dict[str, tuple[str, tuple[Any, ...]]]] = {
    "vllm": {"grouped_topk": (_VLLM, (True, 1, 1, "sigmoid", SCALING_FACTOR))},
    "sglang": {
        "kimi_k2_biased_topk_impl": (_SGLANG, (True,)),
        "biased_topk_impl": (_SGLANG, (True,)),
        "biased_grouped_topk_impl": (_SGLANG, (True, 1, 1)),
    },
}


_declared = lru_cache(declare_torchvision)  # torch registers a name once


@pytest.fixture
def engine(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine's name; its package can be imported."""
    name: str = pytestconfig.getoption("--moonep-subject") or "reference"
    if name not in ROUTERS:
        pytest.skip(f"{name}: its router is not known here; known: {', '.join(ROUTERS)}")
    if path := pytestconfig.getoption("--moonep-engine-path"):
        monkeypatch.syspath_prepend(path)
    if name == "sglang":
        _declared()
    pytest.importorskip(name, reason=f"{name} is not installed here")
    return name


def router(engine: str, name: str) -> Router:
    module, arguments = ROUTERS[engine][name]
    function = getattr(import_module(module), name)
    if engine == "sglang":
        return lambda hidden, logits, bias, k: function(hidden, logits, bias, k, *arguments, **_SCALED)
    return lambda hidden, logits, bias, k: function(hidden, logits, k, *arguments, bias)


def differences(route: Router, bias: Tensor) -> dict[str, int]:
    """Tokens with another choice, and route weights outside their bound."""
    weights, hidden = model_weights(CASE), model_hidden(CASE, 1, batch(CASE, 1))
    logits = hidden.float() @ weights.gate.float().T
    score, error = oracle.scores(hidden, weights.gate)
    want, clear = oracle.chosen(score, error, weights.bias, CASE.K)
    assert bool(clear.all())
    with torch.compiler.set_stance("force_eager"):  # what it computes; compiling it takes minutes
        got, ids = route(hidden, logits, bias, CASE.K)
    assert (got.dtype, ids.shape) == (torch.float32, (CASE.S, CASE.K))
    ids = ids.long()
    values, bound = oracle.route_weights(score, error, ids, SCALING_FACTOR)
    return {
        "choices": int((ids.sort(dim=1).values != want).any(dim=1).sum()),
        "weights": int(((got.double() - values).abs() > bound).sum()),
    }


def test_routers_choose_and_weigh_as_the_oracle(engine: str) -> None:
    bias = model_weights(CASE).bias
    found = {name: differences(router(engine, name), bias) for name in ROUTERS[engine]}
    assert found == {name: {"choices": 0, "weights": 0} for name in ROUTERS[engine]}


def test_a_bias_in_bf16_would_show(engine: str) -> None:
    """The negative control: the same functions with a rounded bias choose other experts for most tokens."""
    bias = model_weights(CASE).bias.bfloat16().float()
    for name in ROUTERS[engine]:
        found = differences(router(engine, name), bias)
        assert found["choices"] > CASE.S / 2
        assert found["weights"] == 0  # each is right for the experts that were chosen


def test_situ_is_within_one_rounding(engine: str) -> None:
    module = "vllm.model_executor.layers.activation" if engine == "vllm" else "sglang.srt.layers.activation"
    with ExitStack() as stack:
        if engine == "vllm":
            config = import_module("vllm.config")
            stack.enter_context(config.set_current_vllm_config(config.VllmConfig()))
        situ = import_module(module).SituAndMul(SITU_BETA, SITU_LINEAR_BETA)
    g, u = torch.linspace(-12, 12, 301).bfloat16(), torch.linspace(-90, 90, 301).bfloat16()
    got = situ.forward_native(torch.cat([g, u])[None])[0].double()
    want = SITU.gate(g.double())[0] * SITU.up(u.double())[0]
    variance = rounding_variance(want) + (8 * 2.0**-24 * want) ** 2
    assert bool(within(want, got, variance).all())
