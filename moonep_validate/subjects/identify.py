"""What is a module? Asked in a process of its own, since importing outside code can do anything."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from typing import Any

from moonep_validate.cases.case import CaseError
from moonep_validate.subjects.buffer.api import detect_generation, import_module
from moonep_validate.subjects.provenance import provenance
from moonep_validate.trace.schema import SchemaError
from moonep_validate.trace.trace import Part
from moonep_validate.worlds import launch
from moonep_validate.worlds.ask import answer, ask

SECONDS = 120


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
    said = ask(__name__, [module, api or ""], environment, SECONDS)
    if said.data is None and said.ended is None:
        raise CaseError(f"--moonep-module {module} did not finish importing within {SECONDS} s")
    if said.data is None:
        raise CaseError(
            f"--moonep-module {module}: importing it ended the process with code {said.ended}: "
            f"{said.last_words.rpartition(' | ')[2]}"
        )
    try:
        if reason := said.data.get("error") or launch.difference(said.data.get("identity")):
            raise CaseError(reason if str(reason).startswith("--") else f"--moonep-module {module}: {reason}")
        part = Part.from_json(said.data["part"])
        generation = str(said.data["generation"])
    except (SchemaError, LookupError) as error:
        raise CaseError(f"--moonep-module {module}: what it says about itself cannot be read: {error}") from None
    return generation, replace(part, policy=policy) if policy else part


def _answer(module_name: str, api: str | None) -> dict[str, Any]:
    try:
        module = import_module(module_name)
        generation = detect_generation(module.Buffer, api)
    except CaseError as error:
        return {"error": str(error)}
    found = provenance(module)
    part = Part(
        origin=getattr(module, "__moonep_origin__", "real"),
        policy=getattr(module, "__moonep_policy__", "legal"),
        **asdict(found),
    )
    return {"generation": generation, "part": asdict(part)}


def main() -> None:
    """In a process of its own: MODULE, its API or nothing, and where to answer."""
    module, api, descriptor = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)
    launch.adopt_orphans()
    said = _answer(module, api or None)
    answer({**said, "identity": launch.identity()}, descriptor)
    os._exit(0)  # what the module started need not end
