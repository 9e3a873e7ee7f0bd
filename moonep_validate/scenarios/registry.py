"""Which scenarios are there, and what does each need?"""

from __future__ import annotations

from collections.abc import Callable

from moonep_validate.scenarios import base, buffer, engine, relations
from moonep_validate.scenarios.rig import Rig

SCENARIOS: dict[str, Callable[[Rig], None]] = {
    function.__name__: function
    for function in (
        base.base,
        base.two_poisons,
        base.marked_slots,
        buffer.variants,
        buffer.nemesis,
        buffer.graph,
        buffer.combine_only,
        buffer.dispatch_only,
        buffer.packed,
        buffer.pools,
        buffer.grouped,
        buffer.grads,
        buffer.life,
        buffer.refusals,
        buffer.destructive,
        base.layers,
        base.token_counts,
        engine.invalid_ids,
        engine.abort,
        engine.reload,
        engine.answers,
        relations.metamorphic,
        relations.independent,
        relations.linear,
        relations.slot_counts,
    )
}

#: Scenarios that call a Buffer stage by stage, that need a GPU, and that need an engine around a Buffer.
NEEDS_BUFFER = (
    "variants",
    "nemesis",
    "graph",
    "combine_only",
    "dispatch_only",
    "packed",
    "pools",
    "grouped",
    "grads",
    "life",
    "refusals",
    "destructive",
    "slot_counts",
)
NEEDS_GPU = ("graph",)
NEEDS_ENGINE = ("invalid_ids", "abort", "reload", "answers")
