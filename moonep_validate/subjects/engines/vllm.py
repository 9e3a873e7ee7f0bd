"""How does vLLM build, load and run a MoE layer over MoonEP? vLLM's factory, loader and kernel, nothing of ours.

One process is one data-parallel rank: ``data_parallel_size = R`` with expert parallelism, the plainest layout in
which vLLM uses MoonEP. Every case gets a ``VllmConfig`` of its own. Our routing goes in through
``custom_routing_function``, the hook of models with a router of their own.

On a GPU vLLM runs unchanged. On the CPU three of its checks keep MoonEP out, although the code behind them runs
there: ``_open_cpu`` names and replaces exactly these.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from importlib import import_module
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.subjects.engines.integration import Checkpoint, Probe, Started
from moonep_validate.subjects.engines.keywords import passed_keywords
from moonep_validate.subjects.engines.vllm_probes import config_probes, layer_probes

# Constants of vLLM's prepare_finalize/moonep.py: MOONEP_DEFAULT_NUM_PREFETCH_SLOTS, MOONEP_DEFAULT_TOKEN_PADDING,
# MOONEP_WEIGHT_TILE. No option changes them.
_SLOTS, _PAD, _TILE = 4, 128, 128
_MOE = "vllm.model_executor.layers.fused_moe"
_RELOAD = "vllm.model_executor.model_loader.reload"
_UPDATER = "vllm.v1.worker.gpu_model_runner"
_MOONEP = f"{_MOE}.prepare_finalize.moonep"
#: What vLLM's all2all_utils imports from _MOONEP on CUDA only.
CUDA_ONLY = (
    "MOONEP_DEFAULT_NUM_PREFETCH_SLOTS",
    "MOONEP_DEFAULT_NUM_SMS",
    "MOONEP_DEFAULT_TOKEN_PADDING",
    "MoonEPPrepareAndFinalize",
)
#: Suffixes of a checkpoint of Mixtral's successors; vLLM's default names.
_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class Vllm:
    """vLLM as an ``Integration``; one object per process."""

    name = "vllm"
    rounds = ("silu", "route_weight", "weighted_activation")

    def __init__(self) -> None:
        self._size, self._device = 0, torch.device("cpu")
        self._config: Any = None
        self._layers: list[_Layer] = []

    def supports(self, case: Case) -> str | None:
        """See ``Integration.supports``; the limits are vLLM's, not MoonEP's."""
        slots = case.experts_per_rank if case.slots is None else case.slots
        uneven = [f"{name}={size}" for name, size in (("H", case.H), ("I", case.I)) if size % _TILE]
        if case.generation != "A":
            return f"gen{case.generation}: vLLM calls MoonEP's generation A; use genA"
        if case.R < 2:
            return f"R={case.R}: vLLM uses MoonEP with data parallelism only; use R >= 2"
        if slots != _SLOTS:
            return f"slots={slots}: vLLM always asks for {_SLOTS}; use slots{_SLOTS}"
        if case.pad != _PAD:
            return f"pad={case.pad}: vLLM always asks for {_PAD}; use pad{_PAD}"
        if uneven:
            return f"{uneven[0]}: vLLM takes multiples of {_TILE} only; use {uneven[0][0]}{_TILE}"
        return None

    def environment(self, device: str) -> dict[str, str]:
        """See ``Integration.environment``."""
        # A config.json of ours is all that is ever looked up.
        common = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if device == "cpu":
            return {**common, "OMP_NUM_THREADS": "1"}
        # Multicast is MoonEP's own affair; what NCCL and vLLM would use it for is not under test.
        return {
            **common,
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
            "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
            "VLLM_USE_DEEP_GEMM": "0",
        }

    def start(self, rank: int, size: int, device: str) -> Started:
        """See ``Integration.start``: import, process groups, and on the CPU three seams."""
        torch.set_num_threads(1)
        # vLLM's external launcher takes the place of a rank from here, as from torchrun.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        logging.getLogger("vllm").setLevel(logging.ERROR)  # its warnings are about the host, the same in every run
        module = import_module("vllm")
        self._size = size
        self._device = torch.device(device if device == "cpu" else f"{device}:{rank}")
        config = self._configure(max_num_batched_tokens=_PAD)
        with _current(config):
            state = import_module("vllm.distributed.parallel_state")
            backend = "gloo" if device == "cpu" else "nccl"
            state.init_distributed_environment(size, rank, "env://", rank, backend)
            state.initialize_model_parallel(backend=backend)
            seams = _open_cpu() if device == "cpu" else ()
        if device != "cpu":
            import_module("vllm.v1.worker.workspace").init_workspace_manager(self._device)
        gc.freeze()  # what has been imported stays; the collection after each case need not walk it (0.4 s)
        return Started(module, seams, _expects())

    def open(self, case: Case) -> None:
        """See ``Integration.open``."""
        self._config = self._configure(max_num_batched_tokens=case.S)

    def make_layer(self, case: Case, name: str, checkpoint: Checkpoint) -> _Layer:
        """See ``Integration.make_layer``."""
        layer = self._build(case, prefix=f"{name}.experts")
        layer.load(checkpoint)
        return layer

    def probes(self, case: Case) -> list[Probe]:
        """See ``Integration.probes``; after ``open(case)``."""
        names = (f"moonep_validate.probe{serial}.experts" for serial in count())
        return [
            *config_probes(case, partial(self._configure, case.S), self._device.type),
            *layer_probes(case, lambda **changes: self._build(case, **{"prefix": next(names), **changes})),
        ]

    def close(self) -> None:
        """See ``Integration.close``.

        vLLM's manager destroys the pools that its weak cache still knows, and forgets the Buffers of all others;
        so every layer of the case, failed ones too, is kept until here.
        """
        layers, self._layers, self._config = self._layers, [], None
        if layers:
            _manager().destroy()
            layers.clear()
            gc.collect()  # a layer is a cycle: its parameters know its loader

    def _build(self, case: Case, **changes: Any) -> _Layer:
        """A layer of the case's sizes, but for changes, without weights."""
        sizes = {
            "num_experts": case.E,
            "top_k": case.K,
            "hidden_size": case.H,
            "intermediate_size": case.I,
            "params_dtype": torch.bfloat16,
        }
        layer = _Layer(self._config, self._device, {**sizes, **changes})
        self._layers.append(layer)
        return layer

    def _configure(self, max_num_batched_tokens: int, model_config: Any = None, **parallel: Any) -> Any:
        """A ``VllmConfig``; ``parallel`` overrides fields of its ``ParallelConfig``."""
        config = import_module("vllm.config")
        wanted = {
            "data_parallel_size": self._size,
            "enable_expert_parallel": True,
            "all2all_backend": "moonep",
            "distributed_executor_backend": "external_launcher",
            **parallel,
        }
        scheduler = config.SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_num_batched_tokens,
            max_num_seqs=1,
            is_encoder_decoder=False,
        )
        return config.VllmConfig(
            **({} if model_config is None else {"model_config": model_config}),
            device_config=config.DeviceConfig(device=self._device.type),
            parallel_config=config.ParallelConfig(**wanted),
            scheduler_config=scheduler,
        )


