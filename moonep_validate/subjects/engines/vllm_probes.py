"""What must vLLM refuse when it is told to use MoonEP, and what must it not?

A configuration or an input that MoonEP's path cannot serve has to raise; what is taken and then ignored would be
served wrong in silence. Where doing what was asked is as good as a refusal, the probe raises ``Done`` for it.
Every call is the same on all ranks and leaves nothing but layers, which ``close`` destroys.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.subjects.engines.integration import Probe

#: A ``ModelConfig`` or nothing, and fields of the ``ParallelConfig`` -> a ``VllmConfig``.
Configure = Callable[..., Any]
#: Arguments of vLLM's factory -> a layer of a new name, not loaded.
Build = Callable[..., Any]

_BACKEND = "all2all_backend=moonep"
#: A model that vLLM knows, as small as its config goes; no weights are ever read.
_ARCHITECTURE, _MODEL = "OlmoeForCausalLM", "vllm.model_executor.models.olmoe"
HF_CONFIG = {
    "architectures": [_ARCHITECTURE],
    "model_type": "olmoe",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "eos_token_id": 0,
    "max_position_embeddings": 128,
}


class Done(Exception):
    """What was asked for happened, which is as good as a refusal."""


def config_probes(case: Case, configure: Configure, device: str) -> Iterator[Probe]:
    """Configurations of the whole engine; none of them is run.

    Args:
        case: gives the number of ranks.
        configure: builds a ``VllmConfig`` with MoonEP, R data-parallel ranks and expert parallelism.
        device: what the engine runs on.
    """
    yield Probe(f"{_BACKEND}, a bfloat16 model", False, lambda: _with_model(configure, "bfloat16"))
    for dtype in ("float16", "float32"):
        yield Probe(f"{_BACKEND}, a {dtype} model", True, partial(_with_model, configure, dtype))
    quantized = partial(_with_model, configure, "bfloat16", quantization="fp8")
    yield Probe(f"{_BACKEND}, a model with quantization=fp8", True, quantized)
    strategy = {"expert_placement_strategy": "round_robin"}
    yield Probe(f"{_BACKEND}, expert_placement_strategy=round_robin", True, partial(configure, **strategy))
    yield Probe(f"{_BACKEND}, no NVLink multicast on this machine", True, _without_multicast)
    if device != "cpu":  # there vLLM refuses it whatever the backend, which says nothing about MoonEP
        yield Probe(f"{_BACKEND}, enable_eplb", True, partial(configure, enable_eplb=True))
    # Accepted by vLLM 0.32 and never used: the engine serves, and no MoonEP runs.
    unused: dict[str, dict[str, Any]] = {
        "data_parallel_size=1": {"data_parallel_size": 1},
        f"data_parallel_size=1, tensor_parallel_size={case.R}": {
            "data_parallel_size": 1,
            "tensor_parallel_size": case.R,
        },
        f"data_parallel_size={case.R}, no expert parallelism": {"enable_expert_parallel": False},
    }
    for what, changes in unused.items():
        yield Probe(f"{_BACKEND}, {what}: refused, or MoonEP used", True, partial(_use, configure, changes))


def layer_probes(case: Case, build: Build) -> Iterator[Probe]:
    """Layers that cannot be served, and inputs of one that can; collective.

    Args:
        case: its sizes are the legal ones.
        build: makes a layer of the case's sizes, but for changes.
    """

    def loading(**changes: Any) -> Callable[[], object]:
        return lambda: _loaded(build(**changes))

    def running(changes: dict[str, Any] | None = None, **how: Any) -> Callable[[], object]:
        return lambda: _run(_loaded(build(**(changes or {}))), **how)

    on_input = {"apply_router_weight_on_input": True}
    for name, size in (("hidden_size", case.H + 64), ("intermediate_size", case.I + 64)):
        yield Probe(f"{name}={size}, not a multiple of 128", True, loading(**{name: size}))
    yield Probe("float16 parameters", True, loading(params_dtype=torch.float16))
    yield Probe(f"{case.E + 1} experts on {case.R} ranks", True, loading(num_experts=case.E + 1))
    yield Probe("activation=gelu", True, lambda: build(activation="gelu"))
    yield Probe("swiglu_limit=1.0, a clamped activation", True, loading(swiglu_limit=1.0))
    yield Probe("a checkpoint without one expert of each rank", True, lambda: _loaded(build(), "expert"))
    yield Probe("a checkpoint without half the rows of gate", True, lambda: _loaded(build(), "rows"))
    yield Probe("expert biases: refused, or added", True, lambda: _biases(build(has_bias=True)))
    yield Probe("weights converted twice: refused, or no change", True, lambda: _convert_twice(build()))
    yield Probe("a forward pass before the weights are loaded", True, lambda: _run(build()))
    yield Probe("two layers of one name", True, lambda: [build(prefix="twin.experts") for _ in range(2)])
    yield Probe("float32 hidden states", True, running(dtype=torch.float32))
    yield Probe(f"{case.S + 1} tokens with max_num_batched_tokens={case.S}", True, running(tokens=case.S + 1))
    yield Probe("token counts that are not those of the ranks", True, running(told=2))
    if case.K > 1:
        yield Probe(f"apply_router_weight_on_input with top-{case.K}", True, running(on_input))
    yield Probe("apply_router_weight_on_input with top-1", False, running({**on_input, "top_k": 1}))
    yield Probe("one token on every rank", False, running())
    yield Probe("no token on any rank", False, running(tokens=0))
    yield Probe("bfloat16 route weights and int64 expert ids", False, running(narrow=True))


def _with_model(configure: Configure, dtype: str, **changes: Any) -> None:
    """Configure the engine for a model of one config.json, without weights or tokenizer."""
    registry = import_module("vllm.model_executor.models").ModelRegistry
    # Given as a class, the model is looked at here; for its name alone vLLM starts a process, which takes 20 s.
    registry.register_model(_ARCHITECTURE, getattr(import_module(_MODEL), _ARCHITECTURE))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(HF_CONFIG))
        model = import_module("vllm.config").ModelConfig(
            model=folder, dtype=dtype, skip_tokenizer_init=True, enforce_eager=True, **changes
        )
        configure(model_config=model)


def _without_multicast() -> None:
    """Make vLLM's manager while ``moonep`` says that the hardware lacks what it needs."""
    extension = import_module("moonep._C")
    group = import_module("vllm.distributed").get_ep_group()
    with patch.object(extension, "nvl_multicast_supported", lambda: False):
        import_module("vllm.distributed.device_communicators.all2all").MoonEPAll2AllManager(
            group.cpu_group, device_group=group.device_group
        )


