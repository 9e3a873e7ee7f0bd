"""How is a layer composed from a Buffer and an experts function? dispatch, prefetch, experts, combine.

The recorder sits outside the seams, so that it sees what a fault does; what goes in is noted before the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moonep_validate import __version__
from moonep_validate.case import Case
from moonep_validate.problem import PROJECTIONS, Batch, expert_weights
from moonep_validate.reference.buffer_b import Buffer
from moonep_validate.reference.experts import grouped_experts
from moonep_validate.rig import Rig
from moonep_validate.trace import Part
from moonep_validate.verdict import STAGES

_REFERENCE = Part("reference", "moonep_validate.reference", __version__, policy="upstream")
PARTS = dict.fromkeys(STAGES, _REFERENCE)
_PLAN_FIELDS = ("dst", "experts_to_copy", "zero_fill_ranges", "remote_stats")


def supports(case: Case) -> str | None:
    """Why the reference cannot run a case, or None."""
    if case.generation != "B":
        return "the reference transport offers generation B only; `moonep-validate plan` shows generation A plans"
    return None


class ReferenceSession:
    """One rank of the reference: a Buffer, slot pools, and the weights of the layers that were used."""

    def __init__(self, rig: Rig) -> None:
        case = rig.case
        self.rig, self.case, self.rank = rig, case, rig.comm.rank
        self.buffer = Buffer(case.S, case.H, case.K, case.E, case.R, token_padding=case.pad, group=rig.comm)
        self.dispatch = rig.seams.around("buffer.dispatch", self.buffer.dispatch)
        self.prefetch_weight = rig.seams.around("buffer.prefetch_weight", self.buffer.prefetch_weight)
        self.combine = rig.seams.around("buffer.combine", self.buffer.combine)
        shapes = {"gate": (case.I, case.H), "up": (case.I, case.H), "down": (case.H, case.I)}
        self.pools = {
            name: rig.comm.symmetric(name, (case.experts_per_rank, *shape), torch.bfloat16)
            for name, shape in shapes.items()
        }
        self._weights: dict[int, dict[str, Tensor]] = {}

    def weights(self, layer: int) -> dict[str, Tensor]:
        """This rank's expert weights of a layer, recorded when first used."""
        if layer not in self._weights:
            with self.rig.recorder.call(f"load {layer}", "load") as call:
                self._weights[layer] = expert_weights(self.case, self.rank, layer)
                call.put(**{f"local_{name}": tensor for name, tensor in self._weights[layer].items()})
        return self._weights[layer]

    def forward(self, step: str, batch: Batch, layer: int = 0) -> Tensor:
        """See ``Session.forward``."""
        weights = self.weights(layer)
        for pool in self.pools.values():
            self.rig.poison(pool[self.rank])
        with self.rig.recorder.call(step, "layer") as call:
            call.put(hidden=batch.hidden, topk_ids=batch.topk_ids, topk_weights=batch.topk_weights)
            rows, row_weights, cu_seqlens, plan = self._dispatch(step, batch)
            self.rig.poison(rows[int(cu_seqlens[-1]) :])
            self._prefetch(step, plan, weights)
            used = [torch.cat([weights[name], self.pools[name][self.rank]]) for name in PROJECTIONS]
            out = self._experts(step, rows, row_weights, cu_seqlens, used)
            self._poison_undefined(out, cu_seqlens, plan)
            result = self._combine(step, plan, out, row_weights)
            call.put(out=result)
        return result

    def close(self) -> None:
        """See ``Session.close``."""
        self.buffer.destroy()

    def _dispatch(self, step: str, batch: Batch) -> tuple[Any, ...]:
        with self.rig.recorder.call(step, "dispatch") as call:
            call.put(hidden=batch.hidden, topk_ids=batch.topk_ids, topk_weights=batch.topk_weights)
            counts = batch.topk_ids.flatten().bincount(minlength=self.case.E).int()
            out = self.dispatch(batch.hidden, batch.topk_weights, batch.topk_ids, counts)
            rows, row_weights, cu_seqlens, plan = out
            call.put(rows=rows, row_weights=row_weights, cu_seqlens=cu_seqlens)
            call.put(**{name: getattr(plan, name) for name in _PLAN_FIELDS})
        return rows, row_weights, cu_seqlens, plan

    def _prefetch(self, step: str, plan: Any, weights: dict[str, Tensor]) -> None:
        with self.rig.recorder.call(step, "prefetch") as call:
            call.put(experts_to_copy=plan.experts_to_copy)
            call.put(**{f"local_{name}": weights[name] for name in PROJECTIONS})
            local = {f"local_{name}_weight": weights[name] for name in PROJECTIONS}
            pools = {f"{name}_prefetch_buffer": self.pools[name] for name in PROJECTIONS}
            self.prefetch_weight(plan, **local, **pools)
            call.put(**{f"slot_{name}": self.pools[name][self.rank] for name in PROJECTIONS})

    def _experts(
        self, step: str, rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: list[Tensor]
    ) -> Tensor:
        with self.rig.recorder.call(step, "experts") as call:
            call.put(rows=rows, row_weights=row_weights, cu_seqlens=cu_seqlens)
            call.put(**{f"weight_{name}": weight for name, weight in zip(PROJECTIONS, weights, strict=True)})
            out = grouped_experts(rows, row_weights, cu_seqlens, weights)
            call.put(out=out)
        return out

    def _combine(self, step: str, plan: Any, rows: Tensor, row_weights: Tensor) -> Tensor:
        with self.rig.recorder.call(step, "combine") as call:
            call.put(rows=rows, row_weights=row_weights)
            hidden, topk_weights, _ = self.combine(plan, rows, row_weights)
            call.put(hidden=hidden, topk_weights=topk_weights)
        result: Tensor = hidden
        return result

    def _poison_undefined(self, out: Tensor, cu_seqlens: Tensor, plan: Any) -> None:
        """Pads and tail of the expert output: combine must not read them."""
        self.rig.poison(out[int(cu_seqlens[-1]) :])
        for first, count in plan.zero_fill_ranges.tolist():
            self.rig.poison(out[first : first + count])
