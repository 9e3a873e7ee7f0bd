"""Who computes the expert rows? Parts for the seam ``experts``, by name, each tried before it is used.

``NAME`` or ``NAME:DEVICE`` of ``KNOWN``, or ``MODULE:FUNCTION`` of your own: a function as ``Compute`` says,
without the activation, which is fused. It may say about itself, as attributes: ``takes_activation`` (it gets
the activation as fifth argument), ``rounds`` (of ``oracle.arithmetic.ROUNDS``), ``activations``, ``formats`` and
``device``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moonep_validate.cases.case import Case, CaseError, Spec
from moonep_validate.data.k3 import SITU_BETA, SITU_LINEAR_BETA
from moonep_validate.data.problem import format_of
from moonep_validate.formats.stored import FORMATS
from moonep_validate.judge.oracle.arithmetic import ROUNDS
from moonep_validate.subjects.ask import ask
from moonep_validate.subjects.experts import deepgemm, loop, torch_grouped
from moonep_validate.subjects.experts.implementation import (
    ACTIVATIONS,
    ANYWHERE,
    DEVICES,
    Activation,
    Experts,
    Unavailable,
)
from moonep_validate.subjects.vouch import part_of
from moonep_validate.trace.schema import build
from moonep_validate.trace.trace import Part

DEFAULT = "reference"
#: Parts that are this project's or torch's; all others are code from outside, which runs in workers only.
OWN = ("reference", "float64", "torch")
#: name -> (how it is made, the device where none is named).
KNOWN: dict[str, tuple[Callable[[str], Experts], str]] = {
    "reference": (loop.reference, ANYWHERE),
    "float64": (loop.float64, ANYWHERE),
    "torch": (torch_grouped.make, "cpu"),
    "deep_gemm": (deepgemm.bf16, "cuda"),
    "deep_gemm_fp8": (deepgemm.fp8_blocks, "cuda"),
    "deep_gemm_fp8_fp4": (deepgemm.fp8_fp4, "cuda"),
}
#: name -> why a case does not fit its kernels, or None.
_REFUSES = {
    "torch": torch_grouped.refuses,
    "deep_gemm": deepgemm.refuses_rows,
    "deep_gemm_fp8": deepgemm.refuses_blocks,
}
_ACTIVATION_OF = {"moe": "silu", "k3": "situ"}


def is_own(name: str) -> bool:
    """Whether a part may run in the process that judges."""
    return name.partition(":")[0] in OWN


@dataclass(frozen=True)
class Identified:
    """What is known of a part where it is not imported.

    Attributes:
        part: what it is, or None where it cannot run.
        activations: of ``ACTIVATIONS``, that it has.
        reason: why it cannot run, or empty.
    """

    part: Part | None
    activations: tuple[str, ...] = ()
    reason: str = ""


def identify(name: str, environment: Mapping[str, str] | None = None) -> Identified:
    """What ``name`` is here, or why it cannot run here; code from outside is asked in another process.

    Raises:
        CaseError: for a name that is none, or code that cannot be had.
    """
    if is_own(name):
        return build(Identified, answer(name))
    return ask(Identified, "experts", {"name": name}, f"--experts {name}", dict(environment or {}))


def answer(name: str) -> dict[str, Any]:
    """An ``Identified`` as JSON data, made in this process.

    Raises:
        CaseError: see ``identify``.
    """
    try:
        found = find(name)
    except Unavailable as reason:
        return asdict(Identified(None, (), f"experts {name}: {reason}"))
    return asdict(Identified(found.part, found.activations))


@lru_cache(maxsize=8)
def find(name: str) -> Experts:
    """The part of that name.

    Raises:
        CaseError: for a name that is none, or a function that says what is not known about itself.
        Unavailable: if it cannot run here.
    """
    first, _, rest = name.partition(":")
    if first not in KNOWN:
        if not rest:
            raise CaseError(f"--experts {name}: known are {', '.join(KNOWN)}, or MODULE:FUNCTION")
        return _of_user(first, rest)
    make, device = KNOWN[first]
    if rest and rest not in DEVICES:
        raise CaseError(f"--experts {name}: {first} runs on {' or '.join(DEVICES)}, not {rest!r}")
    device = rest or device
    if device == "cuda" and not torch.cuda.is_available():
        raise Unavailable(f"it needs a GPU, and torch {torch.__version__} sees none")
    return make(device)


def unsupported(name: str, activations: Sequence[str], case: Case) -> str | None:
    """Why a part with these activations cannot compute a case, or None; nothing is imported."""
    activation, refuses = _ACTIVATION_OF[case.model.name], _REFUSES.get(name.partition(":")[0])
    if activation not in activations:
        return f"experts {name} has {', '.join(activations)}; model {case.model} needs {activation}"
    reason = refuses(case) if refuses else None
    return f"experts {name}: {reason}" if reason else None


def decodes(name: str, case: Case) -> bool:
    """Whether a part is given decoded BF16 weights, since it does not take the case's format."""
    return case.format.name not in find(name).formats


