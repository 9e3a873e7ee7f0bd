"""What is a module with MoonEP's ``Buffer``? Its API generation and where it came from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from moonep_validate.subjects.ask import ask
from moonep_validate.subjects.buffer.api import detect_generation, import_module
from moonep_validate.subjects.vouch import part_of
from moonep_validate.trace.trace import Part


@dataclass(frozen=True)
class _Identified:
    generation: str
    part: Part


def identify(module: str, api: str | None, policy: str | None, environment: dict[str, str]) -> tuple[str, Part]:
    """Import a module elsewhere and report what it is.

    Args:
        module: name to import.
        api: generation to use where the signatures do not tell.
        policy: ``upstream`` or ``legal``; None asks the module.
        environment: extra variables.

    Returns:
        Its API generation and its part.

    Raises:
        CaseError: if it cannot be imported, has no ``Buffer``, or hides its generation.
    """
    found = ask(_Identified, "module", {"name": module, "api": api}, f"--moonep-module {module}", environment)
    return found.generation, replace(found.part, policy=policy) if policy else found.part


def answer(name: str, api: str | None) -> dict[str, Any]:
    """What ``identify`` asks, in the other process: ``{"generation", "part"}``.

    Raises:
        CaseError: see ``identify``.
    """
    module = import_module(name)
    generation = detect_generation(module.Buffer, api)
    part = part_of(module, module.Buffer, policy=getattr(module, "__moonep_policy__", "legal"))
    return {"generation": generation, "part": asdict(part)}
