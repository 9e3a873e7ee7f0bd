"""A stand-in for ``moonep`` with the API of generation B: E/R slots a rank, weights pushed by their owners."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moonep_validate.reference.transport import PROJECTIONS, Event, MoonEPCommPlan, Transport
from moonep_validate.worlds.comm import all_to_all, barrier

__all__ = ["Buffer", "MoonEPCommPlan"]

#: Read by the suite: what this module is, and that it promises upstream's exact plan and rounding.
__moonep_origin__ = "reference"
__moonep_policy__ = "upstream"


class Buffer(Transport):
    """See ``Transport``."""

    def __init__(
        self,
        S: int,
        H: int,
        K: int,
        E: int,
        num_ep_ranks: int,
        num_sms: int | None = None,
        token_padding: int = 128,
        group: Any = None,
        comm_stream_priority: int = -1,
        enable_pdl: bool = True,
        explicitly_destroy: bool = False,
    ) -> None:
        sizes = {"E": E, "K": K, "S": S, "pad": token_padding}
        options = {"num_sms": num_sms, "comm_stream_priority": comm_stream_priority, "enable_pdl": enable_pdl}
        super().__init__("B", sizes, H, num_ep_ranks, options, group, explicitly_destroy)

    def prefetch_weight(
        self,
        plan: MoonEPCommPlan,
        async_finish: bool = False,
        *,
        local_gate_weight: Tensor,
        local_up_weight: Tensor,
        local_down_weight: Tensor,
        gate_prefetch_buffer: Tensor,
        up_prefetch_buffer: Tensor,
        down_prefetch_buffer: Tensor,
        local_gate_scale: Tensor | None = None,
        local_up_scale: Tensor | None = None,
        local_down_scale: Tensor | None = None,
        gate_scale_prefetch_buffer: Tensor | None = None,
        up_scale_prefetch_buffer: Tensor | None = None,
        down_scale_prefetch_buffer: Tensor | None = None,
    ) -> Event | None:
        """Push the weights of my copied experts into the peers' slots (W1 to W5); collective.

        Args:
            plan: of the dispatch that the experts will compute.
            local_gate_weight, local_up_weight, local_down_weight: ``[E/R, X, Y]``.
            gate_prefetch_buffer, up_prefetch_buffer, down_prefetch_buffer: ``[R, E/R, X, Y]``; only row ``rank``
                of a rank's own view is written.
            local_gate_scale, ..., down_scale_prefetch_buffer: the same for scales, with uint8 weights only.
            async_finish: return an event.

        Raises:
            AssertionError: on every rank, if the tensors of any rank are refused.
        """
        local = [local_gate_weight, local_up_weight, local_down_weight]
        pools = [gate_prefetch_buffer, up_prefetch_buffer, down_prefetch_buffer]
        local_scales = [local_gate_scale, local_up_scale, local_down_scale]
        pool_scales = [gate_scale_prefetch_buffer, up_scale_prefetch_buffer, down_scale_prefetch_buffer]
        refusal = self._weights_refusal(local, [*local_scales, *pool_scales]) or self._pool_refusal(local, pools)
        self._agree("prefetch", refusal)
        pairs = zip([*local, *local_scales], [*pools, *pool_scales], strict=True)
        self._push(plan.experts_to_copy, [(a, b) for a, b in pairs if a is not None and b is not None])
        barrier(self.group, "prefetch exit")
        return Event() if async_finish else None

    def reduce_grad(
        self,
        plan: MoonEPCommPlan,
        async_finish: bool = False,
        *,
        local_gate_grad: Tensor,
        local_up_grad: Tensor,
        local_down_grad: Tensor,
        gate_reduce_buffer: Tensor,
        up_reduce_buffer: Tensor,
        down_reduce_buffer: Tensor,
    ) -> Event | None:
        """Add the slots' gradients to the owners' gradients, and zero the slots (R1, R2).

        Args:
            plan: of the forward pass.
            local_gate_grad, local_up_grad, local_down_grad: ``[E/R, X, Y]`` float32.
            gate_reduce_buffer, up_reduce_buffer, down_reduce_buffer: ``[R, E/R, X, Y]`` float32.
            async_finish: return an event.

        Raises:
            AssertionError: on every rank, if the Buffer has been destroyed.
        """
        self._agree("reduce", self._alive())
        pairs = {
            "gate": (local_gate_grad, gate_reduce_buffer),
            "up": (local_up_grad, up_reduce_buffer),
            "down": (local_down_grad, down_reduce_buffer),
        }
        for name, (grad, buffer) in pairs.items():
            self._reduce(name, plan.experts_to_copy, grad, buffer)
        self._clear(plan.experts_to_copy, [buffer for _, buffer in pairs.values()])
        return Event() if async_finish else None

    def _pool_refusal(self, local: list[Tensor], pools: list[Tensor]) -> str | None:
        for name, mine, pool in zip(PROJECTIONS, local, pools, strict=True):
            shape = (self.layout.R, *mine.shape)
            if tuple(pool.shape) != shape or pool.dtype != mine.dtype:
                return (
                    f"{name}_prefetch_buffer is {pool.dtype} {tuple(pool.shape)}, {mine.dtype} {shape} is needed"
                )
        return None

    def _push(self, copies: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Send rows of the local tensors to the ranks that copy them, into their own pools."""
        per_rank = self.layout.experts_per_rank
        owner = torch.where(copies >= 0, copies // per_rank, -1)
        rows = [copies[d][owner[d] == self.rank].long() - self.rank * per_rank for d in range(self.layout.R)]
        sent = [[local[row] for local, _ in pairs] if len(row) else [] for row in rows]
        for source, received in enumerate(all_to_all(self.group, "prefetch", sent)):
            slots = torch.nonzero(owner[self.rank] == source)[:, 0]
            for (_, pool), tensor in zip(pairs, received, strict=False):
                pool[self.rank, slots] = tensor
