"""Known ways to break a trace: for each check the corruption that it must catch, and at which stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.judge.facts import Step
from moonep_validate.judge.verdict import Result, Verdict
from moonep_validate.pipeline.judge import judge
from moonep_validate.trace.trace import Call, Relation, Trace
from tests.self.conftest import CASE

SIZES = "R4+E12+K3+S7+H24+I20+pad5"
REAL = Case.parse(f"genB+{SIZES}+hot:1+fill:real")
POISONS = Case.parse(f"genB+{SIZES}+hot:1+two_poisons")
VARIANTS = Case.parse(f"genB+{SIZES}+hot:1+variants")
COMBINE = Case.parse("genB+R4+E12+K8+S6+H24+pad5+combine_only+zipf:1.0")
GRADS = Case.parse(f"genB+{SIZES}+chain+grads")
GRADS_A = GRADS.but(generation="A")
CASE_A = CASE.but(generation="A")
LIFE = Case.parse(f"genB+{SIZES}+hot:1+life")
REFUSALS = Case.parse(f"genB+{SIZES}+refusals")
EQUAL_LOADS = Case.parse(f"genB+{SIZES}+balanced")
K3 = Case.parse(f"genB+{SIZES}+zipf:1.0+fill:real+k3")
FEW_SLOTS = Case.parse("genA+R4+E16+K4+S17+H24+I20+slots1+overflow")
IN_FLIGHT = Case.parse("genB+R3+E6+K4+S7+H24+I8+in_flight:4")


def call(trace: Trace, op: str, rank: int = 1, step: str = "base") -> Call:
    return next(c for c in trace.calls[rank] if c.op == op and c.step == step)


def tensor(trace: Trace, op: str, name: str, rank: int = 1, step: str = "base") -> Tensor:
    return call(trace, op, rank, step).tensors[name]


def results(verdict: Verdict, check: str) -> list[Result]:
    return [result for result in verdict.results if result.check == check]


def occupied(trace: Trace, rank: int = 1) -> int:
    """A row of ``rank`` that holds a route."""
    return int((Step(trace, "base").row_route[rank] >= 0).nonzero()[0][0])


def pad(trace: Trace, rank: int = 1) -> int:
    step = Step(trace, "base")
    return int(((step.row_route[rank] < 0) & step.in_group[rank]).nonzero()[0][0])


def slot_rank(trace: Trace) -> int:
    """A rank that uses a slot and has an unused one."""
    return int(((Step(trace, "base").copies >= 0).any(axis=1)).nonzero()[0][0])


Change = Callable[[Trace], object]


@dataclass(frozen=True)
class Corruption:
    """A change to a trace, the check that must catch it, and what its finding must say."""

    check: str
    stage: str
    says: str
    change: Change
    case: Case = CASE
    first: str = ""  # where the verdict starts, if a law of an earlier stage sees it too


def put(op: str, name: str, index: object, value: float, rank: int = 1, step: str = "base") -> Change:
    """Add ``value`` to an element; for bool-like integers use flip()."""

    def change(trace: Trace) -> None:
        tensor(trace, op, name, rank, step)[index] += value  # type: ignore[index]

    return change


def another_size_is_named(trace: Trace) -> None:
    call(trace, "dispatch", 1).info["sizes"]["NvS"] += 1


def one_row_to_another_rank(trace: Trace) -> None:
    step = Step(trace, "base")
    d, row = int(step.rank_of[2, 0, 0]), int(step.row_of[2, 0, 0])
    tensor(trace, "dispatch", "dst", 2)[0] = (d + 1) % 4 * step.num_rows + row


def two_routes_swap_rows(trace: Trace) -> None:
    dst, ids = tensor(trace, "dispatch", "dst", 0), Step(trace, "base").topk[0].flatten()
    other = next(i for i in range(3, len(ids)) if ids[i] != ids[0])
    dst[0], dst[other] = int(dst[other]), int(dst[0])


def row_behind_the_end(trace: Trace) -> None:
    tensor(trace, "dispatch", "dst")[0] = Step(trace, "base").num_rows * 2 - 1


def row_shared(trace: Trace) -> None:
    dst = tensor(trace, "dispatch", "dst")
    dst[3] = dst[0]


def hole_in_a_group(trace: Trace) -> None:
    """The last route of a padded group moves one row on, into the padding."""
    step = Step(trace, "base")
    rank = next(r for r in range(4) if step.ints("dispatch", "zero_fill_ranges")[r, :, 1].any())
    first_pad = pad(trace, rank)
    source, token, k = (int(i[0]) for i in ((step.rank_of == rank) & (step.row_of == first_pad - 1)).nonzero())
    dst = tensor(trace, "dispatch", "dst", source)
    dst[token * 3 + k] += 1 if dst[token * 3 + k] >= 0 else -1


def slot_names_own_expert(trace: Trace) -> None:
    for rank in range(4):
        tensor(trace, "dispatch", "experts_to_copy", rank)[1, -1] = 3


def slot_lost(trace: Trace) -> None:
    """A remote expert's rows lie in a home group although the slot would be free (needs overflow)."""
    step = Step(trace, "base")
    d = slot_rank(trace)
    table = [tensor(trace, "dispatch", "experts_to_copy", rank) for rank in range(4)]
    assert step.layout.num_slots == 1
    for rank in range(4):
        table[rank][d, 0] = -1


