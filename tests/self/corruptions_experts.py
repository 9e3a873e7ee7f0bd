"""Known ways to break what the experts did, packed weights and groups alone included."""

from __future__ import annotations

from moonep_validate.cases.case import Case
from moonep_validate.trace.trace import Trace
from tests.self.corruptions import Corruption, call, info, tensor


def scale_of_a_slot(trace: Trace) -> None:
    tensor(trace, "prefetch", "slot_down_scale")[0, 7, 1] += 1


def scale_of_a_row(trace: Trace) -> None:
    """Rank 1's own experts, 4 to 7, come first, so row 2 is expert 6."""
    tensor(trace, "prefetch", "full_up_scale")[2, 7, 1] += 1


def byte_behind_the_slots(trace: Trace) -> None:
    tensor(trace, "prefetch", "gap_down")[0, 7, 1] += 1


def row_alone(trace: Trace) -> None:
    """The last row that counts of the last step but one, where no dispatch says which rows do."""
    step = call(trace, "experts", 1, "uneven")
    step.tensors["out"][step.tensors["valid"].nonzero()[-1, 0], 4] += 16.0


def weight_alone(trace: Trace) -> None:
    """Rank 1's first expert, expert 3, where no prefetch says what the rank held."""
    tensor(trace, "experts", "weight_up_scale", 1, "one_row")[0, 7, 0] += 1


MXFP4 = Case.parse("genB+R4+E12+K3+S7+H32+I64+pad5+hot:1+mxfp4")
POOLS_A, POOLS_B = (Case.parse(f"gen{g}+R3+E12+K3+S7+H24+I8+hot:1+pools") for g in "AB")
GROUPED = Case.parse("genB+R2+E6+K2+S7+H32+I64+pad5+mxfp4+grouped")
EXPERTS = [
    Corruption("P2", "experts", "what experts changed of its inputs", info("experts", "changed", ["rows"])),
    Corruption("W1", "prefetch", "down_scale weight", scale_of_a_slot, MXFP4),
    Corruption(
        "W6", "prefetch", "up_scale weight bits at rank 1, expert 6, weight row 7", scale_of_a_row, POOLS_A
    ),
    Corruption(
        "W2", "prefetch", "down of the gap behind the slots bits at rank 1, row 0", byte_behind_the_slots, POOLS_B
    ),
    Corruption("P1", "experts", "expert output at rank 1, row 44, group 5, column 4", row_alone, GROUPED),
    Corruption("I8", "load", "up_scale weight bits at rank 1, expert 3, weight row 7", weight_alone, GROUPED),
    Corruption("I10", "experts", "experts.out of step 'other_poison' against 'uneven'", row_alone, GROUPED),
]
