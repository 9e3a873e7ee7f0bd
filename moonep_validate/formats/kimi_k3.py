"""What is in a Kimi-K3 checkpoint? Names, shapes, the nested config, and a writer of small ones.

The released format is compressed-tensors ``mxfp4-pack-quantized``: per expert and matrix a uint8 ``weight_packed``
and a uint8 ``weight_scale``; gate (w1) and up (w3) are separate tensors. Experts work on a latent width, so their
matrices are ``[I, latent]`` and ``[latent, I]``. Facts and sources: docs/formats.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moonep_validate.formats import FormatError
from moonep_validate.formats.mxfp4 import BLOCK
from moonep_validate.hashing import hashed, normal

FORMAT = "mxfp4-pack-quantized"
#: Checkpoint name of each matrix -> what it is.
ROLES = {"w1": "gate", "w3": "up", "w2": "down"}
PARTS = ("weight_packed", "weight_scale")
PREFIX = "language_model.model"

_EXPERT = re.compile(
    r"(?P<prefix>[\w.]*)\.layers\.(?P<layer>\d{1,9})\.block_sparse_moe\.experts\.(?P<expert>\d{1,9})\."
    r"(?P<matrix>w[123])\.(?P<part>weight_packed|weight_scale)",
    re.ASCII,
)


class ExpertTensor(NamedTuple):
    """One tensor of one expert; layer counts decoder layers from 0."""

    layer: int
    expert: int
    matrix: str
    part: str

    def name(self, prefix: str = PREFIX) -> str:
        """Its name in a checkpoint."""
        return f"{prefix}.layers.{self.layer}.block_sparse_moe.experts.{self.expert}.{self.matrix}.{self.part}"

    @classmethod
    def parse(cls, name: str) -> tuple[ExpertTensor, str] | None:
        """The tensor and its prefix; None for a name of something else."""
        found = _EXPERT.fullmatch(name)
        if not found:
            return None
        return cls(int(found["layer"]), int(found["expert"]), found["matrix"], found["part"]), found["prefix"]


@dataclass(frozen=True)
class Geometry:
    """The sizes of the routed experts.

    Attributes:
        hidden: model width, seen by the router and the shared experts.
        latent: width that experts see, and that is dispatched.
        intermediate: width inside an expert.
        num_experts, top_k: routed experts of a layer, experts of a token.
        moe_layers: decoder layers with experts; ``first_moe_layer`` dense ones come before.
        shared_experts: how many intermediate sizes wide the shared MLP is.

    Raises:
        FormatError: for a size that is not positive, or an expert width that is no multiple of a block.
    """

    hidden: int = 7168
    latent: int = 3584
    intermediate: int = 3072
    num_experts: int = 896
    top_k: int = 16
    moe_layers: int = 92
    first_moe_layer: int = 1
    shared_experts: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("first_moe_layer", "shared_experts") else 1
            if not isinstance(value, int) or value < least:
                raise FormatError(f"{name} is {value!r}; it is a number from {least} on")
        for name in ("latent", "intermediate"):
            if getattr(self, name) % BLOCK:
                raise FormatError(f"{name} is {getattr(self, name)}, no multiple of the MXFP4 block of {BLOCK}")
        if self.top_k > self.num_experts:
            raise FormatError(f"top_k is {self.top_k}, but there are {self.num_experts} experts")

    def scaled(self, factor: int, **sizes: int) -> Geometry:
        """The same proportions at ``1/factor`` of the widths, with other sizes as given.

        Raises:
            FormatError: if a width does not divide, or a block is cut.
        """
        widths = {name: getattr(self, name) for name in ("hidden", "latent", "intermediate")}
        if bad := [name for name, width in widths.items() if width % factor]:
            raise FormatError(f"factor {factor} does not divide {bad[0]} {widths[bad[0]]}; try 2, 4, 8 or 16")
        return replace(self, **{**{name: width // factor for name, width in widths.items()}, **sizes})

    @property
    def layers(self) -> range:
        """The decoder layers that have experts."""
        return range(self.first_moe_layer, self.first_moe_layer + self.moe_layers)

    def matrix(self, name: str) -> tuple[int, int]:
        """Rows and columns of a matrix, as a linear layer stores them (out, in)."""
        return (self.latent, self.intermediate) if name == "w2" else (self.intermediate, self.latent)

    def shape(self, tensor: ExpertTensor) -> tuple[int, int]:
        """The stored shape of an expert's tensor, in bytes."""
        rows, columns = self.matrix(tensor.matrix)
        return rows, columns // (2 if tensor.part == "weight_packed" else BLOCK)

    def tensors(self) -> Iterator[ExpertTensor]:
        """Every expert tensor that a checkpoint must have, in order."""
        for layer in self.layers:
            for expert in range(self.num_experts):
                yield from (ExpertTensor(layer, expert, matrix, part) for matrix in ROLES for part in PARTS)

    def config(self) -> dict[str, Any]:
        """``config.json``: the language model's config is nested, its quantisation inside it."""
        weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": BLOCK, "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**weights, "scale_dtype": "torch.uint8"},
            "input_activations": None,
        }
        quantization = {
            "quant_method": "compressed-tensors",
            "format": FORMAT,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp.(gate|up|down)_proj.*"],
        }
        text = {
            "model_type": "kimi_linear",
            "hidden_size": self.hidden,
            "routed_expert_hidden_size": self.latent,
            "moe_intermediate_size": self.intermediate,
            "num_experts": self.num_experts,
            "num_experts_per_token": self.top_k,
            "num_shared_experts": self.shared_experts,
            "num_hidden_layers": self.first_moe_layer + self.moe_layers,
            "first_k_dense_replace": self.first_moe_layer,
            "moe_layer_freq": 1,
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "latent_moe_use_norm": True,
            "routed_scaling_factor": 1.0,
            "quantization_config": quantization,
        }
        return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}


