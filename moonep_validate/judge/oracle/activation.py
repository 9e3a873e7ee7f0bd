"""What happens between an expert's two matrix products? A factor of the gate times a factor of up, with slopes.

``silu``
    ``g * sigmoid(g)`` times ``u``.
``situ``
    ``beta * tanh(g / beta) * sigmoid(g)`` times ``linear_beta * tanh(u / linear_beta)``, Kimi-K3's, with smooth
    caps of 4 and 25 (public: vLLM and SGLang, ``kimi_k3.py``). Below |g| = 0.3 it cannot be told from SiLU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moonep_validate.cases.case import Spec
from moonep_validate.data.k3 import SITU_BETA, SITU_LINEAR_BETA

Factor = Callable[[Tensor], tuple[Tensor, Tensor]]  # value and slope, both of the input's shape and dtype


@dataclass(frozen=True)
class Activation:
    """``gate(g) * up(u)``; each factor gives its value and its derivative."""

    gate: Factor
    up: Factor


def _silu(g: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(g)
    return g * sigmoid, sigmoid * (1 + g * (1 - sigmoid))


def _unchanged(u: Tensor) -> tuple[Tensor, Tensor]:
    return u, torch.ones_like(u)


def _capped(x: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    tanh = torch.tanh(x / cap)
    return cap * tanh, 1 - tanh**2


def _situ_gate(g: Tensor) -> tuple[Tensor, Tensor]:
    capped, slope = _capped(g, SITU_BETA)
    sigmoid = torch.sigmoid(g)
    return capped * sigmoid, sigmoid * (slope + capped * (1 - sigmoid))


def _situ_up(u: Tensor) -> tuple[Tensor, Tensor]:
    return _capped(u, SITU_LINEAR_BETA)


SILU = Activation(_silu, _unchanged)
SITU = Activation(_situ_gate, _situ_up)
_OF_MODEL = {"moe": SILU, "k3": SITU}


def activation_of(model: Spec) -> Activation:
    """The activation of a case's model."""
    return _OF_MODEL[model.name]
