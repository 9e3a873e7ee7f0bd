"""Is a recorded trace what its case makes? Calls, promises and inputs, against the reference's own recording.

Calls, relations and inputs are functions of the case, whoever the subject is. So the case is recorded once more on
the embedded reference, and what a subject was given is compared bit for bit; what it gave back is for the judge.
"""

from __future__ import annotations

from collections.abc import Iterator

from moonep_validate.cases.case import Case
from moonep_validate.faults import parse_fault
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.record import record, refused
from moonep_validate.trace.recording import DIGEST
from moonep_validate.trace.trace import Call, Trace, same_bits

#: What each operation is given that follows from the case alone; ``local_`` stands for all owned weights.
INPUTS = {
    "dispatch": ("hidden", "topk_ids", "topk_weights"),
    "layer": ("hidden", "topk_ids", "topk_weights"),
    "load": ("local_",),
    "prefetch": ("local_",),
}
#: Elements of inputs and weights up to which a case is recorded again.
MAX_ELEMENTS = 2**30


def recheck(trace: Trace) -> str:
    """Where a trace is not what its case makes of calls, promises and inputs; empty if it is, or ``skipped``.

    Args:
        trace: one that passed; after a failure the calls end where the subject failed.
    """
    if skipped(trace):
        return ""
    return _difference(trace, record(_reference(trace), trace.case))


def skipped(trace: Trace) -> str:
    """Why a trace cannot be compared with its case's own data, or empty."""
    if trace.not_run:
        return ""
    if trace.case.refusal:
        return "sampled: the data are what a served engine was given"
    if trace.layer_door:
        return "an engine pads and orders its batches itself"
    if _elements(trace.case) > MAX_ELEMENTS:
        return "the case is too large to be recorded again"
    return refused(_reference(trace), trace.case) or ""


def _reference(trace: Trace) -> Job:
    faults = tuple(map(parse_fault, trace.faults))
    return Job(faults=faults, recording=trace.recording)


def _difference(trace: Trace, due: Trace) -> str:
    for rank, (got, want) in enumerate(zip(trace.calls, due.calls, strict=True)):
        ours, theirs = [(c.step, c.op) for c in got], [(c.step, c.op) for c in want]
        if ours != theirs:
            return f"rank {rank} {_first_difference(ours, theirs)}"
        for call, other in zip(got, want, strict=True):
            if name := next(_changed(call, other), None):
                return f"rank {rank}: {name} of {call.op} in step {call.step} is not the data of its case"
    if trace.relations != due.relations:
        return (
            f"it has {len(trace.relations)} promises between steps, its case makes {len(due.relations)} or others"
        )
    return ""


def _elements(case: Case) -> int:
    return case.R * case.S * case.K * case.H + 6 * case.E * case.H * case.I


def _changed(call: Call, due: Call) -> Iterator[str]:
    """Inputs that are missing or have other bits."""
    for name, tensor in due.tensors.items():
        is_input = name.removesuffix(DIGEST).startswith(INPUTS.get(call.op, ()))
        if is_input and (name not in call.tensors or not same_bits(call.tensors[name], tensor)):
            yield name


def _first_difference(ours: list[tuple[str, str]], theirs: list[tuple[str, str]]) -> str:
    number = next(
        (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    got, due = (" of step ".join(reversed(c[number])) if number < len(c) else "nothing" for c in (ours, theirs))
    return f"made {len(ours)} calls, its case makes {len(theirs)}; call {number} is {got}, {due} is due"
