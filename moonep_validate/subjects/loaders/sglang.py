"""How do checkpoints go through SGLang's loader? Layers of its factory in one process on the CPU, no forward pass.

MXFP4 by one tensor an expert, in both orders of gate and up, and stacked as gpt-oss ships it; BF16. The ranks of
its parallel groups are stated, since there is one process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonep_validate.subjects.engines.sglang import declare_torchvision
from moonep_validate.subjects.loaders import Begun
from moonep_validate.subjects.loaders.variants import (
    EXPERTS,
    SIZES,
    TOP_K,
    Checkpoint,
    LoadPath,
    Variant,
    stacked,
)

_FLOATS = ("float8_e8m0fnu", "float32", "bfloat16")


class SglangLoader:
    """SGLang's loaders; one object per process."""

    package = "sglang"
    paths: Mapping[str, LoadPath] = {
        "bf16": LoadPath("bf16"),
        "per-expert": LoadPath("mxfp4", scales=_FLOATS),
        "per-expert-up-first": LoadPath("mxfp4", order="w31", scales=_FLOATS),
        "stacked": LoadPath("mxfp4", order="interleaved", scales=_FLOATS, cuts=False, fused=True),
    }

    def __init__(self) -> None:
        self._context: Any = None
        self._layers = 0

    def start(self, folder: Path, kept: ExitStack) -> Begun:
        """See ``Loader.start``."""
        os.environ.update(HF_HUB_OFFLINE="1")
        seams = declare_torchvision()
        arguments = import_module("sglang.srt.server_args").ServerArgs(model_path="dummy", device="cpu")
        self._context = import_module("sglang.srt.runtime_context")
        self._context.publish(arguments, role="test")
        state = import_module("sglang.srt.distributed.parallel_state")
        state.init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        kept.callback(torch.distributed.destroy_process_group)
        import_module("sglang.srt.layers.moe.utils").initialize_moe_config()
        return Begun(import_module("sglang"), (*seams, "the ranks of all parallel groups are stated"))

    def make(self, variant: Variant) -> Any:
        """See ``Loader.make``."""
        config = None if variant.how.format == "bf16" else _mxfp4_config()
        layer_class = import_module("sglang.srt.layers.moe.ep_moe.layer").get_moe_impl_class(config)
        self._layers += 1
        hidden, intermediate = SIZES[variant.how.format]
        with self._context.get_parallel().override(**_places(variant)):
            layer = layer_class(
                num_experts=len(EXPERTS),
                top_k=TOP_K,
                hidden_size=hidden,
                intermediate_size=intermediate,
                layer_id=self._layers,
                params_dtype=torch.bfloat16,
                prefix=f"layers.{self._layers}.block_sparse_moe.experts",
                quant_config=config,
            )
        if variant.how.order == "w31":  # what a quantisation method sets whose kernel wants it so
            layer.quant_method.load_up_proj_weight_first = True
        return layer

    def load(self, variant: Variant, layer: Any, checkpoint: Checkpoint) -> int | None:
        """See ``Loader.load``."""
        parameters = self.parameters(layer)
        if variant.path == "stacked":  # the model cuts; the loader copies
            whole = stacked(
                [one for one in checkpoint if one.expert in variant.experts], "interleaved", variant.tp
            )
            for slot, tensor in whole.items():
                name = variant.how.names[slot]
                _load(parameters[name], tensor, name, None, None)
            return None
        mapping = layer.make_expert_params_mapping("w1", "w2", "w3", len(EXPERTS))
        targets = {
            named: (prefix.removeprefix("experts."), expert, shard) for prefix, named, expert, shard in mapping
        }
        suffix = {"weight": variant.how.weight, "scale": variant.how.scale}
        for one in checkpoint:
            named, ending = f"experts.{one.expert}.{one.matrix}.", suffix[one.part]
            prefix, number, shard = targets[named]
            _load(parameters[prefix + ending], one.tensor, named + ending, shard, number)
        return None

    def parameters(self, layer: Any) -> Mapping[str, Tensor]:
        """See ``Loader.parameters``."""
        return dict(layer.named_parameters())


def _load(parameter: Any, tensor: Tensor, name: str, shard: str | None, expert: int | None) -> None:
    parameter.weight_loader(parameter, tensor, name, shard_id=shard, expert_id=expert)


def _mxfp4_config() -> Any:
    config = import_module("sglang.srt.layers.quantization.mxfp4").Mxfp4Config
    return config(is_checkpoint_mxfp4_serialized=True)


def _places(variant: Variant) -> dict[str, int]:
    (rank, ranks), (ep_rank, ep_ranks) = variant.tp, variant.ep
    groups = {"tp": (max(ranks, ep_ranks), max(rank, ep_rank)), "attn_tp": (ranks, rank), "moe_tp": (ranks, rank)}
    sizes = {f"{group}_size": size for group, (size, _) in groups.items()}
    ranks_of = {f"{group}_rank": place for group, (_, place) in groups.items()}
    return {**sizes, **ranks_of, "moe_ep_size": ep_ranks, "moe_ep_rank": ep_rank}
