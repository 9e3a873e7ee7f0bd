"""A pair is red: in which stage of which layer? The next command, with the shapes of the model that was served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moonep_validate.cases.case import Case
from moonep_validate.errors import CaseError
from moonep_validate.served.answers import Who

#: Engines whose MoE layer can be judged, with the slots and the padding that they always ask for.
_ENGINES = {"vllm": "slots4+pad128", "sglang": "slots4+pad128"}
#: Names of a model's sizes in its config.json, over families of models.
_NAMES = {
    "E": ("num_experts", "n_routed_experts", "num_local_experts"),
    "K": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "H": ("hidden_size",),
    "I": ("moe_intermediate_size", "intermediate_size"),
}
#: Routings under which slots are used by one expert, by many, and by none.
_ROUTINGS = ("hot:0", "zipf:1.2", "balanced")


def cases(who: Who) -> list[str]:
    """Case lines for the MoE layer of an engine with the model's shapes; none where that cannot be said."""
    sizes = _sizes(Path(who.model) / "config.json")
    if who.engine not in _ENGINES or not sizes:
        return []
    ranks = max(2, len(who.path.dispatches) if who.path else 2)
    words = "+".join(f"{name}{size}" for name, size in sizes.items())
    found = []
    for routing in _ROUTINGS:
        try:
            found.append(str(Case.parse(f"genA+R{ranks}+S128+{words}+{_ENGINES[who.engine]}+{routing}+fill:real")))
        except CaseError:
            continue
    return found


def arguments(who: Who) -> list[str]:
    """Arguments of `moonep-validate` that judge the MoE layer of a candidate; none where that cannot be said."""
    found = cases(who)
    return (
        ["run", "--subject", who.engine, *(word for case in found for word in ("--case", case))] if found else []
    )


def _sizes(path: Path) -> dict[str, int]:
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    config = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    found = {
        size: next((config[name] for name in names if type(config.get(name)) is int), 0)
        for size, names in _NAMES.items()
    }
    return found if all(found.values()) else {}


def meaning(code: int) -> str:
    """What the exit code of that command says of the pair."""
    if code == 0:
        return "the MoE layers are right on these cases: look outside (attention, router, loading, scheduling)"
    if code == 1:
        return "a stage of the MoE layer is wrong, see above"
    return f"nothing can be said of the MoE layers (exit code {code})"
