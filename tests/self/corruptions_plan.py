"""Known ways to break a dispatch and its plan that are not rank 1's alone: rank 0, expert 0, the last slot, ids outside."""

from __future__ import annotations

import torch

from moonep_validate.cases.case import Case
from moonep_validate.trace.trace import Trace
from tests.self.corruptions import (
    CASE_A,
    K3,
    SIZES,
    Change,
    Corruption,
    call,
    layer_has_fewer_tokens,
    put,
    slot_read_elsewhere,
    tensor,
)


def slots(*experts: int, rank: int = 3) -> Change:
    """All ranks agree that the last slots of a rank hold these experts."""

    def change(trace: Trace) -> None:
        for reader in range(4):
            tensor(trace, "dispatch", "experts_to_copy", reader)[rank, -len(experts) :] = torch.tensor(experts)

    return change


def slot_count_is_another(trace: Trace) -> None:
    call(trace, "dispatch", 2).info["sizes"]["B"] += 1


def last_pad_is_not_zero(trace: Trace) -> None:
    """Five tokens of seven are real."""
    layer_has_fewer_tokens(trace)
    for name in ("hidden", "topk_weights"):
        tensor(trace, "dispatch", name)[5:] = 0
    tensor(trace, "dispatch", "hidden")[6, 3] = 1


def last_choice_is_the_one_before(trace: Trace) -> None:
    ids = tensor(trace, "router", "ids")
    ids[2, -1] = ids[2, -2].clone()


#: Expert 0 is the one whose rows move, and so lies in a slot of every other rank.
_FIRST = f"genB+{SIZES}+hot:0"

PLAN = [
    Corruption(
        "Q1", "router", "chosen expert, once a token at rank 1, token 2", last_choice_is_the_one_before, K3
    ),
    Corruption(
        "R1",
        "reduce",
        "up gradient bits at rank 0, expert of rank 0, weight row 2",
        put("reduce", "after_local_up", (0, 2, 3), 2.0**31, 0, "reduce"),
        Case.parse(f"{_FIRST}+grads"),
    ),
    Corruption(
        "R2",
        "reduce",
        "gate slot gradient bits at rank 1, slot 0, weight row 2",
        put("reduce", "after_slot_gate", (0, 2, 3), 2.0**31, 1, "reduce"),
        Case.parse(f"{_FIRST}+grads"),
    ),
    Corruption(
        "V1",
        "prefetch",
        "prefetch.slot_gate of step 'repeat' against 'base'",
        put("prefetch", "slot_gate", (0, 2, 3), 1, 1, "repeat"),
        Case.parse(f"{_FIRST}+variants"),
    ),
    Corruption(
        "W7",
        "prefetch",
        "that the experts read bits at rank 1, slot 0, expert 0",
        slot_read_elsewhere,
        Case.parse(_FIRST),
    ),
    Corruption(
        "W7",
        "prefetch",
        "that the experts read bits at rank 1, slot 0, expert 0",
        slot_read_elsewhere,
        Case.parse(_FIRST).but(generation="A"),
    ),
    Corruption("I1", "prepare", "padding hidden at rank 1, token 6, column 3", last_pad_is_not_zero),
    Corruption("L6", "plan", "last row, at most NvS at rank 1: expected", put("dispatch", "cu_seqlens", -1, 1000)),
    Corruption(
        "L8",
        "plan",
        "experts_to_copy against most ranks at rank 0, of rank 2, slot 1",
        put("dispatch", "experts_to_copy", (2, 1), 7, rank=0),
    ),
    Corruption("L8", "plan", "expert id in a slot, in -1..E-1 at rank 3, slot 2: expected 12, got 12", slots(12)),
    Corruption("L8", "plan", "expert id in a slot, in -1..E-1 at rank 3, slot 2: expected 12, got -2", slots(-2)),
    Corruption("L8", "plan", "expert in a slot, not the rank's own at rank 0, slot 2", slots(0, rank=0)),
    Corruption("L8", "plan", "expert in a slot, not repeated at rank 3, slot 1", slots(0, 0, -1)),
    Corruption("L8", "plan", "expert in a slot, not repeated at rank 3, slot 2", slots(0, 1, 0)),
    Corruption("L8", "plan", "slot after an unused one at rank 3, slot 1", slots(-1, 0, -1)),
    Corruption("L17", "plan", "size in the plan at rank 2, field B: expected", slot_count_is_another, CASE_A),
]