class _Layer:
    """A ``MoELayer``: one runner of vLLM's factory.

    Args:
        config: the ``VllmConfig`` that it is built and run under.
        device: of its parameters.
        arguments: of the factory; ``prefix``, the layer's name, holds the word by which the loader finds experts.
    """

    def __init__(self, config: Any, device: torch.device, arguments: dict[str, Any]) -> None:
        self._config, self.device = config, device
        self._routes: tuple[Tensor, Tensor] | None = None
        with _current(config), device:
            self.runner = import_module(_MOE).FusedMoEFactory(
                custom_routing_function=self._route, renormalize=False, **arguments
            )
            # vLLM does so for every model that it has built.
            import_module(_RELOAD).record_metadata_for_reloading(self.runner)

    def load(self, checkpoint: Checkpoint) -> None:
        """Offer all experts to vLLM's loader, which keeps its own, then let vLLM convert them; collective."""
        deque(self.runner.load_weights(_named(checkpoint)), maxlen=0)  # a generator: it loads while it is read
        self.convert()

    def convert(self) -> None:
        """What vLLM does when all weights are loaded: gather all experts, make the kernel; collective."""
        experts = self.runner.routed_experts
        with _current(self._config), self.device:
            experts.quant_method.process_weights_after_loading(experts)

    def reload(self, checkpoint: Checkpoint) -> None:
        """See ``MoELayer.reload``: by the updater of vLLM's model runner, on a model of this layer; collective.

        Raises:
            Exception: what vLLM refuses an update with; in 0.32 NotImplementedError, from the second conversion.
        """
        updater = import_module(_UPDATER).GPUModelRunner.reload_weights
        with _current(self._config), self.device:
            updater(_ModelRunner(self._config, self.runner), weights_iterator=_named(checkpoint))

    def forward(self, hidden: Tensor, topk_weights: Tensor, topk_ids: Tensor, token_counts: list[int]) -> Tensor:
        """See ``MoELayer.forward``."""
        context = import_module("vllm.forward_context")
        counts = torch.tensor(token_counts, dtype=torch.int32)
        # vLLM's router wants logits; our routing replaces what it would make of them.
        logits = hidden.new_zeros(len(hidden), self.runner.moe_config.num_experts)
        self._routes = topk_weights, topk_ids
        try:
            with (
                torch.inference_mode(),
                context.set_forward_context(
                    None, self._config, num_tokens=len(hidden), num_tokens_across_dp=counts
                ),
            ):
                result: Tensor = self.runner(hidden, logits)
        finally:
            self._routes = None
        return result.clone()

    def _route(
        self, hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        """The router of the layer: what ``forward`` was given."""
        assert self._routes is not None, "vLLM asked for a routing outside of forward"
        return self._routes


class _ModelRunner:
    """What vLLM's updater asks of the model runner whose method it is: a model, here of one layer, and caches."""

    def __init__(self, config: Any, layer: Any) -> None:
        self.vllm_config = copy(config)
        if config.model_config is None:  # layers are made without one; the updater looks at its quantisation
            vars(self.vllm_config)["model_config"] = SimpleNamespace(quantization=None)
        self._model = _OneLayer(layer)

    def get_model(self) -> Any:
        """The model that is updated."""
        return self._model

    def reset_lora_state(self) -> None:
        """There is none."""

    reset_encoder_cache = reset_mm_cache = reset_lora_state


class _OneLayer(torch.nn.Module):
    """A model of one MoE layer, whose weights have the names that the layer's loader knows."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        """As models of vLLM do: the names of the parameters that were loaded."""
        return {f"layer.{name}" for name in self.layer.load_weights(weights)}


def _named(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint under the names that vLLM's loader knows."""
    for expert, projection, tensor in checkpoint():
        yield f"{expert}.{_PROJECTIONS[projection]}.weight", tensor


def _current(config: Any) -> AbstractContextManager[None]:
    """The context in which vLLM builds things."""
    context: AbstractContextManager[None] = import_module("vllm.config").set_current_vllm_config(config)
    return context


def _manager() -> Any:
    """The all-to-all manager of the expert-parallel group, which owns the buffer pools."""
    return import_module("vllm.distributed").get_ep_group().device_communicator.all2all_manager


def _open_cpu() -> tuple[str, ...]:
    """Replace the three places that keep vLLM's MoonEP code from running on the CPU; collective."""
    experts = import_module(f"{_MOE}.experts.moonep_experts").MoonEPExperts
    experts._supports_current_device = staticmethod(lambda: True)
    utils, moonep = import_module(f"{_MOE}.all2all_utils"), import_module(_MOONEP)
    for name in CUDA_ONLY:
        setattr(utils, name, getattr(moonep, name))
    all2all = import_module("vllm.distributed.device_communicators.all2all")
    group = import_module("vllm.distributed").get_ep_group()
    group.device_communicator.all2all_manager = all2all.MoonEPAll2AllManager(
        group.cpu_group, device_group=group.device_group
    )
    return (
        "MoonEPExperts says that it supports the device",
        "all2all_utils knows the names of the MoonEP module",
        "the communicator of the expert-parallel group owns a MoonEPAll2AllManager",
    )


def _expects() -> dict[str, tuple[str, ...]]:
    """Keywords that vLLM passes to a Buffer, from its source; the constructor's are collected in a dict first."""
    methods = ("Buffer", "dispatch", "prefetch_weight", "combine", "destroy")
    found = passed_keywords(inspect.getsource(import_module(_MOONEP)), methods)
    manager = import_module("vllm.distributed.device_communicators.all2all").MoonEPAll2AllManager
    built = passed_keywords(inspect.getsource(manager._make_buffer_kwargs), ("dict",))
    found["Buffer"] = tuple(sorted({*found.get("Buffer", ()), *built.get("dict", ())}))
    return found
