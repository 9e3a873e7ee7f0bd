"""How does SGLang build, load and run a MoE layer over MoonEP? SGLang's own factory, loader and runner, no copies.

SGLang's ``moonep`` backend is on a branch and in no release. One process is one rank of tensor parallelism R with
expert parallelism R, the layout that the backend forces. What depends on a case goes in through the variables that
SGLang reads its capacity, slots and token padding from. All of SGLang runs unchanged; on the CPU a package that it
imports may need help, see ``declare_torchvision``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.cases.layout import Layout
from moonep_validate.subjects.engines.integration import Checkpoint, Probe, Started
from moonep_validate.subjects.engines.keywords import passed_keywords

_MOE = "sglang.srt.layers.moe"
_MOONEP = f"{_MOE}.token_dispatcher.moonep"
_CAPACITY = "SGLANG_MOONEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
_SLOTS = "SGLANG_MOONEP_NUM_PREFETCH_SLOTS"
_PAD = "SGLANG_MOONEP_TOKEN_PADDING"
#: Rows and columns of a weight that MoonEP's prefetch copies; SGLang gives it one expert's matrices as they are.
_TILE = 128
#: What SGLang's server arguments look up in a model's folder before they are checked.
_MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
}


class Computed(Exception):
    """What a probe asked for changed the output: SGLang computes it, which is as good as a refusal."""


class _Layer:
    """See ``MoELayer``."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def forward(self, hidden: Tensor, topk_weights: Tensor, topk_ids: Tensor, token_counts: list[int]) -> Tensor:
        """See ``MoELayer.forward``; SGLang's MoonEP code does not ask what other ranks have."""
        # The logits travel with the routing, and MoonEP's code never reads them.
        logits = hidden.new_zeros(len(hidden), self._layer.num_experts)
        routing = import_module(f"{_MOE}.topk").StandardTopKOutput(topk_weights, topk_ids, logits)
        out: Tensor = self._layer(hidden, routing)
        return out

    def reload(self, checkpoint: Checkpoint) -> None:
        """See ``MoELayer.reload``: what SGLang's model loader does, for an update as at start."""
        layer = self._layer
        mapping = layer.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", layer.num_experts)
        targets = {named: (parameter, expert, shard) for parameter, named, expert, shard in mapping}
        parameters = {f"experts.{name}": parameter for name, parameter in layer.named_parameters()}
        for expert, projection, tensor in checkpoint():
            named = f"experts.{expert}.{projection}_proj."
            prefix, number, shard = targets[named]
            parameter = parameters[f"{prefix}weight"]
            parameter.weight_loader(parameter, tensor, f"{named}weight", shard_id=shard, expert_id=number)
        layer.quant_method.process_weights_after_loading(layer)