def prepared(name: str, case: Case, activation: Activation) -> Callable[..., Tensor]:
    """The part as the seam calls it: on its own device, with weights in a format that it takes.

    Returns:
        ``(rows, row_weights, cu_seqlens, weights) -> [NvS, H]`` bf16, on the device of the rows.
    """
    found, decoding = find(name), decodes(name, case)

    def experts(rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Sequence[Tensor]) -> Tensor:
        moved, (x, factors, ends) = list(weights), (rows, row_weights, cu_seqlens)
        if found.device not in (ANYWHERE, rows.device.type):
            x, factors, ends = (tensor.to(found.device) for tensor in (x, factors, ends))
            moved = [weight.to(found.device) for weight in moved]
        given = format_of(case).values(moved, torch.bfloat16) if decoding else moved
        return found.compute(x, factors, ends, given, activation).to(rows.device)

    return experts


def activation_named(text: str) -> str:
    """``silu``, or ``situ`` with its caps 4 and 25 (``situ:4,25``); what else engines have is refused.

    Raises:
        CaseError: for another activation, or for clamp, alpha or caps that no oracle here has.
    """
    spec = Spec.parse(text)
    if spec.name not in ACTIVATIONS:
        raise CaseError(f"activation {text!r} has no oracle; known: {', '.join(ACTIVATIONS)}")
    caps = tuple(map(float, spec.args)) if spec.args else ()
    if caps and (spec.name, caps) != ("situ", (SITU_BETA, SITU_LINEAR_BETA)):
        raise CaseError(
            f"activation {text!r}: clamp, alpha and other caps have no oracle; "
            f"silu takes none, situ has {SITU_BETA:g},{SITU_LINEAR_BETA:g} (a clamp is no smooth cap)"
        )
    return spec.name


def _of_user(module_name: str, function_name: str) -> Experts:
    try:
        module = importlib.import_module(module_name)
        function: Callable[..., Any] = getattr(module, function_name)
    except Exception as error:  # an import may raise anything; it is never replaced by another part
        name = f"{module_name}:{function_name}"
        raise CaseError(f"--experts {name} cannot be had: {type(error).__name__}: {error}") from None
    rounds = _said(function, "rounds", (), ROUNDS)
    activations = _said(function, "activations", ("silu",), ACTIVATIONS)
    formats = _said(function, "formats", ("bf16",), tuple(FORMATS))
    part = part_of(module, function, rounds=rounds)
    device = getattr(function, "device", "cpu")
    if device not in DEVICES:
        raise CaseError(f"{function_name}.device is {device!r}; known: {', '.join(DEVICES)}")
    takes = getattr(function, "takes_activation", False)

    def compute(
        rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Sequence[Tensor], activation: Activation
    ) -> Tensor:
        extra = (activation,) if takes else ()
        result: Tensor = function(rows, row_weights, cu_seqlens, weights, *extra)
        return result

    return Experts(compute, part, device, activations, formats)


def _said(function: object, name: str, default: tuple[str, ...], known: Sequence[str]) -> tuple[str, ...]:
    """What a function says about itself, each value a known one."""
    values = tuple(getattr(function, name, default))
    for value in values:
        if name == "activations":
            activation_named(value)
        elif value not in known:
            raise CaseError(f"{name} of the experts function: {value!r} is not known; known: {', '.join(known)}")
    return values
