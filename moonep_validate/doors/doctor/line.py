"""What does doctor say of one thing, and what can run then? A line each, and the tiers that need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: What can be run here, by name, and what that is.
TIERS = {
    "threads": "the reference, ranks as threads, CPU",
    "processes": "a module or the reference, ranks as processes, CPU",
    "gpu": "one GPU: --device cuda",
    "gpus": "two GPUs or more: the reference over NVLink",
    "moonep": "the real MoonEP",
    "vllm": "vLLM's MoE layer",
    "sglang": "SGLang's MoE layer",
    "deepgemm": "--experts with DeepGEMM",
}
#: State of a line -> whether it stops the tiers that need it; None: not known.
STATES: dict[str, bool | None] = {"ok": False, "note": False, "missing": True, "broken": True, "unknown": None}


@dataclass(frozen=True)
class Line:
    """One finding.

    Attributes:
        what: the thing.
        state: of ``STATES``; ``note`` works, and is worth a look.
        value: what was found, in words.
        needed_by: the tiers that cannot run without it.
        fix: what to do where it is not ``ok``.
    """

    what: str
    state: str
    value: str
    needed_by: tuple[str, ...] = ()
    fix: str = ""


@dataclass(frozen=True)
class Tier:
    """Whether one tier can run: ``yes``, ``no`` or ``unknown``, and the lines that say why not."""

    name: str
    can_run: str
    why: tuple[str, ...]


def tiers(lines: Sequence[Line]) -> list[Tier]:
    """What can run, by what is missing or broken."""
    return [_tier(name, [line for line in lines if name in line.needed_by]) for name in TIERS]


def _tier(name: str, lines: Sequence[Line]) -> Tier:
    stops = [line for line in lines if STATES[line.state]]
    asks = [line for line in lines if STATES[line.state] is None]
    why = tuple(f"{line.what}: {line.value}" for line in stops or asks)
    return Tier(name, "no" if stops else "unknown" if asks else "yes", why)
