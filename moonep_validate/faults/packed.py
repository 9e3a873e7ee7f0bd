"""Faults of bytes between a checkpoint and a rank's packed weights: those of formats/faults.py, in the path.

They sit on the weights in their stored form, of the case word ``mxfp4`` only, and change those of one rank; what
the recorder keeps as loaded stays the truth. Left out are faults of what the path does not have: tiles and words
of scales are made by a kernel's own conversion, and no weight is padded.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from moonep_validate.faults import Next, fault
from moonep_validate.formats import layouts
from moonep_validate.formats.faults import BYTE_FAULTS, ByteFault
from moonep_validate.formats.loaded import Loaded

_ELSEWHERE = ("scales-never-tiled", "scales-tiled-twice", "scale-word-order", "padding-not-zero")


def _register(of: ByteFault) -> None:
    def changed(call: Next, weights: Mapping[str, Tensor], seed: int = 0) -> Mapping[str, Tensor]:
        result: Mapping[str, Tensor] = call(_applied(of, weights, seed) if _is_mxfp4(weights) else weights)
        return result

    changed.__doc__ = f"One rank loads packed weights in which {of.summary}."
    refused = of.id == "scale-nan"
    fault(f"loaded-{of.id}", on="weights.stored", stage="load", bugs=of.bugs, crashes=refused)(changed)


def _is_mxfp4(weights: Mapping[str, Tensor]) -> bool:
    """Whether there is a scale byte for each 16 bytes of codes."""
    scale = weights.get("gate_scale")
    return scale is not None and scale.element_size() == 1 and scale.numel() * 16 == weights["gate"].numel()


def _applied(of: ByteFault, weights: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    codes, scale = (layouts.fuse(weights[f"gate{kind}"], weights[f"up{kind}"]) for kind in ("", "_scale"))
    loaded = of.apply(Loaded(codes, scale, weights["down"], weights["down_scale"]), seed)
    gate, up = layouts.split(loaded.w13)
    gate_scale, up_scale = layouts.split(loaded.w13_scale)
    scales = {"gate_scale": gate_scale, "up_scale": up_scale, "down_scale": loaded.w2_scale}
    return {"gate": gate, "up": up, "down": loaded.w2, **scales}


for _one in BYTE_FAULTS.values():
    if _one.id not in _ELSEWHERE:
        _register(_one)
