"""A stand-in for ``moonep`` with the API of generation B: E/R slots a rank, weights pushed by their owners."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moonep_validate.reference.transport import PROJECTIONS, MoonEPCommPlan, Transport

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
    ) -> Any:
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
        every = zip([*local, *local_scales], [*pools, *pool_scales], strict=True)
        pairs = [(a, b) for a, b in every if a is not None and b is not None]

        def work() -> tuple[()]:
            self._push(plan, pairs)
            # Owners write into the slots of their peers: a rank may compute when every owner has.
            self.group.fence("prefetch exit", self._all_rows)
            return ()

        _, event = self._lane.run(work, [tensor for pair in pairs for tensor in pair], async_finish)
        return event if async_finish else None

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
    ) -> Any:
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
        return self._reduce_all(plan, pairs, async_finish)

    def _pool_refusal(self, local: list[Tensor], pools: list[Tensor]) -> str | None:
        for name, mine, pool in zip(PROJECTIONS, local, pools, strict=True):
            shape = (self.layout.R, *mine.shape)
            if tuple(pool.shape) != shape or pool.dtype != mine.dtype:
                return (
                    f"{name}_prefetch_buffer is {pool.dtype} {tuple(pool.shape)}, {mine.dtype} {shape} is needed"
                )
        return None
