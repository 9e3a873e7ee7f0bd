"""The experts as three grouped matrix products of torch, on CPU and CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.subjects.experts.implementation import Activation, Experts, Unavailable
from moonep_validate.subjects.vouch import part_of

_NAMES = (("torch.nn.functional", "grouped_mm"), ("torch", "_grouped_mm"))


def make(device: str) -> Experts:
    """``torch.nn.functional.grouped_mm``, or ``torch._grouped_mm`` where that is not public yet.

    Raises:
        Unavailable: if this torch has neither, or the one it has fails, or is wrong in shape, on a small product.
    """
    name, grouped_mm = _grouped_mm()
    _try(name, grouped_mm, device)

    def compute(
        rows: Tensor, row_weights: Tensor, cu_seqlens: Tensor, weights: Sequence[Tensor], activation: Activation
    ) -> Tensor:
        gate, up, down = weights

        def product(x: Tensor, weight: Tensor) -> Tensor:
            result: Tensor = grouped_mm(x, weight.transpose(1, 2), offs=cu_seqlens)
            return result

        inner = activation(product(rows, gate).float(), product(rows, up).float()).to(rows.dtype)
        return (product(inner, down) * row_weights[:, None]).to(rows.dtype)

    return Experts(compute, part_of(torch, package=name), device)


def refuses(case: Case) -> str | None:
    """Why a case does not fit, or None."""
    if case.I % 8:
        return f"I={case.I}: torch's grouped matrix product needs rows of whole 16 bytes, I a multiple of 8"
    return None


def _grouped_mm() -> tuple[str, Callable[..., Any]]:
    homes = {"torch": torch, "torch.nn.functional": torch.nn.functional}
    for home, name in _NAMES:
        if callable(found := getattr(homes[home], name, None)):
            return f"{home}.{name}", found
    tried = " nor ".join(f"{home}.{name}" for home, name in _NAMES)
    raise Unavailable(f"torch {torch.__version__} has neither {tried}; use torch 2.8 or later")


def _try(name: str, grouped_mm: Callable[..., Any], device: str) -> None:
    """One small product with an empty group and rows behind the last one; what it cannot do, it says here."""
    x = torch.ones(5, 16, dtype=torch.bfloat16, device=device)
    weight = torch.ones(3, 16, 24, dtype=torch.bfloat16, device=device)
    ends = torch.tensor([2, 2, 4], dtype=torch.int32, device=device)
    try:
        found = grouped_mm(x, weight, offs=ends)[:4].float().cpu()
    except Exception as error:  # whatever it raises is the reason
        text = " ".join(str(error).split())[:200]
        raise Unavailable(
            f"{name} of torch {torch.__version__} on {device}: {type(error).__name__}: {text}"
        ) from None
    if found.shape != (4, 24) or not bool((found == 16).all()):
        raise Unavailable(f"{name} of torch {torch.__version__} on {device} is wrong on a product of ones")
