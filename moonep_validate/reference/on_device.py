"""The stand-in of generation A for tensors on any device: it works on the CPU, and answers where it was asked.

Good enough to run an engine's own code on a GPU; it says nothing about GPU communication.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from moonep_validate.reference import moonep_a
from moonep_validate.reference.moonep_a import MoonEPCommPlan

__all__ = ["Buffer", "MoonEPCommPlan"]


def _on_cpu(method: Any) -> Any:
    """A method whose tensors and plans go to the CPU, and whose results come back to the first tensor's device."""

    @wraps(method)
    def wrapper(self: Any, *args: Any, **named: Any) -> Any:
        device = next(value.device for value in (*args, *named.values()) if isinstance(value, Tensor))
        out = method(self, *(_to("cpu", a) for a in args), **{name: _to("cpu", a) for name, a in named.items()})
        return tuple(_to(device, value) for value in out)

    return wrapper


def _plan_on_cpu(method: Any) -> Any:
    """A method whose plan goes to the CPU; its other tensors are changed in place, where they are."""

    @wraps(method)
    def wrapper(self: Any, plan: MoonEPCommPlan, *args: Any, **named: Any) -> Any:
        return method(self, _to("cpu", plan), *args, **named)

    return wrapper


def _to(device: torch.device | str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, MoonEPCommPlan):
        return replace(value, **{name: _to(device, field) for name, field in vars(value).items()})
    return value


class Buffer(moonep_a.Buffer):
    """See ``moonep_a.Buffer``; on a GPU without zero-copy, since a view cannot be on two devices."""

    dispatch = _on_cpu(moonep_a.Buffer.dispatch)
    combine = _on_cpu(moonep_a.Buffer.combine)
    prefetch_weight = _plan_on_cpu(moonep_a.Buffer.prefetch_weight)
