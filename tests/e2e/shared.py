"""A tiny DeepSeek-V3 with a shared expert, a router bias and a scaling factor, and what `compare` sees of their faults.

``python -m tests.e2e.shared [PROMPTS]`` prints rows of docs/served.md. All sides are transformers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonep_validate.served.prompts import make_prompts
from tests.e2e.power import TOKENS, answers, judged
from tests.e2e.tiny import VOCAB

#: Sizes of the smallest model that has all of it; the first layer is dense, as in the real one.
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}


def make(folder: Path) -> Path:
    """Write the model, float32, with a router bias that matters."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(7)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**CONFIG))
    state = model.state_dict()
    for name, tensor in state.items():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.linspace(-0.2, 0.2, len(tensor)))
    state["lm_head.weight"].mul_(3)
    model.save_pretrained(folder)
    return folder


def _weights(ending: str, factor: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = folder / "model.safetensors"
        found = load_file(path)
        hit = [name for name in found if name.endswith(ending)]
        assert hit, f"no tensor ends in {ending}"
        save_file({**found, **{name: found[name] * factor for name in hit}}, path, {"format": "pt"})

    return change


def _setting(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


FAULTS: dict[str, Callable[[Path], None]] = {
    "none": lambda folder: None,
    "the router bias is dropped": _weights("e_score_correction_bias", 0.0),
    "the shared expert counts twice": _weights("shared_experts.down_proj.weight", 2.0),
    "the routed scaling factor is forgotten": _setting(routed_scaling_factor=1.0),
    "one expert too few for each token": _setting(num_experts_per_tok=1),
}


def main() -> None:
    """Print one line for each type and fault."""
    count = int([*sys.argv, "32"][1])
    prompts = [replace(one, max_tokens=min(one.max_tokens, TOKENS)) for one in make_prompts(VOCAB, count, 0, 256)]
    with tempfile.TemporaryDirectory() as name:
        right = make(Path(name) / "right")
        third = answers(right, "float32", prompts, None)
        for dtype in ("float32", "bfloat16"):
            base = answers(right, dtype, prompts, third)
            other = answers(right, dtype, prompts, third, attn_implementation="eager")
            for number, (fault, change) in enumerate(FAULTS.items()):
                change(folder := make(Path(name) / f"{dtype}{number}"))
                candidate = answers(folder, dtype, prompts, third, experts_implementation="batched_mm")
                row = judged(base, candidate, other, third)
                sys.stdout.write(f"| {dtype} | {fault} | {' | '.join(row)} |\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
