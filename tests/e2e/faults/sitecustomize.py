"""A served vLLM with a mistake in it: ``MOONEP_SERVED_FAULT`` names which, this folder is on its ``PYTHONPATH``.

Nothing installed is changed. A fault lies around the sampler's own hooks, as a mistake of the engine does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from moonep_validate.served.taps.hooks import _AfterImport

_MOE = "vllm.model_executor.layers.fused_moe"


def prefetch_skipped(module: Any) -> None:
    """The engine never fills the slots."""
    module.Buffer.prefetch_weight = lambda self, *args, **kwargs: None


def prefetch_of_first_layer(module: Any) -> None:
    """The slots of the first layer are filled, whatever layer it is: those of others keep what they had."""
    real = module.Buffer.prefetch_weight
    first: dict[str, Any] = {}

    def prefetch(self: Any, plan: Any, **full: Any) -> Any:
        first.update({} if first else full)
        return real(self, plan=plan, **first)

    module.Buffer.prefetch_weight = prefetch


def slots_from_first_layer(module: Any) -> None:
    """The right slots get the experts of the first layer."""
    real = module.Buffer.prefetch_weight
    first: dict[str, Any] = {}

    def prefetch(self: Any, plan: Any, **full: Any) -> Any:
        from torch import distributed

        first.update({} if first else full)
        out = real(self, plan=plan, **full)
        mine = plan.experts_to_copy[distributed.get_rank()].tolist()
        for name, tensor in full.items():
            for slot, expert in enumerate(mine):
                if expert >= 0:
                    tensor[len(tensor) - len(mine) + slot] = first[name][expert]
        return out

    module.Buffer.prefetch_weight = prefetch


def no_route_weights(module: Any) -> None:
    """The experts leave the route weights out."""
    real = module.MoonEPExperts.apply

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["topk_weights"] = kwargs["topk_weights"].new_ones(kwargs["topk_weights"].shape)
        return real(self, *args, **kwargs)

    module.MoonEPExperts.apply = apply


FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "prefetch-skipped": ("moonep", prefetch_skipped),
    "prefetch-of-first-layer": ("moonep", prefetch_of_first_layer),
    "slots-from-first-layer": ("moonep", slots_from_first_layer),
    "no-route-weights": (f"{_MOE}.experts.moonep_experts", no_route_weights),
}

if _name := os.environ.get("MOONEP_SERVED_FAULT"):
    _module, _fault = FAULTS[_name]
    sys.meta_path.insert(0, _AfterImport({_module: _fault}))
