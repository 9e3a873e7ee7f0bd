"""How is a pass captured in a CUDA graph, and launched with other tokens? Dispatch by a plan to combine, in one.

The plan is fixed when the graph is captured, since our planning is on the host. What a launch reads and writes is
recorded after it as the calls of a step, so that the checks of every stage judge it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moonep_validate.data.problem import Batch
from moonep_validate.sessions.protocols import Dispatched, MoonEPBuffer
from moonep_validate.subjects.buffer.plan import plan_tensors

if TYPE_CHECKING:
    from moonep_validate.subjects.buffer.composed import ComposedSession

#: Passes before the capture, which let libraries allocate what they keep.
_WARM_UP = 2


class Captured:
    """One captured pass of one rank; constructing it is collective.

    Args:
        session: whose Buffer, weights and experts.
        sent: an earlier dispatch, whose plan the graph replays.
    """

    def __init__(self, session: ComposedSession, sent: Dispatched) -> None:
        self.session, self.sent = session, sent
        case, device = session.case, session.rig.comm.device
        self.hidden = torch.zeros((case.S, case.H), dtype=torch.bfloat16, device=device)
        self.route_weights = torch.zeros((case.S, case.K), dtype=torch.float32, device=device)
        self.ends = sent.cu_seqlens.cpu()
        with torch.cuda.stream(stream := torch.cuda.Stream()):
            stream.wait_stream(torch.cuda.default_stream())
            for _ in range(_WARM_UP):
                self.results = self._pass()
        torch.cuda.synchronize()  # fences of a pass wait for peers: none may be open when the capture begins
        session.rig.comm.exchange("before capture", None)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.results = self._pass()

    def _pass(self) -> dict[str, Tensor]:
        call, plan, weights = self.session._call, self.sent.plan, self.session.weights
        rows, row_weights, _, _ = call["dispatch"](self.hidden, self.route_weights, plan=plan)
        call["prefetch_weight"](plan, **weights.prefetch_arguments())
        groups = [weights.groups(name) for name in weights.names]
        out = self.session._experts(rows, row_weights, self.ends, groups)
        hidden, topk_weights, _ = call["combine"](plan, out, row_weights)
        return {
            "rows": rows,
            "row_weights": row_weights,
            "out": out,
            "hidden": hidden,
            "topk_weights": topk_weights,
        }

    def launch(self, step: str, batch: Batch) -> None:
        """Launch the graph with a batch, and record it as dispatch and combine of a step.

        Args:
            step: name of the step.
            batch: tokens whose routing is that of the plan.
        """
        rig, results = self.session.rig, self.results
        batch = rig.here(batch)
        given = {"replay": True, "same_plan": True, "no_cu_seqlens": True, "slots": self.session.layout.num_slots}
        with rig.recorder.call(step, "dispatch", graph=True, **given) as call:
            self.hidden.copy_(batch.hidden)
            self.route_weights.copy_(batch.topk_weights)
            self.graph.replay()
            call.put(hidden=self.hidden, topk_weights=self.route_weights, topk_ids=rig.here(rig.batch()).topk_ids)
            call.put(rows=results["rows"], row_weights=results["row_weights"], cu_seqlens=self.sent.cu_seqlens)
            call.put(**plan_tensors(self.sent.plan))
            call.unchanged(hidden=batch.hidden, topk_weights=batch.topk_weights)
        with rig.recorder.call(step, "combine", graph=True, repeat=0) as call:
            call.put(rows=results["out"], row_weights=results["row_weights"])
            call.put(hidden=results["hidden"], topk_weights=results["topk_weights"])
            call.unchanged(rows=results["out"])


def in_capture(batch: Batch) -> Callable[[MoonEPBuffer], object]:
    """A call of dispatch that plans while a graph is captured."""

    def call(buffer: MoonEPBuffer) -> object:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            return buffer.dispatch(batch.hidden, batch.topk_weights, batch.topk_ids)

    return call
