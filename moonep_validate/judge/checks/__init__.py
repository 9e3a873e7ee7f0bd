"""How is a promise checked? A check is a small function of one step; this module feeds it and compares.

A check yields what it compared. It judges one stage on the inputs that this stage was really given, so the
first stage with a finding is the broken one. It never sees two traces and never re-derives inputs from the case.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moonep_validate.judge.facts import Absent, Missing, Step, Undecided
from moonep_validate.judge.oracle.arithmetic import Arithmetic
from moonep_validate.judge.registry import CHECKS as CHECKS
from moonep_validate.judge.registry import Check as Check
from moonep_validate.judge.spread import spread
from moonep_validate.judge.verdict import Finding, Result
from moonep_validate.trace.recording import Recording, is_digest
from moonep_validate.trace.trace import Trace, bits, same_bits

_MODULES = (
    "form",
    "life",
    "history",
    "adapter",
    "plan",
    "dispatch",
    "prefetch",
    "experts",
    "combine",
    "layer",
    "k3",
    "reduce",
    "relations",
)


@dataclass(frozen=True)
class Compared:
    """One comparison: how many elements were examined, and what differed."""

    examined: int
    findings: tuple[Finding, ...] = ()

    def noting(self, text: str) -> Compared:
        """The same with a remark after what the first finding got."""
        first, *rest = self.findings
        return replace(self, findings=(replace(first, actual=first.actual + text), *rest))


def run_check(check: Check, step: Step, trace: Trace) -> Result:
    """Judge one step; a check that crashes is ``unknown``, one that examined nothing is ``vacuous``."""
    part = trace.parts[check.stage]
    gates = check.kind == "law" or part.policy == "upstream"
    result: dict[str, Any] = {
        "check": check.id,
        "stage": check.stage,
        "step": step.name,
        "level": part.level,
        "gates": gates,
    }
    kept = Recording.parse(trace.recording)
    if not kept.reaches(check.needs):
        reason = f"it needs --record {check.needs}, the recorder kept {trace.recording}"
        return Result(**result, status="not_applicable", reason=reason)
    try:
        compared = _compared(check, step)
    except Absent as absent:
        return Result(**result, status="not_applicable", reason=str(absent))
    except Undecided as undecided:
        return Result(**result, status="unknown", reason=str(undecided))
    except Missing as missing:
        return Result(**result, status=unmet(step), reason=str(missing))
    except Exception as error:
        return Result(**result, status="unknown", reason=f"the checker raised {type(error).__name__}: {error}")
    examined = sum(c.examined for c in compared)
    findings = tuple(finding for c in compared for finding in c.findings)
    status = "failed" if findings else "passed" if examined else "vacuous"
    return Result(**result, status=status, examined=examined, findings=findings)


def unmet(*steps: Step) -> str:
    """The status where a tap is missing: neutral only if F1 says that a call of these steps did not return."""
    return "not_run" if any(step.stopped for step in steps) else "unknown"


def _compared(check: Check, step: Step) -> list[Compared]:
    """All comparisons of a check; a finding stays one, although another rank's tap is missing."""
    assert check.function is not None
    compared: list[Compared] = []
    try:
        for one in check.function(step):
            compared.append(one)
    except Missing:
        if not any(one.findings for one in compared):
            raise
    return compared


Place = Callable[[tuple[int, ...]], Mapping[str, int]]


def differ(what: str, expected: Any, actual: Any, place: Place, bad: Any = None) -> Compared:
    """Compare two arrays element by element.

    Args:
        what: the thing compared, for the finding.
        expected, actual: arrays or tensors of one shape; NaN equals NaN, and +0 equals -0.
        place: index tuple -> named place.
        bad: bool array that overrides ``expected != actual``, e.g. for a bound.

    Returns:
        The number of elements, and one finding for the first difference if there is any.
    """
    want, got = _array(expected), _array(actual)
    if bad is not None and want.ndim == 0:  # one limit, or one word, for all
        want = np.broadcast_to(want, got.shape)
    if want.shape != got.shape:
        return Compared(1, (Finding(f"shape of {what}", {}, str(want.shape), str(got.shape)),))
    wrong = want != got if bad is None else _array(bad)
    if bad is None and want.dtype.kind == "f" and wrong.any():
        wrong &= ~((want != want) & (got != got))
    if not wrong.any():
        return Compared(want.size)
    where = np.argwhere(wrong)
    first = tuple(int(i) for i in where[0])
    seen = spread(wrong.shape, where, place)
    found = Finding(what, place(first), _text(want[first]), _text(got[first]), len(where), seen)
    return Compared(want.size, (found,))


