"""Two ranks of a stand-in for a served engine, with a sampler in each.

``python -m tests.self.served_moe RANK PORT FOLDER FAULT-MEGABYTES…``; its classes are called as vLLM's are, and
``FAULT`` is a mistake of the engine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed

from moonep_validate.reference.moonep_a import Buffer
from moonep_validate.served.taps.attach import sample, sample_vllm_experts, sample_vllm_layer
from moonep_validate.served.taps.sampling import Sampler
from moonep_validate.served.taps.schedule import Amount

R, E, K, S, H, I, B, LAYERS, STEPS = 2, 4, 2, 16, 128, 128, 2, 2, 12


class Layout:
    """One layer's weights, and its slots."""

    def __init__(self, layer: int) -> None:
        random = torch.Generator().manual_seed(layer)
        shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
        self.full = {
            name: torch.cat([torch.randn(E, *shape, generator=random), torch.zeros(B, *shape)]).bfloat16()
            for name, shape in shapes.items()
        }
        self.full_up_weight = self.full["up"]


class Layer:
    """What begins and ends a layer."""

    def __init__(self, buffer: Any, layout: Layout, first: Layout, fault: str) -> None:
        self.buffer, self.layout, self.first, self.fault = buffer, layout, first, fault

    def prepare(
        self, a1: Tensor, topk_weights: Tensor, topk_ids: Tensor, apply_router_weight_on_input: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        pad = (0, 0, 0, S - len(a1))
        ids = torch.nn.functional.pad(topk_ids, pad)
        counts = ids.flatten().long().bincount(minlength=E).int()
        hidden, weights = (torch.nn.functional.pad(tensor, pad) for tensor in (a1, topk_weights))
        rows, row_weights, ends, self.plan = self.buffer.dispatch(hidden, weights, ids, counts)
        filled = self.first if self.fault == "other-memory" else self.layout
        if self.fault != "no-prefetch":
            names = {f"full_{name}_weight": tensor for name, tensor in filled.full.items()}
            self.buffer.prefetch_weight(plan=self.plan, **names)
        if self.fault == "other-content":
            for name, tensor in self.layout.full.items():
                tensor[E:] = self.first.full[name][0]
        return rows, row_weights, ends

    def finalize(self, output: Tensor, fused_expert_output: Tensor) -> None:
        combined = self.buffer.combine(plan=self.plan, hidden_nvsh=fused_expert_output, route_weights_nvs=None)[0]
        output.copy_(combined[: len(output)])


class Experts:
    """What computes in between."""

    def __init__(self, layout: Layout) -> None:
        self.weight_layout = layout

    def apply(
        self, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, ends: Tensor, out: Tensor
    ) -> None:
        begin, up = 0, self.weight_layout.full_up_weight
        for group, end in enumerate(ends.tolist()):
            x = hidden_states[begin:end].float()
            inner = torch.nn.functional.silu(x @ w1[group].float().T) * (x @ up[group].float().T)
            y = inner.bfloat16().float() @ w2[group].float().T
            out[begin:end] = (y * topk_weights[begin:end, None]).bfloat16()
            begin = end


def main(rank: int, port: str, folder: Path, names: list[str]) -> None:
    """Serve once for each ``FAULT-MEGABYTES``, into a folder of that name."""
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=R)
    sys.modules["moonep"] = SimpleNamespace(Buffer=Buffer, __name__="moonep", __file__=__file__)  # type: ignore[assignment]
    for name in names:
        fault, _, megabytes = name.rpartition("-")
        (folder / name).mkdir(exist_ok=True)
        serve(Sampler(folder / name, Amount(3, 4, int(megabytes), 60)), fault)
    distributed.barrier()


def serve(sampler: Sampler, fault: str) -> None:
    # Each time classes of their own, since samplers stay on them.
    a_buffer, a_layer, some_experts = (type(one.__name__, (one,), {}) for one in (Buffer, Layer, Experts))
    if fault != "not-sampled":
        sample(a_buffer, sampler)
        if fault != "buffer-only":
            sample_vllm_layer(a_layer, sampler)
            sample_vllm_experts(some_experts, sampler)
    buffer = a_buffer(S=S, H=H, K=K, E=E, num_ep_ranks=R, token_padding=8, B=B)
    layouts = [Layout(layer) for layer in range(LAYERS)]
    layers = [a_layer(buffer, one, layouts[0], fault) for one in layouts]
    experts = [some_experts(one) for one in layouts]
    rank = distributed.get_rank()
    for step in range(STEPS):
        for number, (layer, mine) in enumerate(zip(layers, experts, strict=True)):
            one_pass(torch.Generator().manual_seed(100 * step + 10 * number + rank), layer, mine, fault)


def one_pass(random: torch.Generator, layer: Layer, experts: Experts, fault: str) -> None:
    tokens = 9 + int(torch.randint(S - 8, (1,), generator=random))
    hidden = torch.randn(tokens, H, generator=random).bfloat16()
    ids = torch.stack([torch.randperm(E, generator=random)[:K] for _ in range(tokens)]).int()
    ids[:, 0] = 0  # a hot expert, so that slots are used
    ids[ids[:, 1] == 0, 1] = 1
    weights = torch.rand(tokens, K, generator=random)
    rows, row_weights, ends = layer.prepare(hidden, weights, ids)
    given = torch.ones_like(row_weights) if fault == "no-route-weights" else row_weights
    full, out = experts.weight_layout.full, torch.zeros_like(rows)
    experts.apply(rows, full["gate"], full["down"], given, ends, out)
    layer.finalize(torch.zeros_like(hidden), out)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
