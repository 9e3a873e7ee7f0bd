"""How do checkpoints go through vLLM's loader? Layers of its factory in one process on the CPU, no forward pass.

BF16, FP8 blocks, and MXFP4 by compressed-tensors, ``Mxfp4Config`` and gpt-oss. Seams: the rank in the
tensor-parallel group is stated, since there is one process; vLLM is told that the CPU has AMX, without which it
has no MXFP4 backend.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from moonep_validate.subjects.engines.vllm_probes import HF_CONFIG
from moonep_validate.subjects.loaders import Begun
from moonep_validate.subjects.loaders.variants import (
    EXPERTS,
    GEOMETRY,
    SIZES,
    TOP_K,
    Checkpoint,
    LoadPath,
    Variant,
    stacked,
)

_LAYERS = "vllm.model_executor.layers"
_CONFIG = f"{_LAYERS}.fused_moe.config"
_GPT_OSS = "vllm.model_executor.models.gpt_oss"
_FLOATS = ("float8_e8m0fnu", "float32", "bfloat16")


class VllmLoader:
    """vLLM's loaders; one object per process."""

    package = "vllm"
    paths: Mapping[str, LoadPath] = {
        "bf16": LoadPath("bf16"),
        "fp8-blocks": LoadPath("fp8", scale="weight_scale_inv", scales=("bfloat16",)),
        "compressed-tensors": LoadPath("mxfp4", weight="weight_packed", scales=_FLOATS),
        "Mxfp4Config": LoadPath("mxfp4", scales=_FLOATS),
        "gpt-oss": LoadPath("mxfp4", order="interleaved", scales=_FLOATS, fused=True),
    }

    def __init__(self) -> None:
        self._serial, self._rank, self._ranks = 0, 0, 1
        self._configs: dict[bool, Any] = {}

    def start(self, folder: Path, kept: ExitStack) -> Begun:
        """See ``Loader.start``."""
        os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
        config = import_module("vllm.config")
        (folder / "config.json").write_text(json.dumps(HF_CONFIG))
        model = config.ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True
        )
        for parallel in (False, True):
            self._configs[parallel] = config.VllmConfig(
                model_config=model, device_config=config.DeviceConfig(device="cpu")
            )
            self._configs[parallel].parallel_config.enable_expert_parallel = parallel
        kept.enter_context(config.set_current_vllm_config(self._configs[False]))
        state = import_module("vllm.distributed.parallel_state")
        state.init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        state.initialize_model_parallel(backend="gloo")
        kept.callback(state.cleanup_dist_env_and_memory)
        import_module(_GPT_OSS)
        for place, value in {
            "torch.cpu._is_amx_tile_supported": lambda: True,
            f"{_CONFIG}.get_tensor_model_parallel_rank": lambda: self._rank,
            f"{_GPT_OSS}.get_tensor_model_parallel_world_size": lambda: self._ranks,
        }.items():
            kept.enter_context(patch(place, value))
        return Begun(import_module("vllm"), ("the rank in the tensor-parallel group is stated", "the CPU has AMX"))

    def make(self, variant: Variant) -> Any:
        """See ``Loader.make``."""
        parallel = variant.ep[1] > 1
        self._serial += 1
        self._rank, self._ranks = variant.ep if parallel else variant.tp
        hidden, intermediate = SIZES[variant.how.format]
        with import_module("vllm.config").set_current_vllm_config(self._configs[parallel]):
            return import_module(f"{_LAYERS}.fused_moe").FusedMoEFactory(
                num_experts=len(EXPERTS),
                top_k=TOP_K,
                hidden_size=hidden,
                intermediate_size=intermediate,
                params_dtype=torch.bfloat16,
                quant_config=_QUANTISATION[variant.path](),
                prefix=f"layers.{self._serial}.block_sparse_moe.experts",
                ckpt_names=("w1", "w2", "w3"),
                tp_size=self._ranks,
            )

    def load(self, variant: Variant, layer: Any, checkpoint: Checkpoint) -> int | None:
        """See ``Loader.load``."""
        if variant.path == "gpt-oss":
            return self._load_gpt_oss(variant, layer, checkpoint)
        suffix = {"weight": variant.how.weight, "scale": variant.how.scale}
        named = ((f"{one.expert}.{one.matrix}.{suffix[one.part]}", one.tensor) for one in checkpoint)
        return len(list(layer.load_weights(named)))

    def _load_gpt_oss(self, variant: Variant, layer: Any, checkpoint: Checkpoint) -> int:
        """By vLLM's model of gpt-oss, which cuts shards itself: ``[E, 2I, H/32, 16]`` blocks, rows alternating."""
        model: Any = object.__new__(import_module(_GPT_OSS).GptOssModel)
        torch.nn.Module.__init__(model)
        model.experts = layer
        model.parallel_config = SimpleNamespace(enable_expert_parallel=variant.ep[1] > 1)
        model.config = SimpleNamespace(num_local_experts=len(EXPERTS), intermediate_size=SIZES["mxfp4"][1])
        whole = stacked(checkpoint, variant.how.order)
        slots = {parameter: slot for slot, parameter in variant.how.names.items()}
        names = {slots.get(name.rsplit(".", 1)[-1], ""): name for name, _ in model.named_parameters()}
        tensors = (
            (names[slot], tensor if "scale" in slot else tensor.unflatten(-1, (-1, 16)))
            for slot, tensor in whole.items()
        )
        first, end = variant.experts[0], variant.experts[-1] + 1
        return len(model._load_weights_mxfp4(end, first, 1, 0, tensors, []))  # the last two are of attention heads

    def parameters(self, layer: Any) -> Mapping[str, Tensor]:
        """See ``Loader.parameters``."""
        return dict(layer.routed_experts.named_parameters())


def _compressed_tensors() -> Any:
    config = import_module(f"{_LAYERS}.quantization.compressed_tensors.compressed_tensors")
    return config.CompressedTensorsConfig.from_config(GEOMETRY.config()["text_config"]["quantization_config"])


def _fp8() -> Any:
    return import_module(f"{_LAYERS}.quantization.fp8").Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128]
    )


#: Path -> what makes vLLM's quantisation config.
_QUANTISATION: dict[str, Callable[[], Any]] = {
    "bf16": lambda: None,
    "fp8-blocks": _fp8,
    "compressed-tensors": _compressed_tensors,
    "Mxfp4Config": lambda: import_module(f"{_LAYERS}.quantization.mxfp4").Mxfp4Config(),
    "gpt-oss": lambda: import_module(f"{_LAYERS}.quantization.mxfp4").GptOssMxfp4Config(),
}