def differ_bits(what: str, expected: Tensor, actual: Tensor, place: Place) -> Compared:
    """Compare raw bits, so that NaN payloads and -0.0 count; values are shown beside them."""
    if same_bits(expected, actual):
        return Compared(expected.numel())
    if expected.dtype != actual.dtype:  # the same bits mean something else
        return Compared(1, (Finding(f"dtype of {what}", {}, str(expected.dtype), str(actual.dtype)),))
    if expected.shape == actual.shape and is_digest(expected):
        return _differ_digests(what.removeprefix("digest of "), expected, actual, place)
    compared = differ(f"{what} bits", bits(expected), bits(actual), place)
    if not compared.findings or expected.shape != actual.shape:
        return compared
    finding = compared.findings[0]
    first = tuple(torch.nonzero(bits(expected) != bits(actual))[0].tolist())
    finding = replace(finding, expected=_bits_text(expected[first]), actual=_bits_text(actual[first]))
    return replace(compared, findings=(finding,))


def _differ_digests(what: str, expected: Tensor, actual: Tensor, place: Place) -> Compared:
    """Two digests of the same bits; where inside them the difference is nobody recorded."""
    wrong = (expected != actual).any(-1)
    first = tuple(torch.nonzero(wrong)[0].tolist())
    inside = ("column", "weight_row", "weight_column", "element")
    where = {axis: index for axis, index in place((*first, 0)).items() if axis not in inside}
    want, got = ("".join(f"{half % 2**64:016x}" for half in one[first].tolist()) for one in (expected, actual))
    return Compared(
        expected.numel(), (Finding(f"digest of {what}", where, want, f"{got}: the bits differ", int(wrong.sum())),)
    )


def differ_beyond(
    what: str, expected: Tensor, actual: Tensor, variance: Tensor, arithmetic: Arithmetic, place: Place
) -> Compared:
    """Compare float64 results with an oracle's: equal, or within their bound where the arithmetic rounds."""
    same_shape = expected.shape == actual.shape
    bad = arithmetic.wrong(expected, actual, variance) if same_shape else None
    return differ(what, expected, actual, place, bad=bad)


def unchanged_inputs(s: Step, op: str) -> Iterator[Compared]:
    """The inputs of each rank after the call with those before, every field of a plan among them."""
    finished = {rank: call for rank, call in enumerate(s.calls(op)) if "changed" in call.info}
    for rank, call in finished.items():
        changed = ", ".join(call.info["changed"]) or "nothing"
        what = f"what {op} changed of its inputs"
        compared = differ(what, ["nothing"], [changed], lambda i: {"rank": rank})  # noqa: B023
        yield replace(compared, examined=len(call.info.get("inputs", [])))
    if lost := [rank for rank in range(s.case.R) if rank not in finished]:
        raise Missing(f"rank {lost[0]} did not finish {op} in step {s.name!r}")


def axes(*names: str) -> Place:
    """Name the axes of an index tuple."""
    return lambda index: dict(zip(names, index, strict=True))


def _array(value: Any) -> npt.NDArray[Any]:
    if isinstance(value, Tensor):
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    array: npt.NDArray[Any] = np.asarray(value)
    return array


def _bits_text(value: Tensor) -> str:
    width = value.element_size()
    return f"{value.item():.9g} (0x{int(bits(value)) % 2 ** (8 * width):0{2 * width}x})"


def _text(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, np.floating) else str(value)


for _module in _MODULES:
    importlib.import_module(f"{__name__}.{_module}")