class Sglang:
    """SGLang as an ``Integration``; one object per process."""

    name = "sglang"
    rounds = ("silu", "route_weight")

    def __init__(self) -> None:
        self._size, self._device = 0, torch.device("cpu")
        self._kept = ExitStack()
        self._layers = 0

    def supports(self, case: Case) -> str | None:
        """See ``Integration.supports``."""
        uneven = [f"{name}={size}" for name, size in (("H", case.H), ("I", case.I)) if size % _TILE]
        if case.generation != "A":
            return f"gen{case.generation}: SGLang calls MoonEP's generation A; use genA"
        if case.format.name != "bf16":
            return f"format {case.format}: SGLang's MoonEP code takes bf16 weights only; use bf16"
        if uneven:
            return f"{uneven[0]}: MoonEP prefetches multiples of {_TILE} only; use {uneven[0][0]}{_TILE}"
        return None

    def environment(self, device: str) -> dict[str, str]:
        """See ``Integration.environment``: nothing is ever looked up on a model hub."""
        return {"HF_HUB_OFFLINE": "1"}

    def start(self, rank: int, size: int, device: str) -> Started:
        """See ``Integration.start``.

        Raises:
            NotImplementedError: if this SGLang has no moonep backend; told without importing it.
            ImportError: if SGLang, or a package that it needs, is not there.
        """
        source = _dispatcher_source()
        cpu = torch.device(device).type == "cpu"
        self._size, self._device = size, torch.device("cpu") if cpu else torch.device(device, rank)
        seams = declare_torchvision() if cpu else ()
        arguments = self._server_arguments("dummy")
        import_module("sglang.srt.runtime_context").publish(arguments, role="test")
        if not cpu:
            torch.cuda.set_device(self._device)
        state, backend = import_module("sglang.srt.distributed.parallel_state"), "gloo" if cpu else "nccl"
        state.init_distributed_environment(size, rank, local_rank=rank, backend=backend)
        state.initialize_model_parallel(size, size, backend=backend)
        import_module(f"{_MOE}.utils").initialize_moe_config(arguments)
        expects = passed_keywords(source.read_text("utf-8"), {"Buffer", "dispatch", "prefetch_weight", "combine"})
        return Started(import_module("sglang"), seams, expects)

    def open(self, case: Case) -> None:
        """See ``Integration.open``."""
        self._layers = 0
        self._kept.enter_context(_environment_kept())
        values = {_CAPACITY: case.S, _SLOTS: Layout.of(case).num_slots, _PAD: case.pad}
        os.environ.update({name: str(value) for name, value in values.items()})

    def make_layer(self, case: Case, name: str, checkpoint: Checkpoint) -> _Layer:
        """See ``Integration.make_layer``."""
        layer = _Layer(self._build(case, name))
        layer.reload(checkpoint)
        return layer

    def close(self) -> None:
        """See ``Integration.close``."""
        try:
            import_module(_MOONEP).MoonEPBuffer.destroy_all_buffers()
        finally:
            self._kept.close()

    def probes(self, case: Case) -> list[Probe]:
        """See ``Integration.probes``; each is the same on every rank, and needs no loaded weights."""
        build, run, ignores = (partial(f, case) for f in (self._build_probe, self._run, self._ignores))
        mxfp4 = import_module("sglang.srt.layers.quantization.mxfp4").Mxfp4Config
        refused: dict[str, Any] = {
            "expert biases": partial(ignores, with_bias=True),
            "a limit on the gated activation": partial(ignores, swiglu_limit=1.0),
            "the activation of gpt-oss": partial(ignores, gemm1_alpha=1.7, gemm1_clamp_limit=1.0),
            "route weights on the input of experts": partial(ignores, apply_router_weight_on_input=True),
            "the activation gelu": partial(run, activation="gelu"),
            "experts without a gate": partial(run, is_gated=False),
            "float16 weights": partial(run, params_dtype=torch.float16),
            "float16 hidden states": partial(run, dtype=torch.float16),
            "hidden states of another width": partial(run, width=case.H + _TILE),
            "one route too many": partial(run, routes=case.K + 1),
            "one token more than the capacity": partial(run, tokens=case.S + 1),
            "a capacity of 0": partial(self._run_at_capacity, case, 0),
            "fused shared experts": partial(build, num_experts=case.E + case.R, num_fused_shared_experts=1),
            "MXFP4 experts": lambda: build(quant_config=mxfp4(is_checkpoint_mxfp4_serialized=True)),
            "two-batch overlap": partial(self._configure, enable_two_batch_overlap=True),
            "single-batch overlap": partial(self._configure, enable_single_batch_overlap=True),
        }
        if case.R > 1:
            refused["a number of experts that R does not divide"] = partial(build, num_experts=case.E + 1)
            refused["expert placement that changes (EPLB)"] = partial(self._configure, enable_eplb=True)
        accepted = {
            "a legal layer": run,
            "no token on any rank": partial(run, tokens=0),
            "expert ids of int64": partial(run, ids=torch.int64),
            "server arguments with the moonep backend": self._configure,
        }
        return [Probe(what, True, call) for what, call in refused.items()] + [
            Probe(what, False, call) for what, call in accepted.items()
        ]

    def _build(self, case: Case, name: str, **fields: Any) -> Any:
        """The layer that SGLang's factory makes; ``fields`` are arguments of its constructor."""
        layer_class = import_module(f"{_MOE}.ep_moe.layer").get_moe_impl_class(fields.get("quant_config"))
        arguments = {
            "num_experts": case.E,
            "top_k": case.K,
            "hidden_size": case.H,
            "intermediate_size": case.I,
            "layer_id": self._layers,
            "params_dtype": torch.bfloat16,
            "prefix": f"{name}.experts",
        }
        self._layers += 1
        with self._device:
            return layer_class(**arguments | fields)

    def _build_probe(self, case: Case, **fields: Any) -> Any:
        """A layer of constant weights, large enough to reach a limit, and large biases where it has biases."""
        layer = self._build(case, "probe", **fields)
        for name, parameter in layer.named_parameters():
            parameter.data.fill_(100 if "bias" in name else 1 / 16)
        return layer

    def _run(
        self,
        case: Case,
        *,
        tokens: int | None = None,
        width: int | None = None,
        routes: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        ids: torch.dtype = torch.int32,
        **fields: Any,
    ) -> Tensor:
        """Build a layer and run it on ones; what is left out is legal."""
        count, routes = case.S if tokens is None else tokens, routes or case.K
        hidden = torch.ones(count, width or case.H, dtype=dtype, device=self._device)
        experts = torch.arange(count * routes, device=self._device).view(count, routes) % case.E
        weights = torch.full((count, routes), 0.5, device=self._device)
        layer = _Layer(self._build_probe(case, **fields))
        try:
            return layer.forward(hidden, weights, experts.to(ids), [count] * case.R)
        finally:
            import_module(_MOONEP).MoonEPBuffer.destroy_all_buffers()

    def _run_at_capacity(self, case: Case, capacity: int) -> None:
        """Run no token at a capacity that is not the case's; a token would be refused for another reason."""
        with _environment_kept():
            os.environ[_CAPACITY] = str(capacity)
            self._run(case, tokens=0)

    def _ignores(self, case: Case, **fields: Any) -> None:
        """Return if ``fields`` make no difference to the output, which they must.

        Raises:
            Computed: if they do.
        """
        if not torch.equal(self._run(case), self._run(case, **fields)):
            raise Computed(", ".join(fields))

    def _configure(self, **fields: Any) -> None:
        """Check server arguments as SGLang does when it starts."""
        with TemporaryDirectory() as folder, _environment_kept():
            (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
            self._server_arguments(folder, skip_tokenizer_init=True, **fields).check_server_args()

    def _server_arguments(self, model: str, **fields: Any) -> Any:
        parallel = {"device": self._device.type, "tp_size": self._size, "ep_size": self._size}
        server_args = import_module("sglang.srt.server_args").ServerArgs
        return server_args(model_path=model, moe_a2a_backend="moonep", **parallel, **fields)


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Put all variables back; SGLang's server arguments set some too."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _dispatcher_source() -> Path:
    """The file of SGLang's MoonEP dispatcher; finding it imports nothing, and an import takes ten seconds."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        raise ImportError("sglang is not installed")
    file = "srt/layers/moe/token_dispatcher/moonep.py"
    source = Path(spec.origin).parent / file
    if not source.exists():
        version = next((found.version for found in metadata.distributions(name="sglang")), "of unknown version")
        raise NotImplementedError(f"this SGLang has no moonep backend: sglang {version} lacks {file}")
    return source


@cache  # torch registers a name once in a process
def declare_torchvision() -> tuple[str, ...]:
    """Declare two operators that torchvision's Python code needs, if its library cannot be loaded here.

    SGLang imports torchvision for images. The package index has torchvision for CUDA only.
    """
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return ()
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(library))
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
        return ("torchvision operators declared, since its CPU build is not on the package index",)
    return ()
