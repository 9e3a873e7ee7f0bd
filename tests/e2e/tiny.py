"""A tiny Qwen3-MoE as a folder, and its faulty relatives: ``python -m tests.e2e.tiny FOLDER [FAULT]``.

Qwen3-MoE, since transformers, vLLM and SGLang all serve it and agree on it. Which experts a token gets is written
into the first columns of its embedding, which no layer writes to: so the router never flips on rounding, and a
hot expert stays hot. Sizes are the smallest that MoonEP takes (multiples of 128).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, H, I, E, K, LAYERS, HEADS, HEAD = 512, 128, 128, 8, 2, 2, 4, 32
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": I,
    "moe_intermediate_size": I,
    "num_experts": E,
    "num_experts_per_tok": K,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
#: A column of the first expert and of the second, at an embedding whose other columns have a spread of 1.
_FIRST, _SECOND = 3.0, 2.0


def weights(seed: int = 7) -> dict[str, Tensor]:
    """All tensors, float32, under the names of the architecture."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, spread: float = 0.1) -> Tensor:
        return torch.randn(*shape, generator=random) * spread

    found = {"model.embed_tokens.weight": normal(VOCAB, H, spread=1.0), "model.norm.weight": torch.ones(H)}
    found["model.embed_tokens.weight"][:, :E] = _routes(random)
    found["lm_head.weight"] = normal(VOCAB, H, spread=0.3)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name in ("q", "k", "v", "o"):
            found[f"{at}.self_attn.{name}_proj.weight"] = _silent(normal(H, H)) if name == "o" else normal(H, H)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            found[f"{at}.{name}.weight"] = torch.ones(HEAD)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{name}.weight"] = torch.ones(H)
        # The hot experts are the first ones in even layers and the last ones in odd layers, so that each rank of two
        # is the one with too little to do, and computes real rows in slots, in some layer.
        found[f"{at}.mlp.gate.weight"] = torch.eye(E, H) if layer % 2 == 0 else torch.eye(E, H).flip(0)
        for expert in range(E):
            for name in ("gate", "up"):
                found[f"{at}.mlp.experts.{expert}.{name}_proj.weight"] = normal(I, H)
            found[f"{at}.mlp.experts.{expert}.down_proj.weight"] = _silent(normal(H, I))
    return found


def _routes(random: torch.Generator) -> Tensor:
    """``[VOCAB, E]``: two experts for each token, the first ones of all more often."""
    hot = torch.tensor([6.0, 4.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    chosen = torch.multinomial(hot.expand(VOCAB, E), 2, generator=random)
    columns = torch.zeros(VOCAB, E)
    columns.scatter_(1, chosen, torch.tensor([_FIRST, _SECOND]).expand(VOCAB, 2).contiguous())
    return columns


def _silent(weight: Tensor) -> Tensor:
    """An output projection that leaves the router's columns alone."""
    weight[:E] = 0.0
    return weight


def _expert(layer: int, expert: int, name: str = "down") -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"


def _row(found: dict[str, Tensor]) -> None:
    found[_expert(0, 1)][17] = 0


def _zero(found: dict[str, Tensor]) -> None:
    found[_expert(0, 1)].zero_()


def _cold(found: dict[str, Tensor]) -> None:
    found[_expert(1, 0)].zero_()


def _swap(found: dict[str, Tensor]) -> None:
    one, two = _expert(0, 1), _expert(0, 2)
    found[one], found[two] = found[two], found[one]


def _halves(found: dict[str, Tensor]) -> None:
    one, two = _expert(0, 1, "gate"), _expert(0, 1, "up")
    found[one], found[two] = found[two], found[one]


def _scale(found: dict[str, Tensor]) -> None:
    found[_expert(0, 1)][:, :32] *= 2


def _layers(found: dict[str, Tensor]) -> None:
    for expert in range(E):
        found[_expert(1, expert)] = found[_expert(0, expert)].clone()


def _router(found: dict[str, Tensor]) -> None:
    gate = found["model.layers.0.mlp.gate.weight"]
    gate[[1, 2]] = gate[[2, 1]].clone()


#: Name -> what is wrong with the checkpoint; ``top-k`` and ``renormalise`` change its config.
FAULTS: dict[str, tuple[str, Callable[[dict[str, Tensor]], None]]] = {
    "row": ("one row of one expert's down projection is zero", _row),
    "expert": ("one expert's down projection is zero", _zero),
    "cold-expert": ("the same of a rare expert in the last layer", _cold),
    "swap": ("the down projections of two experts are exchanged", _swap),
    "halves": ("gate and up of one expert are exchanged", _halves),
    "scale": ("one scale block (32 columns) of one expert is off by one exponent", _scale),
    "layer": ("the last layer has the first one's down projections", _layers),
    "router": ("two rows of a router are exchanged", _router),
    "top-k": ("one expert too few for each token", lambda found: None),
    "renormalise": ("route weights are not renormalised", lambda found: None),
}
_CONFIGS: dict[str, dict[str, object]] = {
    "top-k": {"num_experts_per_tok": K - 1},
    "renormalise": {"norm_topk_prob": False},
}


def make(folder: Path, fault: str = "") -> Path:
    """Write the model, with a fault if one is named."""
    folder.mkdir(parents=True, exist_ok=True)
    found = weights()
    if fault:
        FAULTS[fault][1](found)
    save_file(
        {name: tensor.contiguous() for name, tensor in found.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps({**CONFIG, **_CONFIGS.get(fault, {})}, indent=1))
    return folder


if __name__ == "__main__":
    make(Path(sys.argv[1]), *sys.argv[2:3])
