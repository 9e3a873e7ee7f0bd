"""Which calls does a Buffer get, stage by stage? Scenarios that need the Buffer's own door.

Each variant step differs from the base step in exactly one thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from moonep_validate.data.problem import (
    PROJECTIONS,
    Batch,
    gradients,
    injected_rows,
    packed_weights,
    random_bits,
    shifted,
)
from moonep_validate.scenarios.rig import Dispatched, Rig
from moonep_validate.scenarios.schedule import Launch, interleaving, launches

_BATCHES = 3
_GUARD = 0x5A
_CAPTURED = ("dispatch.rows", "dispatch.row_weights", "combine.hidden", "combine.topk_weights")
_FLOWN = ("dispatch.rows", "dispatch.dst", "prefetch.slot_gate", "combine.hidden")
_ROWS = ("dispatch.rows", "dispatch.row_weights", "dispatch.dst", "dispatch.cu_seqlens")
_WHOLE = (*_ROWS, "prefetch.slot_gate", "combine.hidden", "combine.topk_weights", "layer.out")


def variants(rig: Rig) -> None:
    """Repeat, asynchronous, zero-copy, replays, a plan after other work: each equals the base step."""
    batch = rig.batch()
    with rig.open() as session:
        session.forward("base", batch)
        session.forward("repeat", batch)
        rig.promise("V1", "repeat", "base", *_WHOLE)
        session.forward("async", batch, async_finish=True)
        rig.promise("V4", "async", "base", *_WHOLE)
        session.forward("zero_copy", batch, zero_copy=True)
        rig.promise("V3", "zero_copy", "base", *_WHOLE)
        session.dispatch("no_weights", batch, route_weights=False)
        rig.promise("V5", "no_weights", "base", "dispatch.rows", "dispatch.dst", "dispatch.cu_seqlens")
        _replays(rig, session)


def _replays(rig: Rig, session: Any) -> None:
    batch = rig.batch()
    first = session.dispatch("plan", batch)
    session.dispatch("other", shifted(rig.case, rig.comm.rank))
    session.dispatch("replay", batch, replay=first, route_weights=False)
    rig.promise("V2", "replay", "plan", "dispatch.rows")
    session.dispatch("replay_weights", batch, replay=first)
    rig.promise("V2", "replay_weights", "plan", "dispatch.rows", "dispatch.row_weights")
    fields = [f"dispatch.{name}" for name in ("dst", "experts_to_copy", "zero_fill_ranges", "dup_counts")]
    rig.promise("V6", "replay_weights", "plan", *fields)


def combine_only(rig: Rig) -> None:
    """Combine of rows that the fill injects, twice on a copy and twice on a zero-copy view."""
    with rig.open() as session:
        sent = session.dispatch("base", rig.batch())
        rows = _injected(rig, sent)
        session.combine("base", sent, rows)
        session.combine("again", sent, rows)
        rig.promise("V1", "again", "base", "combine.hidden", "combine.topk_weights")
        view = session.dispatch("view", rig.batch(), zero_copy=True)
        view.rows.copy_(rows)
        session.combine("view", view, view.rows, zero_copy=True)
        rig.promise("V3", "view", "base", "combine.hidden")
        session.combine("view_again", view, view.rows, repeat=1, zero_copy=True)


def _injected(rig: Rig, sent: Dispatched) -> torch.Tensor:
    rows = injected_rows(rig.case, rig.comm.rank, len(sent.rows)).to(rig.comm.device)
    rig.poison_padding(rows, sent.end, sent.plan.zero_fill_ranges)
    return rows


def dispatch_only(rig: Rig) -> None:
    """Dispatch of random bit patterns: NaN payloads, infinities and -0.0 must arrive as they are."""
    with rig.open() as session:
        session.dispatch("base", random_bits(rig.case, rig.comm.rank))


def packed(rig: Rig) -> None:
    """Prefetch of uint8 weights with their scales."""
    with rig.open() as session:
        weights = packed_weights(rig.case)
        slots = session.make_slots({name: shape for name, (shape, _) in weights.items()}, torch.uint8)
        _prefetch_packed(rig, session, "base", weights, slots)


def _prefetch_packed(rig: Rig, session: Any, step: str, weights: Any, slots: Any) -> None:
    experts = range(rig.case.E) if slots.needs_all_experts else range(rig.case.E)[slots.own]
    slots.load({name: torch.stack([make(e) for e in experts]) for name, (_, make) in weights.items()})
    for name in slots.names:
        rig.poison(slots.slots(name))
    sent = session.dispatch(step, rig.batch())
    session.prefetch(step, sent.plan, slots)


def pools(rig: Rig) -> None:
    """Packed weights as engines keep them: gaps behind slots, own experts first (A), and new tensors later."""
    loads = [packed_weights(rig.case.but(seed=rig.case.seed + number)) for number in range(2)]
    with rig.open() as session:
        shapes = {name: shape for name, (shape, _) in loads[0].items()}
        slots = session.make_slots(shapes, torch.uint8, gap=1, local_first=True)
        for step, weights in zip(("base", "replaced"), loads, strict=True):
            slots.renew()
            for name in slots.names:
                slots.guards(name).fill_(_GUARD)
            _prefetch_packed(rig, session, step, weights, slots)


def grouped(rig: Rig) -> None:
    """The experts alone: groups empty, of one row, at the padding and one beside it, all rows in one group."""
    pad = rig.case.pad
    with rig.open() as session:
        groups = session.layout.num_groups
        shapes = {
            "one_row": [1] * groups,
            "every_other": [(group % 2) * (pad + 2) for group in range(groups)],
            "at_padding": [pad] * groups,
            "around_padding": [(pad - 1, pad + 1, 0, 2 * pad)[group % 4] for group in range(groups)],
            "first_group": [3 * pad + 1] + [0] * (groups - 1),
            "last_group": [0] * (groups - 1) + [3 * pad + 1],
            "uneven": [(group * 7 + rig.comm.rank * 3) % (2 * pad + 1) for group in range(groups)],
        }
        for number, (step, lengths) in enumerate(shapes.items()):
            session.compute_alone(step, number, lengths)
        rig.poison_value = 2.0**40
        session.compute_alone("other_poison", number, lengths)
        rig.promise("I10", "other_poison", step, "experts.out")


def grads(rig: Rig) -> None:
    """Gradients of redundant experts come home: in order, once, and the slots are cleared."""
    with rig.open() as session:
        sent = session.dispatch("base", rig.batch())
        store = session.make_gradients()
        for step in ("reduce", "reduce_ones"):
            for name in PROJECTIONS:
                local, slots = gradients(rig.case, rig.comm.rank, name, ones=step == "reduce_ones")
                store.full[name].fill_(-7.0)
                store.local(name).copy_(local)
                store.slots(name).copy_(slots)
            session.dispatch(step, rig.batch(), replay=sent)  # all ranks' slots are written before any rank reads
            session.reduce(step, sent.plan, store)


def life(rig: Rig) -> None:
    """Recreate, two Buffers alive, two layers on the same slots, destroy twice, use after destroy."""
    batch = rig.here(rig.batch())
    with rig.open() as session:
        session.forward("base", batch)
        session.forward("other_layer", batch, layer=1)
        session.forward("back", batch)
        rig.promise("V8", "back", "base", *_WHOLE)
        with rig.open() as second:
            second.forward("second", batch)
            rig.promise("V7", "second", "base", *_WHOLE)
            session.forward("beside", batch)
            rig.promise("V7", "beside", "base", *_WHOLE)
        with rig.recorder.call("destroyed", "close"):  # destroy is idempotent
            second.close()
        second.refuses(
            "destroyed", "dispatch after destroy", lambda b: b.dispatch(batch.hidden, None, batch.topk_ids)
        )
        session.forward("after", batch)
        rig.promise("V7", "after", "base", *_WHOLE)
    with rig.open() as third:
        third.forward("recreated", batch)
        rig.promise("V7", "recreated", "base", *_WHOLE)


def nemesis(rig: Rig) -> None:
    """Several batches in flight on two Buffers, launched and delayed as the seed says: same bits as one by one."""
    seed = int(rig.case.scenario.args[0])
    rank, travels = rig.comm.rank, launches(_BATCHES, 2, seed)
    batches = [rig.batch(), shifted(rig.case, rank), shifted(rig.case, rank, 2)]
    with rig.open() as first, rig.open() as second:
        sessions = [(first, second)[launch.buffer] for launch in travels]
        for session in (first, second):
            session.load(0)
        for number, (session, batch) in enumerate(zip(sessions, batches, strict=True)):
            _fly(rig, session, f"alone_{number}", batch, Launch(0, False, False))
        rig.comm.disturb(seed)
        order = rig.seams.around("schedule", interleaving)(travels, seed)
        flying: dict[int, Iterator[None]] = {}
        for _, number in order:
            if number not in flying:
                step = f"batch_{number}"
                flying[number] = _ops(rig, sessions[number], step, batches[number], travels[number])
                rig.promise("V19", step, f"alone_{number}", *_FLOWN)
            next(flying[number])
            rig.comm.pause("launch")
        _one_after_the_other(rig, first)


def _one_after_the_other(rig: Rig, session: Any) -> None:
    """Two combines with nothing in between: peers may still read the rows of the first when the second begins."""
    sent = session.dispatch("last", rig.batch())
    rows = _injected(rig, sent)
    others = -rows
    session.combine("last", sent, rows)
    session.combine("last_again", sent, others)


def graph(rig: Rig) -> None:
    """CUDA graphs: a captured replay, with other tokens and after other work, gives what eager calls give."""
    batch, elsewhere = rig.batch(), shifted(rig.case, rig.comm.rank)
    other = replace(elsewhere, topk_ids=batch.topk_ids)  # a graph has the routing of its plan
    with rig.open() as session:
        session.load(0)
        sent = session.dispatch("eager", batch)
        _after_dispatch(rig, session, "eager", sent)
        _after_dispatch(rig, session, "eager_other", session.dispatch("eager_other", other, replay=sent))
        captured = session.capture("capture", sent)
        captured.launch("graph", batch)
        rig.promise("V20", "graph", "eager", *_CAPTURED)
        session.forward("between", elsewhere)
        captured.launch("graph_other", other)
        rig.promise("V20", "graph_other", "eager_other", *_CAPTURED)
        with rig.open() as second:
            second.forward("grown", batch)
            captured.launch("graph_again", batch)
            rig.promise("V20", "graph_again", "eager", *_CAPTURED)
        session.refuses("captured", "planning while a CUDA graph is captured", session.planning_in_capture(batch))


def _after_dispatch(rig: Rig, session: Any, step: str, sent: Dispatched) -> None:
    rig.poison(sent.rows[sent.end :])
    session.prefetch(step, sent.plan, session.weights)
    session.combine(step, sent, session.experts(step, sent))


def _fly(rig: Rig, session: Any, step: str, batch: Batch, launch: Launch) -> None:
    for _ in _ops(rig, session, step, batch, launch):
        pass


def _ops(rig: Rig, session: Any, step: str, batch: Batch, launch: Launch) -> Iterator[None]:
    """The operations of one batch, one at a time (schedule.OPS)."""
    flags = {"zero_copy": launch.zero_copy, "async_finish": launch.asynchronous}
    sent = session.dispatch(step, batch, **flags)
    rig.poison(sent.rows[sent.end :])
    yield
    session.prefetch(step, sent.plan, session.weights, async_finish=launch.asynchronous)
    yield
    out = session.experts(step, sent, in_place=launch.zero_copy)
    yield
    session.combine(step, sent, out, **flags)
    yield


def refusals(rig: Rig) -> None:
    """Bad input that every build must refuse with an exception; every rank makes the same call."""
    t = rig.here(rig.batch())
    with rig.open() as session:
        sent = session.dispatch("base", t)
        short, wide = sent.rows[:-1], t.hidden.float()
        calls: dict[str, Callable[[Any], object]] = {
            "hidden of float32": lambda b: b.dispatch(wide, t.topk_weights, t.topk_ids),
            "hidden of too few rows": lambda b: b.dispatch(t.hidden[:-1], t.topk_weights, t.topk_ids),
            "route weights of bf16": lambda b: b.dispatch(t.hidden, t.topk_weights.bfloat16(), t.topk_ids),
            "expert ids of int64": lambda b: b.dispatch(t.hidden, t.topk_weights, t.topk_ids.long()),
            "neither plan nor ids": lambda b: b.dispatch(t.hidden),
            "combine of too few rows": lambda b: b.combine(sent.plan, short.clone()),
            "combine of float32": lambda b: b.combine(sent.plan, sent.rows.float()),
            "combine with an unknown argument": lambda b: b.combine(sent.plan, sent.rows, scale=2.0),
            "zero-copy combine of another tensor": lambda b: b.combine(
                sent.plan, sent.rows.clone(), zero_copy=True
            ),
        }
        for what, call in calls.items():
            session.refuses("refusals", what, call)
        session.dispatch("after", replace(t))
        rig.promise("V1", "after", "base", *_ROWS)


def destructive(rig: Rig) -> None:
    """Bad input that upstream does not check: it may trap, hang or end the process; ours refuses."""
    t = rig.here(rig.batch())
    ids, experts = t.topk_ids, rig.case.E
    counts = ids.flatten().bincount(minlength=experts).int()
    calls: dict[str, Callable[[Any], object]] = {
        "expert id -1": lambda b: b.dispatch(t.hidden, t.topk_weights, torch.full_like(ids, -1)),
        "expert id E": lambda b: b.dispatch(t.hidden, t.topk_weights, torch.full_like(ids, experts)),
        "wrong tokens_per_expert": lambda b: b.dispatch(t.hidden, t.topk_weights, ids, counts + 1),
    }
    if rig.case.S != rig.case.K:  # else the shape is legal
        calls["transposed expert ids"] = lambda b: b.dispatch(t.hidden, t.topk_weights, ids.T.contiguous())
    with rig.open() as session:
        for what, call in calls.items():
            session.refuses("destructive", what, call)
