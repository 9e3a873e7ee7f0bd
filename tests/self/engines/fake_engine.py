"""An honest small engine over MoonEP: the example of an ``Integration``, judged as ``--subject fake_engine:Good``.

As vLLM and SGLang on MoonEP's generation A: a layer loads its own experts and gathers all into ``[E + B]``; a pass pads
its tokens to a capacity that all ranks agree on, runs dispatch, prefetch, experts and combine, and cuts the pads off.
All layers share the Buffers, one per capacity. ``Layer`` is a ``MoELayer``, ``Good`` an ``Integration``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad, silu

from moonep_validate.cases.case import Case
from moonep_validate.subjects.engines.integration import Checkpoint, Probe, Started

__version__ = "1.0"


class Layer:
    def __init__(self, engine: Good, case: Case, checkpoint: Checkpoint) -> None:
        self.engine, self.case, self.rank = engine, case, dist.get_rank()
        rows = case.E + (case.slots or case.experts_per_rank)
        shapes = {"gate": (case.I, case.H), "up": (case.I, case.H), "down": (case.H, case.I)}
        self.full = {name: torch.empty(rows, *shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        self.reload(checkpoint)

    def reload(self, checkpoint: Checkpoint) -> None:
        for name, own in self.load(checkpoint).items():
            self.gather(self.full[name][: self.case.E], own)

    def load(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """This rank's experts: ``[E/R, ...]`` for each projection."""
        count = self.case.experts_per_rank
        own = {name: torch.empty_like(tensor[:count]) for name, tensor in self.full.items()}
        for expert, name, tensor in checkpoint():
            if expert // count == self.rank:
                own[name][expert % count] = tensor
        return own

    def gather(self, full: Tensor, own: Tensor) -> None:
        """Bring the experts of every rank, in rank order, into ``[E, ...]``."""
        dist.all_gather(list(full.chunk(self.case.R)), own)

    def forward(self, hidden: Tensor, topk_weights: Tensor, topk_ids: Tensor, token_counts: list[int]) -> Tensor:
        capacity = self.capacity(token_counts)
        tokens, weights, ids = self.pad(hidden, topk_weights, topk_ids, capacity)
        buffer = self.engine.buffer(self.case, capacity)
        rows, row_weights, ends, plan = buffer.dispatch(tokens, weights, ids, self.count(ids))
        self.prefetch(buffer, plan)
        out = self.experts(rows, row_weights, ends, plan)
        return self.cut(buffer.combine(plan, out)[0], len(hidden))

    def capacity(self, token_counts: list[int]) -> int:
        """Tokens that every rank dispatches: a power of two, chosen from what all ranks know."""
        if (most := max(token_counts)) > self.case.S:
            raise ValueError(f"{most} tokens on a rank, the engine was configured for {self.case.S}")
        return min(self.case.S, max(4, 1 << (most - 1).bit_length()))

    def pad(self, hidden: Tensor, weights: Tensor, ids: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, then rows of zero; an invalid id becomes expert 0 with weight 0."""
        if hidden.dtype != torch.bfloat16:
            raise TypeError(f"hidden states of {hidden.dtype}, bfloat16 is needed")
        valid = (ids >= 0) & (ids < self.case.E)
        given = hidden, torch.where(valid, weights, 0), torch.where(valid, ids, 0)
        hidden, weights, ids = (pad(part, (0, 0, 0, capacity - len(part))) for part in given)
        return hidden, weights, ids

    def count(self, ids: Tensor) -> Tensor:
        return ids.flatten().bincount(minlength=self.case.E).int()

    def prefetch(self, buffer: Any, plan: Any) -> None:
        buffer.prefetch_weight(plan, **{f"full_{name}_weight": full for name, full in self.full.items()})

    def experts(self, rows: Tensor, row_weights: Tensor, ends: Tensor, plan: Any) -> Tensor:
        """Each group's expert on its rows, times the route weight."""
        out, begin = torch.empty_like(rows), 0
        for group, end in enumerate(ends.tolist()):
            if end > begin:
                gate, up, down = (full[self.row(group, plan)] for full in self.full.values())
                x = rows[begin:end]
                y = (silu(x @ gate.T) * (x @ up.T)) @ down.T
                out[begin:end] = self.weighted(y, row_weights[begin:end, None])
            begin = end
        return out

    def row(self, group: int, plan: Any) -> int:
        """Which row of the weights a group is computed with; the last ones are the slots."""
        return group

    def weighted(self, y: Tensor, weight: Tensor) -> Tensor:
        return y * weight

    def cut(self, combined: Tensor, tokens: int) -> Tensor:
        return combined[:tokens]


class Good:
    name, rounds = "fake_engine", ("silu",)  # bf16 throughout: what silu returns is rounded before its product
    layer: type[Layer] = Layer

    def __init__(self) -> None:
        self.buffers: dict[int, Any] = {}

    def supports(self, case: Case) -> str | None:
        if case.generation != "A":
            return f"gen{case.generation}: this engine calls MoonEP's generation A; use genA"
        return None if case.portable else "not portable to hardware; use H and I that are multiples of 128"

    def environment(self, device: str) -> dict[str, str]:
        return {}

    def start(self, rank: int, size: int, device: str) -> Started:
        return Started(sys.modules[__name__], expects={"prefetch_weight": ("full_gate_weight",)})

    def open(self, case: Case) -> None:
        pass

    def make_layer(self, case: Case, name: str, checkpoint: Checkpoint) -> Layer:
        return self.layer(self, case, checkpoint)

    def buffer(self, case: Case, capacity: int) -> Any:
        """The Buffer of a capacity, built when first used; collective."""
        if capacity not in self.buffers:
            slots = case.slots or case.experts_per_rank
            sizes = {"S": capacity, "H": case.H, "K": case.K, "E": case.E, "num_ep_ranks": case.R, "B": slots}
            self.buffers[capacity] = import_module("moonep").Buffer(**sizes, token_padding=case.pad)
        return self.buffers[capacity]

    def probes(self, case: Case) -> list[Probe]:
        layer = self.layer(self, case, lambda: iter(()))  # without weights: only whether it answers counts

        def run(tokens: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            ids = torch.zeros(tokens, case.K, dtype=torch.int32)
            return layer.forward(torch.ones(tokens, case.H, dtype=dtype), ids.float(), ids, [tokens] * case.R)

        return [
            Probe(f"{case.S + 1} tokens, configured for {case.S}", True, lambda: run(case.S + 1)),
            Probe("hidden states of float32", True, lambda: run(1, torch.float32)),
            Probe("no token on any rank", False, lambda: run(0)),
        ]

    def close(self) -> None:
        for capacity in sorted(self.buffers):  # collective: the same order on every rank
            self.buffers.pop(capacity).destroy()
