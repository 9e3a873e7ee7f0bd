"""How is a serving engine's MoE layer judged? A session that loads and runs it, with taps on its Buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.data.problem import PROJECTIONS, Batch
from moonep_validate.sessions.rig import Rig
from moonep_validate.subjects.engines import tap as taps
from moonep_validate.subjects.engines.integration import Integration, MoELayer
from moonep_validate.trace.trace import Call
from moonep_validate.worlds.comm import CollectiveError


def checkpoint(
    weights_of: Callable[[int, int], dict[str, Tensor]], case: Case, layer: int
) -> Iterator[tuple[int, str, Tensor]]:
    """All experts of a layer as a checkpoint holds them: (expert, projection, tensor).

    Args:
        weights_of: (rank, layer) -> the weights of its experts.
        case: the geometry.
        layer: which.
    """
    for rank in range(case.R):
        weights = weights_of(rank, layer)
        for local in range(case.experts_per_rank):
            for name in PROJECTIONS:
                yield rank * case.experts_per_rank + local, name, weights[name][local]


#: What refuses nothing: something is missing, or its name is wrong.
_ACCIDENTS = (AttributeError, ImportError, NameError)


class LayerSession:
    """One rank: an engine configured for a case, and its layers.

    Args:
        rig: what the scenario holds.
        integration: the engine, started.
        device: where its tensors live.
    """

    def __init__(self, rig: Rig, integration: Integration, device: str) -> None:
        self.rig, self.case, self.integration, self.device = rig, rig.case, integration, device
        self.tap = taps.Tap(rig)
        taps.watch(self.tap)
        self.tap.begin("open")
        self._layers: dict[int, MoELayer] = {}
        self._read = rig.seams.around("engine.load", partial(checkpoint, rig.expert_weights))
        self._forward = rig.seams.around("engine.layer", _forward)
        integration.open(rig.case)

    def layer(self, index: int) -> MoELayer:
        """A layer, built and loaded when first used; collective."""
        if index not in self._layers:
            with self._load(index):
                name = f"moonep_validate.{index}"
                self._layers[index] = self.integration.make_layer(self.case, name, self._checkpoint(index))
        return self._layers[index]

    def _checkpoint(self, index: int) -> Callable[[], Iterator[tuple[int, str, Tensor]]]:
        return lambda: self._read(self.case, index)

    @contextmanager
    def _load(self, index: int) -> Iterator[Call]:
        """The recorded call of a load; its tensors are the bytes of the checkpoint, of this rank's experts.

        What is not loaded must show: memory of an earlier case may hold the very bytes that are missing.
        """
        weights = self.rig.expert_weights(self.rig.comm.rank, index)
        with self.rig.recorder.call(f"load {index}", "load", layer=index) as call:
            call.put(**{f"local_{name}": weights[name] for name in PROJECTIONS})
            with uninitialised_memory_is_poison():
                yield call

    def forward(
        self,
        step: str,
        batch: Batch,
        layer: int = 0,
        mark: bool = False,
        weights: int | None = None,
        **flags: bool,
    ) -> Tensor:
        """One pass of this rank's real tokens; the engine pads them as it likes.

        Args:
            step: name of the step.
            batch: this rank's tokens.
            layer: which layer.
            mark: change the sign of the slots' down projection after prefetch.
            weights: whose weights the layer holds, its own unless it was reloaded.
            flags: none is known here.

        Returns:
            ``[S, H]`` on the CPU; NaN after the real tokens.
        """
        living, tokens = self.layer(layer), batch.tokens
        counts = self.rig.comm.exchange("tokens", tokens)
        self.tap.begin(step, batch, mark)
        held = layer if weights is None else weights
        with self.rig.recorder.call(step, "layer", layer=held, marked=mark, tokens=tokens) as call:
            call.put(hidden=batch.hidden, topk_ids=batch.topk_ids, topk_weights=batch.topk_weights)
            out = self._run(living, batch, counts)
            call.info["dispatches"] = self.tap.dispatches
            if out.shape != (tokens, self.case.H):
                raise TypeError(
                    f"the layer returned shape {tuple(out.shape)} for {tokens} tokens of {self.case.H}"
                )
            whole = torch.full((self.case.S, self.case.H), float("nan"), dtype=out.dtype)
            whole[:tokens] = out
            call.put_as_is(out=whole)
        return whole

    def _run(self, layer: MoELayer, batch: Batch, counts: list[int]) -> Tensor:
        hidden, weights, ids = (
            t[: batch.tokens].to(self.device) for t in (batch.hidden, batch.topk_weights, batch.topk_ids)
        )
        with uninitialised_memory_is_poison():
            out: Tensor = self._forward(layer, hidden, weights, ids, counts)
        return out.detach().to("cpu", copy=True)

    def unrecorded(self, batch: Batch, times: int) -> None:
        """See ``LayerDoor.unrecorded``; layer 0 must have run, since a Buffer that is built now is in no step."""
        living, counts = self.layer(0), self.rig.comm.exchange("tokens", batch.tokens)
        taps.watch(None)
        with self.rig.recorder.call("unrecorded", "passes"):
            for _ in range(times):
                hidden, weights, ids = (
                    t[: batch.tokens].to(self.device) for t in (batch.hidden, batch.topk_weights, batch.topk_ids)
                )
                self._forward(living, hidden, weights, ids, counts)
        taps.watch(self.tap)

    def abort(self, step: str, batch: Batch) -> None:
        """A step in which combine raises on every rank, as a failed kernel would."""
        living = self.layer(0)
        counts = self.rig.comm.exchange("tokens", batch.tokens)
        self.tap.begin(step, batch, fail=True)
        with self.rig.recorder.call(step, "refusal", what="an exception inside the layer, passed on") as call:
            try:
                self._run(living, batch, counts)
            except taps.Injected as error:
                call.info.update(raised=type(error).__name__, message=str(error))

    def reload(self, index: int) -> bool:
        """Load another layer's weights into layer 0, as a weight update does; whether the engine did it.

        A refusal is an answer too: the step is recorded, and the layer keeps what it had.
        """
        with self._load(index) as call:
            try:
                self.layer(0).reload(self._checkpoint(index))
            except (CollectiveError, *_ACCIDENTS):
                raise
            except Exception as error:
                call.info.update(refused=type(error).__name__, message=str(error)[:300])
        return "refused" not in call.info

    def probe(self) -> None:
        """Ask the engine everything that it must answer in a known way; every rank asks the same."""
        taps.watch(None)  # what a configuration probe builds is no step of this case
        for probe in self.integration.probes(self.case):
            wanted = "refused" if probe.refused else "accepted"
            with self.rig.recorder.call(probe.what, "refusal", what=probe.what, wanted=wanted) as call:
                try:
                    probe.call()
                except CollectiveError:
                    raise
                except Exception as error:
                    call.info.update(raised=type(error).__name__, message=str(error)[:300])
            self.rig.comm.exchange("probe", None)  # a rank that answers otherwise must not run ahead
        taps.watch(self.tap)

    def close(self) -> None:
        """End the engine's part of the case, and note what it left."""
        self._layers.clear()
        self.integration.close()
        taps.watch(None)
        with self.rig.recorder.call("closed", "buffers", living=taps.living()):
            taps.forget()  # the next case is not to blame


def _forward(layer: MoELayer, hidden: Tensor, weights: Tensor, ids: Tensor, counts: list[int]) -> Tensor:
    """What the seam of a whole layer is around."""
    return layer.forward(hidden, weights, ids, counts)


@contextmanager
def uninitialised_memory_is_poison() -> Iterator[None]:
    """While it is open, ``torch.empty`` holds NaN or the largest integer, as torch's deterministic mode offers."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
