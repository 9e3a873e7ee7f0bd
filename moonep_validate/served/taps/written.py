"""What is in the file of a sampled call? A trace with the calls of one rank, and who made them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from moonep_validate.cases.case import Case
from moonep_validate.judge.stages import STAGES
from moonep_validate.trace.trace import Call, Part, Trace

SUFFIX = ".rank"
#: What is not in such a trace.
_LEAVES_OPEN = (
    "the calls that were not sampled, and whether the engine loaded the checkpoint's bytes; "
    "attention, router and scheduling were not looked at"
)


def file_name(number: int, rank: int) -> str:
    """Of a call on a rank."""
    return f"{number:09d}-{rank}{SUFFIX}"


def write(path: Path, case: Case, rank: int, calls: list[Call], keep: str) -> None:
    """Write the calls of a rank, all at once: an engine may be ended at any time."""
    name, engine, moonep = _who()
    trace = Trace(
        case,
        name,
        [calls if rank == other else [] for other in range(case.R)],
        {stage.name: moonep if stage.owner == "moonep" else engine for stage in STAGES.values()}
        | {stage.name: Part("none", "nothing", "-") for stage in STAGES.values() if stage.owner == "model"},
        proves=f"MoE layers of {name} {engine.version} were right in the calls that were sampled while it served",
        leaves_open=_LEAVES_OPEN,
        recording=keep,
        layer_door=True,
    )
    part = path.with_suffix(".part")
    trace.save(part)
    part.replace(path)


@cache
def _who() -> tuple[str, Part, Part]:
    """The engine that was imported in this process, and its moonep."""
    from moonep_validate.subjects.engines.start import KNOWN, integration
    from moonep_validate.subjects.vouch import part_of

    moonep = import_module("moonep")
    policy = getattr(moonep, "__moonep_policy__", "legal")
    transport = part_of(moonep, moonep.Buffer, policy=policy)
    name = next((engine for engine in KNOWN if engine in sys.modules), "")
    if not name:
        return (
            "an engine",
            Part("real", "an engine", "unknown", doubts=("it is none that is known here",)),
            transport,
        )
    engine = part_of(sys.modules[name], seams=_seams(), rounds=integration(name).rounds)
    return name, engine, transport


def _seams() -> Sequence[str]:
    """What hooks.py replaced in this process."""
    hooks: Any = import_module("moonep_validate.served.taps.hooks")
    return tuple(hooks.REPLACED)
