"""How is the whole layer of the model ``k3`` composed? The stages of a Buffer, and what stands around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from moonep_validate.data.k3 import ModelWeights, model_hidden, model_weights
from moonep_validate.data.problem import Batch
from moonep_validate.reference import k3 as model
from moonep_validate.sessions.rig import Rig
from moonep_validate.subjects.buffer.composed import ComposedSession


class RoutedSession(ComposedSession):
    """One rank: router, latent projection, the MoonEP path, norm, up-projection and shared expert.

    The call ``layer`` of a step is the MoonEP path, from the latent tokens to the summed routed rows.

    Args:
        rig, buffer, group: see ``ComposedSession``.
    """

    def __init__(self, rig: Rig, buffer: Callable[..., Any], group: Any) -> None:
        super().__init__(rig, buffer, group)
        functions: dict[str, Callable[..., Any]] = {
            "router": model.route,
            "latent": model.project,
            "norm": model.rms_norm,
            "shared": model.shared_expert,
            "output": model.output,
        }
        self._part = {name: rig.seams.around(f"model.{name}", function) for name, function in functions.items()}

    def forward(self, step: str, batch: Batch, layer: int = 0, mark: bool = False, **flags: bool) -> Tensor:
        """One pass through the whole layer.

        Args:
            step, layer, mark, flags: see ``ComposedSession.forward``.
            batch: which routing this rank's tokens shall get; its route weights are not used.

        Returns:
            ``[S, M]`` bf16, M the model width.
        """
        device = self.rig.comm.device
        weights = model_weights(self.case, layer).to(device)
        hidden = model_hidden(self.case, self.rank, batch, layer).to(device)
        ids, route_weights = self.route(step, hidden, weights)
        latent = self.project(step, hidden, weights)
        sent = Batch(latent, ids, route_weights, batch.tokens)
        summed = super().forward(step, sent, layer, mark, **flags)
        normed = self.norm(step, summed, weights)
        return self.output(step, normed, self.shared(step, hidden, weights), weights)

    def route(self, step: str, hidden: Tensor, weights: ModelWeights) -> tuple[Tensor, Tensor]:
        """Expert ids int32 and route weights float32, both ``[S, K]``."""
        with self.rig.recorder.call(step, "router") as call:
            call.put_as_is(hidden=hidden, gate=weights.gate, bias=weights.bias)
            ids, route_weights = self._part["router"](hidden, weights.gate, weights.bias, self.case.K)
            call.put(ids=ids, weights=route_weights)
        return ids, route_weights

    def project(self, step: str, hidden: Tensor, weights: ModelWeights) -> Tensor:
        """Latent tokens ``[S, H]`` bf16."""
        with self.rig.recorder.call(step, "latent") as call:
            call.put_as_is(hidden=hidden, weight=weights.latent)
            latent: Tensor = self._part["latent"](hidden, weights.latent)
            call.put(out=latent)
        return latent

    def norm(self, step: str, summed: Tensor, weights: ModelWeights) -> Tensor:
        """The normed sum of the routed rows, ``[S, H]`` bf16."""
        with self.rig.recorder.call(step, "norm") as call:
            call.put(routed=summed, weight=weights.norm)
            normed: Tensor = self._part["norm"](summed, weights.norm)
            call.put(out=normed)
        return normed

    def shared(self, step: str, hidden: Tensor, weights: ModelWeights) -> Tensor:
        """The shared expert's ``[S, M]`` bf16."""
        with self.rig.recorder.call(step, "shared") as call:
            call.put_as_is(hidden=hidden)
            call.put_as_is(**dict(zip(("gate", "up", "down"), weights.shared, strict=True)))
            shared: Tensor = self._part["shared"](hidden, weights.shared)
            call.put(out=shared)
        return shared

    def output(self, step: str, normed: Tensor, shared: Tensor, weights: ModelWeights) -> Tensor:
        """The layer's output ``[S, M]`` bf16."""
        with self.rig.recorder.call(step, "output") as call:
            call.put(normed=normed, shared=shared)
            call.put_as_is(weight=weights.up)
            up, out = self._part["output"](normed, weights.up, shared)
            call.put(up=up, out=out)
        result: Tensor = out
        return result
