"""What is an implementation of the compute stage, as data? What it computes with, and what it rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from moonep_validate.trace.trace import Part

#: gate and up of float32, one shape -> float32.
Activation = Callable[[Tensor, Tensor], Tensor]
#: ``(rows [NvS, H] bf16, row_weights [NvS] float32, cu_seqlens [G] int32, weights, activation) -> [NvS, H] bf16``
#: Weights are gate and up ``[G, I, H]`` and down ``[G, H, I]``, then their scales where the format has scales.
#: Rows after the last group are undefined, in what comes in and in what goes out.
Compute = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor], Activation], Tensor]

ACTIVATIONS = ("silu", "situ")
DEVICES = ("cpu", "cuda")
#: The device of a part that computes where its rows are; nothing is moved for it.
ANYWHERE = "any"


class Unavailable(RuntimeError):
    """A part that cannot run here: the message is the whole reason."""


@dataclass(frozen=True)
class Experts:
    """One implementation that was found and can run.

    Attributes:
        compute: see ``Compute``.
        part: what was imported, with the rounding points that it has beyond those of the reference.
        device: where its tensors live, one of ``DEVICES``; others are copied there and back. Or ``ANYWHERE``.
        activations: of ``ACTIVATIONS``.
        formats: of ``formats.stored``; weights in another one are decoded to BF16 for it, which is exact for MXFP4
            (but for scales beyond the range of BF16), and recorded.
    """

    compute: Compute
    part: Part
    device: str = "cpu"
    activations: tuple[str, ...] = ACTIVATIONS
    formats: tuple[str, ...] = ("bf16",)

    @property
    def weight_at(self) -> str:
        """Where the route weight is applied, ``before_w2`` or ``after_w2``; it decides what is rounded."""
        return "before_w2" if "weighted_activation" in self.part.rounds else "after_w2"