def many_groups(trace: Trace) -> None:
    """Generation A: one rank computes rows of more experts than it may."""
    rows, cu = Step(trace, "base").num_rows, tensor(trace, "dispatch", "cu_seqlens", 0)
    cu.copy_((torch.arange(1, len(cu) + 1) * rows // len(cu)).int())


def unmarked_duplicate(trace: Trace) -> None:
    for rank in range(4):
        dst = tensor(trace, "dispatch", "dst", rank)
        dst.copy_(torch.where(dst < 0, -dst - 1, dst))


def moved_without_need(trace: Trace) -> None:
    """Two routes of equal loads exchange ranks."""
    dst = tensor(trace, "dispatch", "dst", 0)
    step = Step(trace, "base")
    flat = step.rank_of[0].flatten()
    other = next(i for i in range(1, len(flat)) if flat[i] != flat[0])
    dst[0], dst[other] = int(step.raw[0].flatten()[other]), int(step.raw[0].flatten()[0])


def from_two_donors(trace: Trace) -> None:
    """Rank 3's routes claim experts of three homes."""
    here = (Step(trace, "base").rank_of == 3).nonzero()
    for number, (rank, token, k) in enumerate(zip(*here, strict=True)):
        tensor(trace, "dispatch", "topk_ids", int(rank))[token, k] = [0, 3, 6][number % 3]


def hidden_bit(trace: Trace) -> None:
    tensor(trace, "dispatch", "rows")[occupied(trace), 5] += 1.0


def weight_bit(trace: Trace) -> None:
    tensor(trace, "dispatch", "row_weights").view(torch.int32)[occupied(trace)] ^= 1


def minus_zero_for_zero(trace: Trace) -> None:
    tensor(trace, "dispatch", "rows").view(torch.int16)[pad(trace), 3] = -0x8000


def padding_weight(trace: Trace) -> None:
    tensor(trace, "dispatch", "row_weights")[pad(trace)] = 0.5


def stale_slot(trace: Trace) -> None:
    tensor(trace, "prefetch", "slot_up")[0, 7, 3] += 1


def slot_of_another_expert(trace: Trace) -> None:
    tensor(trace, "prefetch", "slot_gate")[0] = tensor(trace, "prefetch", "local_gate", 2)[1]


def slot_read_elsewhere(trace: Trace) -> None:
    """An engine's experts, which say nothing of slots at dispatch, read other ones than were filled."""
    for rank in range(trace.case.R):
        del call(trace, "dispatch", rank).info["slots"]
    first = trace.case.E if trace.case.generation == "A" else trace.case.E // trace.case.R
    tensor(trace, "experts", "weight_gate")[first, 3, 4] += 1


def unused_slot_written(trace: Trace) -> None:
    tensor(trace, "prefetch", "slot_gate")[-1, 0, 0] = 2.0


def late_poison(trace: Trace) -> None:
    calls = trace.calls[1]
    poison = next(c for c in calls if c.op == "poison_slots")
    calls.remove(poison)
    calls.insert(calls.index(call(trace, "prefetch")), poison)


def prefetch_not_done(trace: Trace) -> None:
    call(trace, "prefetch").error = {"type": "X", "message": "", "where": "", "peer": True}


def expert_element(trace: Trace) -> None:
    tensor(trace, "experts", "out")[occupied(trace), 2] += 16.0


def expert_element_beyond_bound(trace: Trace) -> None:
    tensor(trace, "experts", "out")[occupied(trace), 2] += 0.25


def one_ulp(trace: Trace) -> None:
    tensor(trace, "combine", "hidden").view(torch.int16)[2, 3] ^= 1


def primary_row_untouched(trace: Trace) -> None:
    step = Step(trace, "view")
    after = tensor(trace, "combine", "after_rows", 1, "view")
    after.copy_(tensor(trace, "combine", "rows", 1, "view"))
    assert step.is_duplicate.any()


def layer_row_scaled(trace: Trace) -> None:
    tensor(trace, "layer", "out")[3] *= 1.25


def flip_sign(op: str, name: str, step: str) -> Change:
    def change(trace: Trace) -> None:
        tensor(trace, op, name, 1, step).view(torch.int16)[0, 0] ^= -0x8000

    return change


def occupied_row_flips(step: str) -> Change:
    def change(trace: Trace) -> None:
        tensor(trace, "dispatch", "rows", 1, step).view(torch.int16)[occupied(trace), 1] ^= 1

    return change


def call_raises(trace: Trace) -> None:
    broken = call(trace, "combine")
    broken.error = {
        "type": "RuntimeError",
        "message": "illegal memory access",
        "where": "x.py:1 in f",
        "peer": False,
    }


def call_never_returns(trace: Trace) -> None:
    call(trace, "combine").done = False
    trace.hung.append({"rank": 1, "stack": "File a\n in spin\n", "deadline": 2.0})


def info(op: str, key: str, value: object, step: str = "base") -> Change:
    return lambda trace: call(trace, op, 1, step).info.__setitem__(key, value)


def nothing_raised(trace: Trace) -> None:
    record = next(c for c in trace.calls[1] if c.op == "refusal")
    del record.info["raised"]


def layer_has_fewer_tokens(trace: Trace) -> None:
    """The rows after the fifth are said to be padding, and they are not zero."""
    call(trace, "layer").info["tokens"] = 5


def route_is_invalid(trace: Trace) -> None:
    tensor(trace, "layer", "topk_ids")[2, 1] = -1


def another_expert_is_asked_for(trace: Trace) -> None:
    ids = tensor(trace, "layer", "topk_ids")
    ids[2, 1] = (ids[2, 1] + 1) % 12


def illegal_id(trace: Trace) -> None:
    tensor(trace, "dispatch", "topk_ids")[0, 0] = 12


def one_route_not_counted(trace: Trace) -> None:
    """An engine counts its tokens; the reference does not record that, so right counts come first."""
    for rank in range(4):
        counts = tensor(trace, "dispatch", "topk_ids", rank).flatten().bincount(minlength=12).int()
        call(trace, "dispatch", rank).put(tokens_per_expert=counts)
    assert results(judge(trace), "I3")[0].status == "passed"
    tensor(trace, "dispatch", "tokens_per_expert")[1] -= 1


def smaller_capacity_on_one_rank(trace: Trace) -> None:
    call(trace, "dispatch").put(hidden=tensor(trace, "dispatch", "hidden")[:-1])


def prefetch_left_out(trace: Trace) -> None:
    trace.calls[1].remove(call(trace, "prefetch"))


def buffer_left(trace: Trace) -> None:
    """As an engine's session says at its end; the reference has no such call."""
    closed = [Call("closed", "buffers", info={"living": 0}, done=True) for _ in range(4)]
    for calls, last in zip(trace.calls, closed, strict=True):
        calls.append(last)
    assert results(judge(trace), "I15")[-1].status == "passed"
    closed[1].info["living"] = 1


def step_after_an_exception_differs(trace: Trace) -> None:
    """The reference has no scenario with an exception inside a layer, so another step takes its place."""
    trace.relations.append(Relation("I11", "repeat", "base", ("layer.out",)))
    assert [r.status for r in results(judge(trace), "I11")] == ["passed"]
    flip_sign("layer", "out", "repeat")(trace)


def stamp(op: str, when: str, step: str = "base") -> Change:
    """The first lease that rank 1 read was of another generation."""

    def change(trace: Trace) -> None:
        read = call(trace, op, 1, step).info["leases"][0]
        read[when][read["writers"][0]][1] += 1

    return change


def captured_launch_differs(trace: Trace) -> None:
    """Graphs need a GPU, so another step takes the place of a launch."""
    trace.relations.append(Relation("V20", "repeat", "base", ("combine.hidden",)))
    assert [r.status for r in results(judge(trace), "V20")] == ["passed"]
    flip_sign("combine", "hidden", "repeat")(trace)


def another_expert_is_chosen(trace: Trace) -> None:
    ids = tensor(trace, "router", "ids")
    ids[2, 1] = next(e for e in range(12) if e not in ids[2])


def one_expert_is_chosen_twice(trace: Trace) -> None:
    ids = tensor(trace, "router", "ids")
    ids[2, 1] = ids[2, 0].clone()


def route_weights_are_scaled(trace: Trace) -> None:
    tensor(trace, "router", "weights")[2] *= 1.0001


def bit_between_norm_and_projection(trace: Trace) -> None:
    """The last bit of one column, which the bound of the up-projection has room for."""
    tensor(trace, "output", "normed").view(torch.int16)[2, 3] ^= 1


CORRUPTIONS = [
    Corruption("Q1", "router", "chosen expert, in ascending order at rank 1", another_expert_is_chosen, K3),
    Corruption("Q1", "router", "chosen expert, once a token at rank 1, token 2", one_expert_is_chosen_twice, K3),
    Corruption("Q2", "router", "route weight at rank 1, token 2, k 1", put("router", "weights", (2, 1), 1e-4), K3),
    Corruption(
        "Q3", "router", "sum of route weights at rank 1, token 2: expected 2.5", route_weights_are_scaled, K3
    ),
    Corruption(
        "T1", "latent", "latent token at rank 1, token 3, column 4", put("latent", "out", (3, 4), 0.25), K3
    ),
    Corruption("N1", "norm", "normed sum at rank 1, token 3, column 4", put("norm", "out", (3, 4), 0.25), K3),
    Corruption(
        "S1", "shared", "shared output at rank 1, token 3, column 4", put("shared", "out", (3, 4), 0.25), K3
    ),
    Corruption(
        "T2", "output", "up-projection at rank 1, token 3, column 4", put("output", "up", (3, 4), 0.25), K3
    ),
    Corruption("S2", "output", "output at rank 1, token 3, column 40", put("output", "out", (3, 40), 0.25), K3),
    Corruption(
        "M2",
        "output",
        "output.normed against norm.out bits at rank 1, token 2, column 3",
        bit_between_norm_and_projection,
        K3,
    ),
    Corruption(
        "I1", "prepare", "dispatched token bits at rank 1, token 2, column 3", put("dispatch", "hidden", (2, 3), 1)
    ),
    Corruption("I1", "prepare", "padding hidden at rank 1, token 5, column 0: expected 0", layer_has_fewer_tokens),
    Corruption(
        "I2", "prepare", "dispatched route weight bits at rank 1, token 2, k 1: expected 0 ", route_is_invalid
    ),
    Corruption("I2", "prepare", "dispatched expert id at rank 1, token 2, k 1", another_expert_is_asked_for),
    Corruption("I2", "prepare", "expert id, in 0..11 at rank 1, token 0, k 0: expected legal, got 12", illegal_id),
    Corruption("H1", "dispatch", "lease at rank 1, lease rows of rank 1, writer 0", stamp("dispatch", "after")),
    Corruption("H4", "prefetch", "lease at rank 1, lease slots of rank 1, writer 0", stamp("prefetch", "after")),
    Corruption("H2", "experts", "lease at rank 1, lease slots of rank 1, writer 0", stamp("experts", "before")),
    Corruption(
        "H3",
        "combine",
        "lease sums of rank 2, writer 2, when ended, before the read: expected 4, got 5",
        stamp("combine", "before", "batch_0"),
        IN_FLIGHT,
    ),
    Corruption(
        "V19",
        "combine",
        "combine.hidden of step 'batch_1' against 'alone_1'",
        flip_sign("combine", "hidden", "batch_1"),
        IN_FLIGHT,
    ),
    Corruption("V20", "combine", "combine.hidden of step 'repeat'", captured_launch_differs, VARIANTS),
    Corruption("I3", "prepare", "tokens_per_expert at rank 1, expert 1", one_route_not_counted),
    Corruption("I4", "prepare", "against most ranks at rank 1: expected 7, got 6", smaller_capacity_on_one_rank),
    Corruption(
        "I6",
        "prefetch",
        "calls in order at rank 1: expected dispatch, prefetch, combine, got dispatch, combine",
        prefetch_left_out,
    ),
    Corruption(
        "I6",
        "prefetch",
        "got dispatch, prefetch, combine; prefetch with another plan",
        info("prefetch", "same_plan", False),
    ),
    Corruption(
        "I8",
        "load",
        "up weight bits at rank 1, expert 7, weight row 2, weight column 1",
        put("experts", "weight_up", (7, 2, 1), 1),
        CASE_A,
    ),
    Corruption(
        "I11", "layer", "layer.out of step 'repeat' against 'base'", step_after_an_exception_differs, VARIANTS
    ),
    Corruption("I15", "life", "Buffers never destroyed at rank 1: expected 0, got 1", buffer_left),
    Corruption(
        "I16", "layer", "layer output bits at rank 1, token 3, column 4", put("layer", "out", (3, 4), 16.0)
    ),
    Corruption("L1", "plan", "destination row at rank 1", row_behind_the_end),
    Corruption("L2", "plan", "routes of the row at rank", row_shared),
    Corruption("L3", "plan", "rows per rank at rank", one_row_to_another_rank),
    Corruption("L4", "plan", "expert of the row at rank", two_routes_swap_rows),
    Corruption("L5", "plan", "place in the group, below its row count at rank", hole_in_a_group),
    Corruption("L6", "plan", "end of the group at rank 1, group 2", put("dispatch", "cu_seqlens", 2, 1)),
    Corruption(
        "L7", "plan", "padding rows of the group at rank 1", put("dispatch", "zero_fill_ranges", (0, 1), 1)
    ),
    Corruption(
        "L8", "plan", "experts_to_copy against most ranks at rank 1", put("dispatch", "experts_to_copy", (2, 1), 7)
    ),
    Corruption("L8", "plan", "expert in a slot, not the rank's own at rank 1, slot 2", slot_names_own_expert),
    Corruption("L9", "plan", "slots with rows at rank", slot_lost, FEW_SLOTS),
    Corruption("L10", "plan", "groups with rows, at most at rank 0: expected 8", many_groups, FEW_SLOTS),
    Corruption("L11", "plan", "route marked as duplicate at rank", unmarked_duplicate),
    Corruption("L12", "plan", "place of the duplicate in its list", put("dispatch", "dup_loffs", 0, 0)),
    Corruption("L13", "plan", "slots that copy my experts at rank 1", put("dispatch", "remote_stats", 1, 1)),
    Corruption(
        "L14", "plan", "rows of the expert at expert", put("dispatch", "topk_ids", (0, 0), -1), first="prepare"
    ),
    Corruption("L15", "plan", "donors, at most at rank 3", from_two_donors, first="prepare"),
    Corruption("L16", "plan", "rank of the route at rank", moved_without_need, EQUAL_LOADS),
    Corruption("L17", "plan", "size in the plan at rank 1, field NvS: expected", another_size_is_named),
    Corruption("X1", "plan", "rows of the expert on the rank at expert", one_row_to_another_rank),
    Corruption("X2", "plan", "row of the route at rank", two_routes_swap_rows),
    Corruption("X3", "plan", "expert in the slot at rank 1, slot 2", slot_names_own_expert),
    Corruption("D1", "dispatch", "hidden bits at rank 1, row", hidden_bit),
    Corruption("D1", "dispatch", "route weight bits at rank 1, row", weight_bit),
    Corruption("D2", "dispatch", "expected 0 (0x0000), got -0 (0x8000)", minus_zero_for_zero),
    Corruption("D2", "dispatch", "padding row_weights bits at rank 1, row", padding_weight),
    Corruption("A1", "dispatch", "rows are the Buffer's own at rank 1", info("dispatch", "is_view", True)),
    Corruption(
        "A1", "dispatch", "row weights are the Buffer's own at rank 1", info("dispatch", "weights_are_view", True)
    ),
    Corruption("A2", "dispatch", "the same plan object", info("dispatch", "same_plan", False, "replay"), VARIANTS),
    Corruption("U1", "dispatch", "expected nothing, got hidden", info("dispatch", "changed", ["hidden"])),
    Corruption("W1", "prefetch", "up weight bits at rank 1, slot 0, expert 1, weight row 7", stale_slot),
    Corruption("W1", "prefetch", "; the slot holds expert 7", slot_of_another_expert),
    Corruption("W7", "prefetch", "that the experts read bits at rank 1, slot 0, expert 1", slot_read_elsewhere),
    Corruption("W2", "prefetch", "gate of an unused slot bits at rank 1, slot 2", unused_slot_written),
    Corruption("W4", "prefetch", "a collective between a local write and prefetch at rank 1", late_poison),
    Corruption("W5", "prefetch", "prefetch returned at rank 1", prefetch_not_done, EQUAL_LOADS),
    Corruption("U2", "prefetch", "got local_up", info("prefetch", "changed", ["local_up"])),
    Corruption("P1", "experts", "expert output at rank 1, row", expert_element),
    Corruption("P1", "experts", "expert output at rank 1, row", expert_element_beyond_bound, REAL),
    Corruption(
        "C1", "combine", "combined hidden at rank 1, token 3, column 4", put("combine", "hidden", (3, 4), 16.0)
    ),
    Corruption("C1", "combine", "combined hidden at rank 1, token 2, column 3", one_ulp, REAL),
    Corruption(
        "C2",
        "combine",
        "gathered route weight bits at rank 1, token 2, k 1",
        put("combine", "topk_weights", (2, 1), 1e-7),
    ),
    Corruption(
        "C3",
        "combine",
        "combined hidden at rank 1, token 3, column 4",
        put("combine", "hidden", (3, 4), 0.25),
        REAL,
    ),
    Corruption("C4", "combine", "row after combine at rank 1, row", primary_row_untouched, COMBINE),
    Corruption("U3", "combine", "got rows", info("combine", "changed", ["rows"])),
    Corruption("M1", "layer", "layer output at rank 1, token 3, column 4", put("layer", "out", (3, 4), 16.0)),
    Corruption("M1", "layer", "layer output at rank 1, token 3", layer_row_scaled, REAL),
    Corruption(
        "R1",
        "reduce",
        "up gradient bits at rank 1",
        put("reduce", "after_local_up", (1, 2, 3), 2.0**31, 1, "reduce"),
        GRADS,
    ),
    Corruption(
        "R2",
        "reduce",
        "gate slot gradient bits at rank 1",
        put("reduce", "after_slot_gate", (1, 2, 3), 2.0**31, 1, "reduce"),
        GRADS,
    ),
    Corruption(
        "R2",
        "reduce",
        "of another rank's expert bits at rank 1, group 0",
        put("reduce", "after_full_down", (0, 2, 3), 1.0, 1, "reduce"),
        GRADS_A,
    ),
    Corruption(
        "R3",
        "reduce",
        "contributions to the down gradient at rank 1",
        put("reduce", "after_local_down", (1, 2, 3), 1.0, 1, "reduce_ones"),
        GRADS,
    ),
    Corruption(
        "Z1",
        "life",
        "answer to hidden of float32 at rank 1: expected an exception, got nothing raised",
        nothing_raised,
        REFUSALS,
    ),
    Corruption(
        "I10",
        "layer",
        "layer.out of step 'other_poison' against 'base'",
        flip_sign("layer", "out", "other_poison"),
        POISONS,
    ),
    Corruption(
        "V1", "dispatch", "dispatch.rows of step 'repeat' against 'base'", occupied_row_flips("repeat"), VARIANTS
    ),
    Corruption(
        "V2", "dispatch", "dispatch.rows of step 'replay' against 'plan'", occupied_row_flips("replay"), VARIANTS
    ),
    Corruption(
        "V3",
        "combine",
        "combine.hidden of step 'zero_copy' against 'base'",
        flip_sign("combine", "hidden", "zero_copy"),
        VARIANTS,
    ),
    Corruption(
        "V4", "layer", "layer.out of step 'async' against 'base'", flip_sign("layer", "out", "async"), VARIANTS
    ),
    Corruption(
        "V5",
        "dispatch",
        "dispatch.rows of step 'no_weights' against 'base'",
        occupied_row_flips("no_weights"),
        VARIANTS,
    ),
    Corruption(
        "V6",
        "dispatch",
        "dispatch.dst of step 'replay_weights' against 'plan'",
        put("dispatch", "dst", 0, 1, 1, "replay_weights"),
        VARIANTS,
        first="plan",
    ),
    Corruption(
        "V7", "combine", "of step 'recreated' against 'base'", flip_sign("combine", "hidden", "recreated"), LIFE
    ),
    Corruption("V8", "combine", "of step 'back' against 'base'", flip_sign("combine", "hidden", "back"), LIFE),
    Corruption("F1", "combine", "RuntimeError: illegal memory access (x.py:1 in f)", call_raises),
    Corruption("F1", "combine", "no return after 2.0 s; it is in File a in spin", call_never_returns),
]


def dedup_order_reversed(trace: Trace) -> None:
    """Swap the two duplicates of a token with three rows on one rank."""
    for rank in range(4):
        rows, groups = (tensor(trace, "dispatch", name, rank) for name in ("dup_loffs", "dup_groups"))
        for _, first, count in groups[: int(tensor(trace, "dispatch", "dup_counts", rank)[0])].tolist():
            if count > 1:
                rows[first : first + 2] = rows[first : first + 2].flip(0)
                return


CORRUPTIONS = [c for c in CORRUPTIONS if c.check != "L12"]
CORRUPTIONS.append(Corruption("L12", "plan", "place of the duplicate in its list", dedup_order_reversed, COMBINE))
CORRUPTIONS.append(Corruption("L12", "plan", "dup_counts at rank 1, field 0", put("dispatch", "dup_counts", 0, 1)))