def _use(configure: Configure, changes: dict[str, Any]) -> None:
    """Raise ``Done`` if vLLM would run the layers of an accepted configuration over MoonEP."""
    parallel = configure(**changes).parallel_config
    moe = import_module("vllm.model_executor.layers.fused_moe.config").FusedMoEParallelConfig.make(
        tp_size_=parallel.tensor_parallel_size,
        pcp_size_=1,
        dp_size_=parallel.data_parallel_size,
        sp_size_=1,
        vllm_parallel_config=parallel,
    )
    if moe.use_moonep_kernels:
        raise Done("MoonEP is used")


def _loaded(layer: Any, without: str = "") -> Any:
    """The layer with weights of zero, of its own sizes.

    Args:
        layer: to be loaded.
        without: what its checkpoint lacks: ``expert``, the last one of each rank; ``rows``, half of each gate.
    """
    moe = layer.runner.moe_config
    up = torch.zeros(moe.intermediate_size, moe.hidden_dim)
    down, gate = up.T.contiguous(), up[: len(up) // 2] if without == "rows" else up

    def checkpoint() -> Iterator[tuple[int, str, Tensor]]:
        for expert in range(moe.num_experts):
            if without != "expert" or (expert + 1) % moe.num_local_experts:
                yield from ((expert, "gate", gate), (expert, "up", up), (expert, "down", down))

    layer.load(checkpoint)
    return layer


def _run(
    layer: Any,
    tokens: int = 1,
    told: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    narrow: bool = False,
) -> Tensor:
    """A forward pass of ones to the first experts.

    Args:
        layer: whose pass.
        tokens: of every rank.
        told: the number of tokens that vLLM is told instead.
        dtype: of the hidden states.
        narrow: bfloat16 route weights and int64 ids in place of float32 and int32.
    """
    moe, device = layer.runner.moe_config, layer.device
    K = moe.experts_per_token
    hidden = torch.ones(tokens, moe.hidden_dim, dtype=dtype, device=device)
    weights = torch.full((tokens, K), 1 / K, dtype=torch.bfloat16 if narrow else torch.float32, device=device)
    ids = torch.arange(K, dtype=torch.int64 if narrow else torch.int32, device=device).repeat(tokens, 1)
    counts = [tokens if told is None else told] * moe.moe_parallel_config.dp_size
    result: Tensor = layer.forward(hidden, weights, ids, counts)
    return result


def _biases(layer: Any) -> None:
    """Raise ``Done`` if biases of one show in the output of experts whose weights are zero."""
    experts = layer.runner.routed_experts
    experts.w13_bias.data.fill_(1)
    experts.w2_bias.data.fill_(1)
    if _run(_loaded(layer)).any():
        raise Done("the biases were added")


def _convert_twice(layer: Any) -> None:
    """Raise ``Done`` if a second conversion of the weights changes nothing."""
    before = _run(_loaded(layer))
    layer.convert()
    if torch.equal(_run(layer), before):
        raise Done("nothing changed")
