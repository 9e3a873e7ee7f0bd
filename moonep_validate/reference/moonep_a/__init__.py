"""A stand-in for ``moonep`` with the API of generation A: slots after all experts, weights pulled.

``prefetch_weight`` is one-sided and local: rows ``[0, E)`` of a weight tensor must be readable here, as mapped
memory or as a replica. An expert without slot keeps its group below E and is read through its row.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moonep_validate.reference.moves import moves_of
from moonep_validate.reference.transport import MoonEPCommPlan, Transport

__all__ = ["Buffer", "MoonEPCommPlan"]

#: Read by the suite: what this module is, and that it promises upstream's exact plan and rounding.
__moonep_origin__ = "reference"
__moonep_policy__ = "upstream"


class Buffer(Transport):
    """See ``Transport``; ``B`` is the number of slots per rank, E/R by default."""

    def __init__(
        self,
        S: int,
        H: int,
        K: int,
        E: int,
        num_ep_ranks: int,
        num_sms: int | None = None,
        token_padding: int = 128,
        B: int | None = None,
        group: Any = None,
        comm_stream_priority: int = -1,
        enable_pdl: bool = True,
        explicitly_destroy: bool = False,
    ) -> None:
        sizes = {"E": E, "K": K, "S": S, "pad": token_padding, "slots": B}
        options = {"num_sms": num_sms, "comm_stream_priority": comm_stream_priority, "enable_pdl": enable_pdl}
        super().__init__("A", sizes, H, num_ep_ranks, options, group, explicitly_destroy)

    def prefetch_weight(
        self,
        plan: MoonEPCommPlan,
        async_finish: bool = False,
        *,
        full_gate_weight: Tensor,
        full_up_weight: Tensor,
        full_down_weight: Tensor,
        full_gate_scale: Tensor | None = None,
        full_up_scale: Tensor | None = None,
        full_down_scale: Tensor | None = None,
    ) -> Any:
        """Copy the rows of the experts in my slots into rows ``[E, E+B)`` (W1, W2).

        Args:
            plan: of the dispatch that the experts will compute.
            full_gate_weight, full_up_weight, full_down_weight: ``[E+B, X, Y]``.
            full_gate_scale, full_up_scale, full_down_scale: ``[E+B, ...]``, with uint8 weights only.
            async_finish: return an event.

        Raises:
            AssertionError: on this rank, if its tensors are refused; the call is not collective.
        """
        weights = [full_gate_weight, full_up_weight, full_down_weight]
        scales = [full_gate_scale, full_up_scale, full_down_scale]
        refusal = self._weights_refusal(weights, scales) or self._rows_refusal(weights)
        if refusal:
            raise AssertionError(refusal)
        slots, experts = moves_of(plan, self.rank, self.device).pulls
        tensors = [tensor for tensor in [*weights, *scales] if tensor is not None]

        def work() -> tuple[()]:
            with self.leases.writing("slots", [self.rank]):
                # Each rank pulls into its own slots, and nobody changes the experts' rows: no fence is needed.
                for tensor in tensors:
                    tensor[self.layout.E :][slots] = tensor[experts]
            return ()

        _, event = self._lane.run(work, tensors, async_finish)
        return event if async_finish else None

    def reduce_grad(
        self,
        plan: MoonEPCommPlan,
        full_gate_grad: Tensor,
        full_up_grad: Tensor,
        full_down_grad: Tensor,
        gate_reduce_buffer: Tensor,
        up_reduce_buffer: Tensor,
        down_reduce_buffer: Tensor,
        async_finish: bool = False,
    ) -> Any:
        """Add the slots' gradients to the owners' rows of the full gradients, and zero the slots (R1, R2).

        Args:
            plan: of the forward pass.
            full_gate_grad, full_up_grad, full_down_grad: ``[E+B, X, Y]`` float32; only owned rows change.
            gate_reduce_buffer, up_reduce_buffer, down_reduce_buffer: ``[R, B, X, Y]`` float32.
            async_finish: return an event.

        Raises:
            AssertionError: on every rank, if the Buffer has been destroyed or has fewer than E/R slots.
        """
        few = self.layout.num_slots < self.layout.experts_per_rank
        self._agree("reduce", self._alive() or ("training needs B = E/R slots" if few else None))
        first = self.rank * self.layout.experts_per_rank
        own = slice(first, first + self.layout.experts_per_rank)
        pairs = {
            "gate": (full_gate_grad, gate_reduce_buffer),
            "up": (full_up_grad, up_reduce_buffer),
            "down": (full_down_grad, down_reduce_buffer),
        }
        return self._reduce_all(plan, {n: (grad[own], b) for n, (grad, b) in pairs.items()}, async_finish)

    def _rows_refusal(self, weights: list[Tensor]) -> str | None:
        rows = self.layout.E + self.layout.num_slots
        bad = [len(weight) for weight in weights if len(weight) != rows]
        return f"a weight tensor has {bad[0]} rows, E+B = {rows} are needed" if bad else None
