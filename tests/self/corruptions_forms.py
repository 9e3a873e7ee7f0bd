"""Known ways to break the form of a tap: in what the recorder noted, and in what the trace holds behind its back."""

from __future__ import annotations

import torch
from torch import Tensor

from moonep_validate.trace.trace import Trace
from tests.self.corruptions import CASE_A, GRADS, K3, REAL, VARIANTS, Change, Corruption, call, info, tensor
from tests.self.corruptions_experts import MXFP4, POOLS_A


def noted(op: str, name: str, key: str, value: object, step: str = "base") -> Change:
    """Rank 1 returned another form, and a trace that was recorded shows it in what was noted."""

    def change(trace: Trace) -> None:
        call(trace, op, 1, step).info["forms"][name][key] = value

    return change


def replaced(op: str, name: str, how: str, rank: int = 1, step: str = "base") -> Change:
    """The trace holds another tensor than the recorder put there."""

    def change(trace: Trace) -> None:
        call(trace, op, rank, step).tensors[name] = _HOW[how](tensor(trace, op, name, rank, step))

    return change


def removed(op: str, name: str, step: str = "base") -> Change:
    """Rank 1 returned without it."""

    def change(trace: Trace) -> None:
        one = call(trace, op, 1, step)
        del one.tensors[name], one.info["forms"][name]

    return change


def loaded_in_float32(trace: Trace) -> None:
    load = next(one for one in trace.calls[1] if one.op == "load")
    load.put(local_up=load.tensors["local_up"].float())


def tap_of_nobody(trace: Trace) -> None:
    call(trace, "combine").put(scratch=torch.zeros(2))


_HOW = {
    "short": lambda t: t[:-1].clone(),
    "long": lambda t: torch.cat([t, t[:1]]),
    "flat": lambda t: t.reshape(-1),
    "float64": lambda t: t.double(),
    "int64": Tensor.long,
}

FORMS = [
    Corruption(
        "U4",
        "reduce",
        "what reduce changed of its inputs at rank 1: expected nothing, got plan.dst",
        info("reduce", "changed", ["plan.dst"], "reduce"),
        GRADS,
    ),
    Corruption(
        "U1",
        "dispatch",
        "at rank 1: expected nothing, got plan.dst",
        info("dispatch", "changed", ["plan.dst"], "replay"),
        VARIANTS,
    ),
    Corruption(
        "O1",
        "plan",
        "form of dispatch.dst at rank 1: expected int32 [21] in the",
        replaced("dispatch", "dst", "int64"),
    ),
    Corruption(
        "O1",
        "plan",
        "form of dispatch.experts_to_copy at rank 1",
        replaced("dispatch", "experts_to_copy", "short"),
    ),
    Corruption(
        "O1", "plan", "form of dispatch.dup_groups at rank 1", noted("dispatch", "dup_groups", "contiguous", False)
    ),
    Corruption(
        "O1",
        "plan",
        "form of dispatch.cu_seqlens at rank 1: expected int32 [6] on cpu, contiguous, got nothing",
        removed("dispatch", "cu_seqlens"),
    ),
    Corruption(
        "O2",
        "load",
        "form of load.local_up at rank 1: expected bfloat16 [3, 20, 24], got float32",
        loaded_in_float32,
    ),
    Corruption(
        "O3", "prepare", "form of dispatch.hidden at rank 1", noted("dispatch", "hidden", "contiguous", False)
    ),
    Corruption(
        "O3", "prepare", "form of dispatch.topk_ids at rank 1", noted("dispatch", "topk_ids", "dtype", "int64")
    ),
    Corruption(
        "O4", "dispatch", "form of dispatch.rows at rank 1", noted("dispatch", "rows", "contiguous", False)
    ),
    Corruption("O4", "dispatch", "form of dispatch.rows at rank 1", replaced("dispatch", "rows", "short")),
    Corruption(
        "O4",
        "dispatch",
        "form of dispatch.row_weights at rank 1",
        noted("dispatch", "row_weights", "dtype", "float64", "replay_weights"),
        VARIANTS,
    ),
    Corruption("O4", "dispatch", "contiguous, got bfloat16 [", noted("dispatch", "rows", "device", "cuda")),
    Corruption("O5", "prefetch", "form of prefetch.slot_up at rank 1", replaced("prefetch", "slot_up", "short")),
    Corruption(
        "O5", "prefetch", "form of prefetch.slot_gate at rank 1", replaced("prefetch", "slot_gate", "flat"), CASE_A
    ),
    Corruption(
        "O5", "prefetch", "form of prefetch.before_down at rank 1", replaced("prefetch", "before_down", "float64")
    ),
    Corruption(
        "O5",
        "prefetch",
        "form of prefetch.slot_up_scale at rank 1",
        replaced("prefetch", "slot_up_scale", "short"),
        MXFP4,
    ),
    Corruption(
        "O5",
        "prefetch",
        "form of prefetch.full_up_scale at rank 1",
        replaced("prefetch", "full_up_scale", "short"),
        POOLS_A,
    ),
    Corruption(
        "O5", "prefetch", "form of prefetch.gap_up at rank 1", replaced("prefetch", "gap_up", "long"), POOLS_A
    ),
    Corruption(
        "O5",
        "prefetch",
        "form of prefetch.experts_to_copy at rank 1",
        replaced("prefetch", "experts_to_copy", "short"),
    ),
    Corruption(
        "P3",
        "experts",
        "form of experts.out at rank 1: expected bfloat16 [",
        replaced("experts", "out", "float64"),
    ),
    Corruption("P3", "experts", "form of experts.out at rank 1", noted("experts", "out", "contiguous", False)),
    Corruption("O6", "combine", "form of combine.hidden at rank 1", replaced("combine", "hidden", "short")),
    Corruption(
        "O6",
        "combine",
        "contiguous, got bfloat16 [7, 24] on cpu, not contiguous",
        noted("combine", "hidden", "contiguous", False),
        REAL,
    ),
    Corruption("O6", "combine", "got nothing", removed("combine", "topk_weights")),
    Corruption("O6", "combine", "form of combine.scratch at rank 1: expected no such tensor", tap_of_nobody),
    Corruption(
        "O6",
        "combine",
        "form of combine.after_rows at rank 1",
        replaced("combine", "after_rows", "short", step="zero_copy"),
        VARIANTS,
    ),
    Corruption("O7", "layer", "form of layer.out at rank 1", replaced("layer", "out", "long")),
    Corruption(
        "O8",
        "reduce",
        "form of reduce.after_slot_up at rank 1",
        replaced("reduce", "after_slot_up", "float64", step="reduce"),
        GRADS,
    ),
    Corruption(
        "O8",
        "reduce",
        "form of reduce.experts_to_copy at rank 1",
        replaced("reduce", "experts_to_copy", "short", step="reduce"),
        GRADS,
    ),
    Corruption("O9", "router", "form of router.ids at rank 1", replaced("router", "ids", "int64"), K3),
    Corruption("O10", "latent", "form of latent.out at rank 1", replaced("latent", "out", "float64"), K3),
    Corruption("O11", "norm", "form of norm.out at rank 1", replaced("norm", "out", "short"), K3),
    Corruption("O12", "shared", "form of shared.out at rank 1", replaced("shared", "out", "short"), K3),
    Corruption("O13", "output", "form of output.up at rank 1", replaced("output", "up", "float64"), K3),
]