#: (layer, expert, matrix) to packed codes and scale bytes.
Source = Callable[[int, int, str], tuple[Tensor, Tensor]]


def other_tensors(geometry: Geometry, layer: int, seed: int = 0) -> dict[str, Tensor]:
    """The tensors around the experts of a layer: router, latent projections, norm and shared experts."""
    wide = geometry.shared_experts * geometry.intermediate
    shapes = {
        "gate.weight": (geometry.num_experts, geometry.hidden),
        "gate.e_score_correction_bias": (geometry.num_experts,),
        "routed_expert_down_proj.weight": (geometry.latent, geometry.hidden),
        "routed_expert_up_proj.weight": (geometry.hidden, geometry.latent),
        "routed_expert_norm.weight": (geometry.latent,),
        "shared_experts.gate_proj.weight": (wide, geometry.hidden),
        "shared_experts.up_proj.weight": (wide, geometry.hidden),
        "shared_experts.down_proj.weight": (geometry.hidden, wide),
    }
    dtypes = {"gate.e_score_correction_bias": torch.float32}
    return {
        f"{PREFIX}.layers.{layer}.block_sparse_moe.{name}": normal(
            hashed(name, seed, layer, torch.arange(torch.Size(shape).numel()))
        )
        .reshape(shape)
        .to(dtypes.get(name, torch.bfloat16))
        for name, shape in shapes.items()
    }


def write_checkpoint(folder: Path, geometry: Geometry, source: Source, shards: int = 2) -> Path:
    """Write a checkpoint in the released format: the MoE part of every layer, without attention and embeddings.

    Args:
        folder: made if it is not there.
        geometry: sizes; memory use is one shard.
        source: bytes of an expert's matrix, e.g. ``identity.source(geometry)``.
        shards: files to spread the tensors over.

    Returns:
        ``folder``.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    places = [(layer, expert) for layer in geometry.layers for expert in range(geometry.num_experts)]
    weight_map: dict[str, str] = {}
    total = 0
    for shard in range(shards):
        tensors: dict[str, Tensor] = {}
        for layer, expert in places[shard * len(places) // shards : (shard + 1) * len(places) // shards]:
            tensors |= _expert(layer, expert, source) | (other_tensors(geometry, layer) if expert == 0 else {})
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(geometry.config(), indent=1))
    return folder


def _expert(layer: int, expert: int, source: Source) -> dict[str, Tensor]:
    return {
        ExpertTensor(layer, expert, matrix, part).name(): tensor.contiguous()
        for matrix in ROLES
        for part, tensor in zip(PARTS, source(layer, expert, matrix), strict=True)
    }
