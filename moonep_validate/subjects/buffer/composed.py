"""How is a layer composed from a Buffer and an experts function? dispatch, prefetch, experts, combine.

The recorder sits outside the seams, so that it sees what a fault does; what goes in is noted before the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moonep_validate.cases.layout import Layout, local_first_rows
from moonep_validate.data.problem import (
    PROJECTIONS,
    Batch,
    EachExpert,
    compute_rows,
    format_of,
    projection_shapes,
    stored,
)
from moonep_validate.reference.experts import swiglu
from moonep_validate.reference.k3 import situ
from moonep_validate.sessions.protocols import (
    BufferPlan,
    Dispatched,
    GradientSlots,
    GroupedRows,
    MoonEPBuffer,
    WeightSlots,
)
from moonep_validate.sessions.rig import Rig
from moonep_validate.subjects import experts
from moonep_validate.subjects.buffer.api import Gradients, Slots, make_buffer, parameters_of
from moonep_validate.subjects.buffer.captured import Captured, in_capture
from moonep_validate.subjects.buffer.plan import plan_inputs, plan_sizes, plan_tensors
from moonep_validate.subjects.buffer.sample import put_sample
from moonep_validate.trace.trace import Call
from moonep_validate.worlds.comm import CollectiveError

_ACTIVATION_OF: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"moe": swiglu, "k3": situ}


class ComposedSession:
    """One rank: a Buffer, weights with slots, and the experts of the rig, our reference by default.

    Args:
        rig: what the scenario holds.
        buffer: the Buffer class.
        group: what the Buffer takes as its group.
    """

    def __init__(self, rig: Rig, buffer: Callable[..., Any], group: Any) -> None:
        case = rig.case
        self.rig, self.case, self.rank = rig, case, rig.comm.rank
        self.layout, self.format = Layout.of(case), format_of(case)
        construct = rig.seams.around("buffer.construct", make_buffer)
        # Typed as what scripts may call; each build has more (a view, leases), which is asked for with getattr.
        self.buffer: MoonEPBuffer = construct(buffer, case, group)
        self._call = {
            name: rig.seams.around(f"buffer.{name}", getattr(self.buffer, name))
            for name in ("dispatch", "prefetch_weight", "combine", "reduce_grad", "destroy")
            if hasattr(self.buffer, name)
        }
        activation = rig.seams.around("model.activation", _ACTIVATION_OF[case.model.name])
        self._experts = rig.seams.around("experts", experts.prepared(rig.experts, case, activation))
        self._wait = rig.seams.around("event.wait", lambda event: event.wait())
        self._weight_rows = rig.seams.around("weights.rows", lambda rows, what: rows)
        self._stored = rig.seams.around("weights.stored", lambda weights: weights)
        self._expert_weights = rig.seams.around("weights", rig.expert_weights)
        self.shapes = projection_shapes(case)
        self._weights: Slots | None = None
        self.layer: int | None = None
        self._slots_of: dict[str, int] = {}  # step -> turn of the slots that it prefetched

    @property
    def weights(self) -> Slots:
        """The weights in the case's format; allocated when first used, collective."""
        if self._weights is None:
            shapes = self.format.shapes(self.case.H, self.case.I)
            self._weights = self.make_slots(shapes, self.format.dtypes())
        return self._weights

    def make_slots(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        gap: int = 0,
        local_first: bool = False,
    ) -> Slots:
        """Allocate weights with slots; collective. In generation A a rank's own experts may come first (W6)."""
        due = torch.from_numpy(local_first_rows(self.case, self.rank))
        rows = partial(self._weight_rows, due) if local_first else None
        return Slots(self.case, self.rig.comm, shapes, dtypes, gap, rows)

    def make_packed_slots(self, weights: EachExpert, gap: int = 0, local_first: bool = False) -> Slots:
        """Allocate uint8 weights with slots; collective."""
        shapes = {name: shape for name, (shape, _) in weights.items()}
        return self.make_slots(shapes, dict.fromkeys(shapes, torch.uint8), gap, local_first)

    def num_groups(self) -> int:
        """Length of ``cu_seqlens``."""
        return self.layout.num_groups

    def make_gradients(self) -> Gradients:
        """Allocate gradients with slots; collective."""
        return Gradients(self.case, self.rig.comm, self.shapes)

    def load(self, layer: int) -> None:
        """Bring a layer's weights in place, and record what they should be; the slots are shared by all layers.

        Raises:
            FormatError: for a scale byte 0xFF, naming tensor and position.
        """
        weights = self.weights
        if layer == self.layer:
            return
        with self.rig.recorder.call(f"load {layer}", "load", layer=layer) as call:
            ranks = range(self.case.R) if weights.needs_all_experts else [self.rank]
            parts = [self._expert_weights(rank, layer) for rank in ranks]
            whole = {name: torch.cat([part[name] for part in parts]) for name in PROJECTIONS}
            due = stored(self.case, whole)
            own = weights.own if weights.needs_all_experts else slice(None)
            call.put(**{f"local_{name}": due[name][own] for name in weights.names})
            given = self._stored(due)
            self.format.refuse_scales(f"layer {layer}, rank {self.rank}", given)
            weights.load(given)
        self.layer = layer

    def forward(self, step: str, batch: Batch, layer: int = 0, mark: bool = False, **flags: bool) -> Tensor:
        """One pass through the layer.

        Args:
            step: name of the step.
            batch: this rank's tokens.
            layer: whose weights.
            mark: change the sign of the slots' down projection after prefetch, so that it shows which rows were
                computed from a slot.
            flags: ``zero_copy``, ``async_finish``; given to dispatch, prefetch and combine where they take it.

        Returns:
            ``[S, H]``.
        """
        batch = self.rig.here(batch)
        self.load(layer)
        self.poison_slots(step)  # before dispatch: its collective stands between the fill and a peer's push
        with self.rig.recorder.call(step, "layer", layer=layer, marked=mark) as call:
            call.put(hidden=batch.hidden, topk_ids=batch.topk_ids, topk_weights=batch.topk_weights)
            sent = self.dispatch(step, batch, replay=None, route_weights=True, **flags)
            # What a rank finds after its last group is undefined; experts that read on compute with NaN.
            self.rig.poison(sent.rows[sent.end :])
            self.prefetch(step, sent.plan, async_finish=flags.get("async_finish", False))
            if mark:  # not sooner: prefetch would write over it
                self.format.negate(self.weights.slots("down"))
            out = self.experts(step, sent, in_place=flags.get("zero_copy", False))
            result = self.combine(step, sent, out, **flags)
            call.put(out=result)
        return result

    def poison_slots(self, step: str) -> None:
        """Fill this rank's slots; recorded, since peers may push from the next prefetch on (W4)."""
        with self.rig.recorder.call(step, "poison_slots"):
            for name in self.weights.names:
                self.rig.poison(self.weights.slots(name), self.format.piece(name).nan)

    def dispatch(
        self,
        step: str,
        batch: Batch,
        *,
        replay: Dispatched | None = None,
        route_weights: bool = True,
        **flags: bool,
    ) -> Dispatched:
        """Dispatch a batch, or replay an earlier plan with it.

        Args:
            step: name of the step.
            batch: this rank's tokens.
            replay: result of the dispatch whose plan is used again.
            route_weights: whether route weights are sent.
            flags: ``zero_copy``, ``async_finish``.
        """
        batch = self.rig.here(batch)
        given = {"replay": replay is not None, "slots": self.layout.num_slots}
        with self.rig.recorder.call(step, "dispatch", **given, **flags) as call:
            call.put(hidden=batch.hidden, topk_ids=batch.topk_ids)
            call.put(topk_weights=batch.topk_weights if route_weights else None)
            plan = replay.plan if replay else None
            call.put(**{} if plan is None else plan_tensors(plan))  # of a replay, the plan is what it was given
            call.hold(**plan_inputs(plan))
            sent = self._dispatch(call, batch, replay, route_weights, flags)
            call.put(rows=sent.rows, row_weights=sent.row_weights, cu_seqlens=sent.cu_seqlens)
            call.put(**plan_tensors(sent.plan) if plan is None else {})
            call.info["sizes"] = plan_sizes(sent.plan)
            call.unchanged(hidden=batch.hidden, topk_ids=batch.topk_ids, topk_weights=batch.topk_weights)
            call.unchanged(**plan_inputs(plan))
            call.info["is_view"] = self._is_view(sent.rows, "hidden_nvsh_buffer_view")
            if self.takes("dispatch", "router_weights_zero_copy"):  # elsewhere zero_copy may mean both
                call.info["weights_are_view"] = self._is_view(sent.row_weights, "router_weight_buffer_view")
            self._note_leases(call)
        return sent

    def takes(self, call: str, flag: str) -> bool:
        """See ``BufferDoor.takes``."""
        return flag in parameters_of(getattr(self.buffer, call, None))

    def _is_view(self, result: Tensor | None, view: str) -> bool | None:
        """Whether a result is the Buffer's own memory; None where there is no result, or no view to tell by."""
        own: Tensor | None = getattr(self.buffer, view, None)
        return None if own is None or result is None else result.data_ptr() == own.data_ptr()

    def _dispatch(
        self, call: Call, batch: Batch, replay: Dispatched | None, route_weights: bool, flags: dict[str, bool]
    ) -> Dispatched:
        weights = batch.topk_weights if route_weights else None
        if replay is None:
            counts = batch.topk_ids.flatten().bincount(minlength=self.case.E).int()
            call.hold(tokens_per_expert=counts)
            out = self._call["dispatch"](batch.hidden, weights, batch.topk_ids, counts, **flags)
            call.unchanged(tokens_per_expert=counts)
        else:
            out = self._call["dispatch"](batch.hidden, weights, plan=replay.plan, **flags)
        promised = 5 if flags.get("async_finish") else 4
        if not isinstance(out, tuple) or len(out) != promised:
            count = len(out) if isinstance(out, tuple) else type(out).__name__
            raise TypeError(f"dispatch returned {count} values, {promised} are promised")
        if promised == 5:
            self._wait(out[4])
        rows, row_weights, cu_seqlens, plan = out[:4]
        if replay is not None:
            call.info["same_plan"], call.info["no_cu_seqlens"] = plan is replay.plan, cu_seqlens is None
            cu_seqlens = replay.cu_seqlens
        leases = getattr(self.buffer, "leases", None)
        turn = leases.turns["rows"] if leases and flags.get("zero_copy") else None
        return Dispatched(rows, row_weights, cu_seqlens, plan, turn)

    def prefetch(
        self, step: str, plan: BufferPlan, weights: WeightSlots | None = None, async_finish: bool = False
    ) -> None:
        """Fill the slots that a plan uses; by default those of the layer's own weights."""
        weights = self.weights if weights is None else weights
        with self.rig.recorder.call(step, "prefetch") as call:
            call.put(experts_to_copy=plan.experts_to_copy)
            call.put(**{f"local_{name}": weights.local(name) for name in weights.names})
            call.put(**{f"before_{name}": weights.slots(name) for name in weights.names})
            sources = {f"full_{name}": weights.sources(name) for name in weights.names}
            call.put(**sources)
            guards = {f"gap_{name}": weights.guards(name) for name in weights.names} if weights.gap else {}
            call.put(**{f"before_{name}": guard for name, guard in guards.items()})
            flags = {"async_finish": True} if async_finish else {}
            given = weights.plan(plan)
            read = {f"full_{name}": weights.readable(name) for name in weights.names}
            call.hold(**read, **plan_inputs(given))
            event = self._call["prefetch_weight"](given, **weights.prefetch_arguments(), **flags)
            if async_finish:
                self._wait(event)
            if leases := getattr(self.buffer, "leases", None):
                self._slots_of[step] = leases.turns["slots"]
            with self._leased(step):  # the recorder is the first who reads what prefetch says is there
                call.put(**{f"slot_{name}": weights.slots(name) for name in weights.names}, **guards)
            call.unchanged(**{f"local_{name}": weights.local(name) for name in weights.names})
            call.unchanged(**read, **plan_inputs(given))
            self._note_leases(call)

    def experts(self, step: str, sent: Dispatched, in_place: bool = False) -> Tensor:
        """Compute all groups; undefined rows of the result are poisoned.

        Args:
            step: name of the step.
            sent: dispatched rows.
            in_place: write the result over the rows, as zero-copy combine needs it.
        """
        with self.rig.recorder.call(step, "experts") as call:
            with self._leased(step, sent.turn):
                out: Tensor = self._compute(call, sent)
            self._note_leases(call)
        if out.shape == sent.rows.shape:  # else the check of its form says so
            self.rig.poison_padding(out, sent.end, sent.plan.zero_fill_ranges)
        return sent.rows.copy_(out) if in_place else out

    def _compute(self, call: Call, sent: GroupedRows) -> Tensor:
        """Run the experts, and keep what the checks of the stage judge."""
        weights = {f"weight_{name}": self.weights.groups(name) for name in self.weights.names}
        inputs = {"rows": sent.rows, "row_weights": sent.row_weights, "cu_seqlens": sent.cu_seqlens, **weights}
        call.info["decoded"] = experts.decodes(self.rig.experts, self.case)
        call.put(**inputs if call.recording.full else {"cu_seqlens": sent.cu_seqlens})
        out: Tensor = self._experts(sent.rows, sent.row_weights, sent.cu_seqlens, list(weights.values()))
        call.note(**inputs, out=out)
        if call.recording.full:
            call.put(out=out)
            call.unchanged(**inputs)
        elif call.recording.reaches("columns") and out.shape == sent.rows.shape:
            put_sample(call, sent, weights, out)
        return out

    def compute_alone(self, step: str, number: int, lengths: Sequence[int]) -> Tensor:
        """The experts on groups of given lengths, without dispatch; the slots hold the experts that come next.

        Args:
            step: name of the step.
            number: of the step, so that each has rows of its own.
            lengths: rows of each group before padding; there are as many rows again as a padding after the last
                group, all poisoned.
        """
        self.load(0)
        self.fill_slots()
        pad = self.case.pad
        counts = torch.tensor(lengths)
        padded = -(-counts // pad) * pad
        ends = padded.cumsum(0)
        place = torch.arange(int(ends[-1]) + pad)
        group = torch.searchsorted(ends, place, right=True).clamp(max=len(counts) - 1)
        valid = place < (ends - padded + counts)[group]
        rows, row_weights = compute_rows(self.case, self.rank, number, len(place))
        rows[~valid], row_weights[~valid] = 0, 0
        self.rig.poison(rows[ends[-1] :])
        rows, row_weights, cu_seqlens = (t.to(self.rig.comm.device) for t in (rows, row_weights, ends.int()))
        with self.rig.recorder.call(step, "experts") as call:
            call.put(valid=valid)
            return self._compute(call, GroupedRows(rows, row_weights, cu_seqlens))

    def fill_slots(self) -> None:
        """Put the experts after this rank's own into its slots, without a prefetch."""
        case, slots = self.case, self.layout.num_slots
        first = (self.rank + 1) * self.layout.experts_per_rank
        wanted = [(first + slot) % case.E for slot in range(slots)]
        owners = {expert // self.layout.experts_per_rank for expert in wanted}
        whole = {rank: stored(case, self._expert_weights(rank, 0)) for rank in owners}
        for name in self.weights.names:
            own = [
                whole[e // self.layout.experts_per_rank][name][e % self.layout.experts_per_rank] for e in wanted
            ]
            self.weights.slots(name).copy_(torch.stack(own))

    @contextmanager
    def _leased(self, step: str | None, rows: int | None = None) -> Iterator[None]:
        """Note that slots of a step, or a turn of a view of rows, are read, where a Buffer stamps its leases."""
        leases = getattr(self.buffer, "leases", None)
        with ExitStack() as reads:
            if leases and rows is not None:
                reads.enter_context(leases.reading("rows", self.rank, rows))
            if leases and step in self._slots_of:
                only = self.rank if self.case.generation == "A" else None
                reads.enter_context(leases.reading("slots", self.rank, self._slots_of[step], only))
            yield

    def _note_leases(self, call: Call) -> None:
        """Put what the Buffer has read since the last time into the call, once the device is done."""
        if leases := getattr(self.buffer, "leases", None):
            reads = leases.drain()
            call.later.append(lambda: call.info.update(leases=[read.to_json() for read in reads]))

    def combine(self, step: str, sent: Dispatched, rows: Tensor, repeat: int = 0, **flags: bool) -> Tensor:
        """Sum rows back to tokens.

        Args:
            step: name of the step.
            sent: the dispatch whose plan is used.
            rows: ``[NvS, H]``.
            repeat: how often combine ran on these very rows before.
            flags: ``zero_copy``, ``async_finish``.
        """
        with self.rig.recorder.call(step, "combine", repeat=repeat, **flags) as call:
            call.put(rows=rows, row_weights=sent.row_weights)
            call.hold(**plan_inputs(sent.plan))
            with self._leased(None, sent.turn):
                out = self._call["combine"](sent.plan, rows, sent.row_weights, **flags)
            if flags.get("async_finish"):
                self._wait(out[2])
            # Not copied: results are the caller's, and a later call that writes into them shows.
            call.put_as_is(hidden=out[0], **({} if out[1] is None else {"topk_weights": out[1]}))
            if flags.get("zero_copy"):  # the rows change by contract
                call.put(after_rows=rows)
            else:
                call.unchanged(rows=rows)
            call.unchanged(row_weights=sent.row_weights, **plan_inputs(sent.plan))
            self._note_leases(call)
        result: Tensor = out[0]
        return result

    def unrecorded(self, batch: Batch, times: int) -> None:
        """See ``LayerDoor.unrecorded``."""
        batch = self.rig.here(batch)
        counts = batch.topk_ids.flatten().bincount(minlength=self.case.E).int()
        with self.rig.recorder.call("unrecorded", "passes"):
            for _ in range(times):
                given = (batch.hidden, batch.topk_weights, batch.topk_ids, counts)
                rows, row_weights, _, plan = self._call["dispatch"](*given)
                self._call["prefetch_weight"](plan, **self.weights.prefetch_arguments())
                self._call["combine"](plan, rows, row_weights)
        if leases := getattr(self.buffer, "leases", None):
            leases.drain()

    def capture(self, step: str, sent: Dispatched) -> Captured:
        """Capture a pass by the plan of an earlier dispatch in a CUDA graph; collective."""
        with self.rig.recorder.call(step, "capture"):
            return Captured(self, sent)

    def planning_in_capture(self, batch: Batch) -> Callable[[MoonEPBuffer], object]:
        """A call that plans while a CUDA graph is captured."""
        return in_capture(self.rig.here(batch))

    def unrecorded_reduces(self, plan: BufferPlan, grads: GradientSlots, times: int) -> None:
        """See ``BufferDoor.unrecorded_reduces``."""
        with self.rig.recorder.call("unrecorded", "passes"):
            for _ in range(times):
                self._call["reduce_grad"](plan, **grads.arguments())

    def reduce(self, step: str, plan: BufferPlan, grads: GradientSlots) -> None:
        """Bring the slots' gradients home."""
        with self.rig.recorder.call(step, "reduce") as call:
            call.put(experts_to_copy=plan.experts_to_copy)
            for name in PROJECTIONS:
                call.put(**{f"local_{name}": grads.local(name), f"slot_{name}": grads.slots(name)})
                call.put(**{f"full_{name}": grads.full[name]})
            call.hold(**plan_inputs(plan))
            self._call["reduce_grad"](plan, **grads.arguments())
            call.unchanged(**plan_inputs(plan))
            for name in PROJECTIONS:
                call.put(**{f"after_local_{name}": grads.local(name), f"after_slot_{name}": grads.slots(name)})
                call.put(**{f"after_full_{name}": grads.full[name]})

    def refuses(self, step: str, what: str, call: Callable[[MoonEPBuffer], object]) -> None:
        """Record how the Buffer answers a call that it must refuse; every rank makes the same bad call."""
        with self.rig.recorder.call(f"{step}: {what}", "refusal", what=what) as record:
            try:
                call(self.buffer)
            except CollectiveError:
                raise
            except (AssertionError, ValueError, RuntimeError, TypeError) as error:
                record.info.update(raised=type(error).__name__, message=str(error)[:300])

    def close(self) -> None:
        """See ``LayerDoor.close``."""
        self._call["destroy"]()
