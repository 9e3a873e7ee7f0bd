"""Which calls does a Buffer get, stage by stage? Scenarios that need the Buffer's own door.

Each variant step differs from the base step in exactly one thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from moonep_validate.scenarios.base import OTHER_POISON
from moonep_validate.scenarios.registry import scenario, unlike

if TYPE_CHECKING:
    from torch import Tensor

    from moonep_validate.cases.case import Case
    from moonep_validate.data.problem import Batch, EachExpert
    from moonep_validate.sessions.protocols import BufferDoor, Dispatched, GradientSlots, MoonEPBuffer, WeightSlots
    from moonep_validate.sessions.rig import Rig

#: Three on two Buffers: always two that share slots and rows, and one beside them.
_BATCHES = 3
#: Not the byte of poisoned slots, so that a row written too far shows whoever wrote it.
_GUARD = 0x5A
_CAPTURED = ("dispatch.rows", "dispatch.row_weights", "combine.hidden", "combine.topk_weights")
_FLOWN = ("dispatch.rows", "dispatch.dst", "prefetch.slot_gate", "combine.hidden")
_ROWS = ("dispatch.rows", "dispatch.row_weights", "dispatch.dst", "dispatch.cu_seqlens")
#: Of the plan; what has no meaning behind its count is left out.
_PLAN = ("dispatch.dst", "dispatch.experts_to_copy", "dispatch.zero_fill_ranges", "dispatch.dup_counts")
_WHOLE = (*_ROWS, "prefetch.slot_gate", "combine.hidden", "combine.topk_weights", "layer.out")


@scenario(needs=("buffer",))
def variants(rig: Rig) -> None:
    """Repeat, asynchronous, zero-copy, replays, a plan after other work: each equals the base step."""
    batch = rig.batch()
    with rig.open_buffer() as session:
        session.forward("base", batch)
        session.forward("repeat", batch)
        rig.promise("V1", "repeat", "base", *_WHOLE)
        session.forward("async", batch, async_finish=True)
        rig.promise("V4", "async", "base", *_WHOLE)
        session.forward("zero_copy", batch, zero_copy=True)
        rig.promise("V3", "zero_copy", "base", *_WHOLE)
        if session.takes("dispatch", "router_weights_zero_copy"):
            session.forward("weights_view", batch, router_weights_zero_copy=True)
            rig.promise("V3", "weights_view", "base", *_WHOLE)
        sent = session.dispatch("no_weights", batch, route_weights=False)
        session.combine("no_weights", sent, _injected(rig, sent))
        rig.promise("V5", "no_weights", "base", "dispatch.rows", "dispatch.dst", "dispatch.cu_seqlens")
        _replays(rig, session)


def _replays(rig: Rig, session: BufferDoor) -> None:
    batch = rig.batch()
    first = session.dispatch("plan", batch)
    # Another plan in between: a replay that uses what the Buffer remembers, not the plan it is given, shows.
    session.dispatch("other", rig.data.shifted())
    session.dispatch("replay", batch, replay=first, route_weights=False)
    rig.promise("V2", "replay", "plan", "dispatch.rows")
    session.dispatch("replay_weights", batch, replay=first)
    rig.promise("V2", "replay_weights", "plan", "dispatch.rows", "dispatch.row_weights")
    rig.promise("V6", "replay_weights", "plan", *_PLAN)
    # A plan fixes where rows go, not what they are: a replay that sends what it sent before shows.
    other = replace(rig.data.shifted(), topk_ids=batch.topk_ids)
    sent = session.dispatch("replay_other", other, replay=first)
    session.combine("replay_other", sent, _injected(rig, sent))


@scenario(needs=("buffer",), injects=True)
def combine_only(rig: Rig) -> None:
    """Combine of rows that the fill injects, twice on a copy and twice on a zero-copy view."""
    with rig.open_buffer() as session:
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


def _injected(rig: Rig, sent: Dispatched) -> Tensor:
    rows = rig.data.injected_rows(len(sent.rows)).to(rig.comm.device)
    rig.poison_padding(rows, sent.end, sent.plan.zero_fill_ranges)
    return rows


@scenario(needs=("buffer",))
def dispatch_only(rig: Rig) -> None:
    """Dispatch of random bit patterns: NaN payloads, infinities and -0.0 must arrive as they are."""
    with rig.open_buffer() as session:
        session.dispatch("base", rig.data.random_bits())


@scenario(needs=("buffer",), packs=True)
def packed(rig: Rig) -> None:
    """Prefetch of uint8 weights with their scales."""
    with rig.open_buffer() as session:
        weights = rig.data.packed_weights()
        slots = session.make_packed_slots(weights)
        _prefetch_packed(rig, session, "base", weights, slots)


def _prefetch_packed(rig: Rig, session: BufferDoor, step: str, weights: EachExpert, slots: WeightSlots) -> None:
    slots.load_each(weights)
    for name in slots.names:
        rig.poison(slots.slots(name))
    sent = session.dispatch(step, rig.batch())
    session.prefetch(step, sent.plan, slots)


@scenario(needs=("buffer",), packs=True)
def pools(rig: Rig) -> None:
    """Packed weights as engines keep them: gaps behind slots, own experts first (A), and new tensors later."""
    loads = [rig.data.packed_weights(number) for number in range(2)]
    with rig.open_buffer() as session:
        slots = session.make_packed_slots(loads[0], gap=1, local_first=True)
        for step, weights in zip(("base", "replaced"), loads, strict=True):
            slots.renew()
            for name in slots.names:
                slots.guards(name).fill_(_GUARD)
            _prefetch_packed(rig, session, step, weights, slots)


@scenario(needs=("buffer",), models=("moe", "k3"))
def grouped(rig: Rig) -> None:
    """The experts alone: groups empty, of one row, at the padding and one beside it, all rows in one group."""
    pad = rig.case.pad
    with rig.open_buffer() as session:
        groups = session.num_groups()
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
        rig.poison_value = OTHER_POISON
        session.compute_alone("other_poison", number, lengths)
        rig.promise("I10", "other_poison", step, "experts.out")


@scenario(needs=("buffer", "gradients"))
def grads(rig: Rig) -> None:
    """Gradients of redundant experts come home: in order, once, slots cleared; after fifty reductions too."""
    with rig.open_buffer() as session:
        sent = session.dispatch("base", rig.batch())
        store = session.make_gradients()
        for step in ("reduce", "reduce_ones", "reduce_later"):
            if step == "reduce_later":
                session.unrecorded_reduces(sent.plan, store, 50)
            _fill_gradients(rig, store, ones=step == "reduce_ones")
            session.dispatch(step, rig.batch(), replay=sent)  # all ranks' slots are written before any rank reads
            session.reduce(step, sent.plan, store)


def _fill_gradients(rig: Rig, store: GradientSlots, ones: bool = False) -> None:
    for name in store.full:
        local, slots = rig.data.gradients(name, ones=ones)
        store.full[name].fill_(-7.0)  # genA has rows of other ranks' experts too, which nobody may change
        store.local(name).copy_(local)
        store.slots(name).copy_(slots)


@scenario(needs=("buffer", "gradients"))
def replayed_plan(rig: Rig) -> None:
    """A plan that has been through combine is replayed, prefetched, combined and reduced: it is as it was."""
    with rig.open_buffer() as session:
        session.load(0)
        store = session.make_gradients()
        sent = _with_plan(rig, session, "base")
        for step in ("again", "after_reduce"):
            _fill_gradients(rig, store)
            _with_plan(rig, session, step, sent)
            rig.promise("V2", step, "base", "dispatch.rows", "dispatch.row_weights")
            rig.promise("V1", step, "base", "prefetch.slot_gate", "combine.hidden", "combine.topk_weights")
            rig.promise("V6", step, "base", *_PLAN)
            session.reduce(step, sent.plan, store)


def _with_plan(rig: Rig, session: BufferDoor, step: str, replay: Dispatched | None = None) -> Dispatched:
    """All calls of a pass in one step, by a plan of its own or by an earlier one."""
    session.poison_slots(step)
    sent = session.dispatch(step, rig.batch(), replay=replay)
    rig.poison(sent.rows[sent.end :])
    session.prefetch(step, sent.plan)
    session.combine(step, sent, session.experts(step, sent))
    return sent


@scenario(needs=("buffer",))
def life(rig: Rig) -> None:
    """Recreate, two Buffers alive, two layers on the same slots, destroy twice, use after destroy."""
    batch = rig.here(rig.batch())
    with rig.open_buffer() as session:
        session.forward("base", batch)
        session.forward("other_layer", batch, layer=1)
        session.forward("back", batch)
        rig.promise("V8", "back", "base", *_WHOLE)
        with rig.open_buffer() as second:
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
    with rig.open_buffer() as third:
        third.forward("recreated", batch)
        rig.promise("V7", "recreated", "base", *_WHOLE)


def _halves(case: Case) -> str | None:
    """Why a case has no groups of half of its ranks, or None."""
    if case.R < 4 or case.R % 2:
        return f"needs an even R of 4 or more, not R={case.R}: it makes two groups of half of the ranks"
    return unlike(case, R=case.R // 2)


@scenario(needs=("buffer", "gradients"), limits=(_halves,))
def groups(rig: Rig) -> None:
    """A Buffer on all ranks, others on two groups of them at once, in other orders, and the first one again."""
    R, batch = rig.case.R, rig.batch()
    splits = {
        "turned": (range(R - 1, 0, -2), range(0, R, 2)),
        "halves": (range(R // 2, R), range(R // 2)),
    }
    with rig.open_buffer() as whole:
        whole.forward("base", batch)
        for name, ranks in splits.items():
            mine = next(number for number, group in enumerate(ranks) if rig.comm.rank in group)
            # Other data in each group: a row of the other one shows.
            _in_a_group(rig.among(*ranks).but(seed=rig.case.seed + mine), f"{name}_{mine}")
        whole.forward("after", batch)
        rig.promise("V7", "after", "base", *_WHOLE)


def _in_a_group(rig: Rig, step: str) -> None:
    with rig.open_buffer() as session:
        session.forward(step, rig.batch())
        store = session.make_gradients()
        _fill_gradients(rig, store)
        sent = _with_plan(rig, session, f"{step}_gradients")
        session.reduce(f"{step}_gradients", sent.plan, store)


def _each_size(case: Case) -> str | None:
    """Why a case has no sessions with each of its sizes alone another one, or None."""
    reasons = [unlike(case, **change) for change in _other_sizes(case).values()]
    return next(filter(None, reasons), None)


def _other_sizes(case: Case) -> dict[str, dict[str, int]]:
    """Step -> the one size that is another one; doubled where hardware wants multiples."""
    larger = {name: 2 * getattr(case, name) for name in ("E", "H", "I", "pad")}
    larger |= {"S": case.S + 1, "K": case.K + 1}
    return {f"other_{name}": {name: size} for name, size in larger.items()}


@scenario(needs=("buffer",), limits=(_each_size,))
def shapes(rig: Rig) -> None:
    """Buffers that differ in one size each, all alive, then built anew in another order: each gives its own."""
    batch = rig.batch()
    others = {step: rig.but(**change) for step, change in _other_sizes(rig.case).items()}
    with rig.open_buffer() as first, ExitStack() as living:
        first.forward("base", batch)
        sessions = {step: living.enter_context(other.open_buffer()) for step, other in others.items()}
        for step, session in sessions.items():
            session.forward(step, _alike(others[step], batch))
        first.forward("beside", batch)
        rig.promise("V7", "beside", "base", *_WHOLE)
    for step, other in reversed(others.items()):
        with other.open_buffer() as session:
            session.forward(f"{step}_again", _alike(other, batch))
        rig.promise("V7", f"{step}_again", step, *_WHOLE)
    with rig.open_buffer() as last:
        last.forward("recreated", batch)
        rig.promise("V7", "recreated", "base", *_WHOLE)


def _alike(rig: Rig, batch: Batch) -> Batch:
    """The very same tokens where they have the shape, so that nothing but the size tells two Buffers apart."""
    own = rig.batch()
    same = (own.hidden.shape, own.topk_ids.shape) == (batch.hidden.shape, batch.topk_ids.shape)
    return batch if same else own


@scenario(args={"SEED": int}, needs=("buffer",), overlaps=True)
def in_flight(rig: Rig) -> None:
    """Several batches in flight on two Buffers, launched and delayed as the seed says: same bits as one by one."""
    seed = int(rig.case.scenario.args[0])
    travels = rig.launches(_BATCHES, 2, seed)
    batches = [rig.batch(), rig.data.shifted(), rig.data.shifted(2)]
    with rig.open_buffer() as first, rig.open_buffer() as second:
        sessions = [(first, second)[launch.buffer] for launch in travels]
        for session in (first, second):
            session.load(0)  # the first load allocates, which is collective: later it would put the ranks in step
        for number, (session, batch) in enumerate(zip(sessions, batches, strict=True)):
            for _ in _ops(rig, session, f"alone_{number}", batch, zero_copy=False, asynchronous=False):
                pass
        rig.comm.disturb(seed)  # from here on: what is compared with must not suffer from the same race
        order = rig.launch_order(travels, seed)
        flying: dict[int, Iterator[None]] = {}
        for _, number in order:
            if number not in flying:
                step, launch = f"batch_{number}", travels[number]
                zero_copy, asynchronous = launch.zero_copy, launch.asynchronous
                flying[number] = _ops(rig, sessions[number], step, batches[number], zero_copy, asynchronous)
                rig.promise("V19", step, f"alone_{number}", *_FLOWN)
            next(flying[number])
            rig.comm.pause("launch")
        _one_after_the_other(rig, first)


def _one_after_the_other(rig: Rig, session: BufferDoor) -> None:
    """Two combines with nothing in between: peers may still read the rows of the first when the second begins."""
    sent = session.dispatch("last", rig.batch())
    rows = _injected(rig, sent)
    others = -rows
    session.combine("last", sent, rows)
    session.combine("last_again", sent, others)


@scenario(needs=("buffer", "gpu"))
def graph(rig: Rig) -> None:
    """CUDA graphs: a captured replay, with other tokens and after other work, gives what eager calls give."""
    batch, elsewhere = rig.batch(), rig.data.shifted()
    other = replace(elsewhere, topk_ids=batch.topk_ids)  # a graph has the routing of its plan
    with rig.open_buffer() as session:
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
        with rig.open_buffer() as second:
            second.forward("grown", batch)  # a second Buffer allocates; the graph must still find its memory
            captured.launch("graph_again", batch)
            rig.promise("V20", "graph_again", "eager", *_CAPTURED)
        session.refuses("captured", "planning while a CUDA graph is captured", session.planning_in_capture(batch))


def _after_dispatch(rig: Rig, session: BufferDoor, step: str, sent: Dispatched) -> None:
    rig.poison(sent.rows[sent.end :])
    session.prefetch(step, sent.plan)
    session.combine(step, sent, session.experts(step, sent))


def _ops(
    rig: Rig, session: BufferDoor, step: str, batch: Batch, zero_copy: bool, asynchronous: bool
) -> Iterator[None]:
    """The operations of one batch, one at a time (``schedule.OPS``).

    Slots are not poisoned: a peer may push the next batch's before this rank fills them, and that is a race (W4).
    """
    sent = session.dispatch(step, batch, zero_copy=zero_copy, async_finish=asynchronous)
    rig.poison(sent.rows[sent.end :])
    yield
    session.prefetch(step, sent.plan, async_finish=asynchronous)
    yield
    out = session.experts(step, sent, in_place=zero_copy)
    yield
    session.combine(step, sent, out, zero_copy=zero_copy, async_finish=asynchronous)
    yield


@scenario(needs=("buffer",))
def refusals(rig: Rig) -> None:
    """Bad input that every build must refuse with an exception; every rank makes the same call."""
    t = rig.here(rig.batch())
    with rig.open_buffer() as session:
        sent = session.dispatch("base", t)
        short, wide = sent.rows[:-1], t.hidden.float()
        calls: dict[str, Callable[[MoonEPBuffer], object]] = {
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
        session.dispatch("after", replace(t))  # a refused call leaves nothing behind
        rig.promise("V1", "after", "base", *_ROWS)


@scenario(needs=("buffer", "destructive"))
def destructive(rig: Rig) -> None:
    """Bad input that upstream does not check: it may trap, hang or end the process; ours refuses."""
    t = rig.here(rig.batch())
    ids, experts = t.topk_ids, rig.case.E
    counts = ids.flatten().bincount(minlength=experts).int()
    calls: dict[str, Callable[[MoonEPBuffer], object]] = {
        "expert id -1": lambda b: b.dispatch(t.hidden, t.topk_weights, ids.new_full(ids.shape, -1)),
        "expert id E": lambda b: b.dispatch(t.hidden, t.topk_weights, ids.new_full(ids.shape, experts)),
        "wrong tokens_per_expert": lambda b: b.dispatch(t.hidden, t.topk_weights, ids, counts + 1),
    }
    if rig.case.S != rig.case.K:  # else the shape is legal
        calls["transposed expert ids"] = lambda b: b.dispatch(t.hidden, t.topk_weights, ids.T.contiguous())
    with rig.open_buffer() as session:
        for what, call in calls.items():
            session.refuses("destructive", what, call)
