"""What is a module? Asked in a process of its own, since importing outside code can do anything.

``python -m moonep_validate.subjects.identify MODULE [A|B]`` prints one JSON object as its last line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

from moonep_validate.cases.case import CaseError
from moonep_validate.subjects.buffer.api import detect_generation, import_module
from moonep_validate.subjects.provenance import provenance
from moonep_validate.trace.trace import Part

SECONDS = 120
_MARK = "moonep-validate-identify:"


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
    command = [sys.executable, "-m", __name__, module, *([api] if api else [])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **environment}
        )
    except subprocess.TimeoutExpired:
        raise CaseError(f"--moonep-module {module} did not finish importing within {SECONDS} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        tail = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise CaseError(
            f"--moonep-module {module}: importing it ended the process with code {done.returncode}: {tail}"
        )
    answer = json.loads(lines[-1][len(_MARK) :])
    if "error" in answer:
        raise CaseError(answer["error"])
    part = Part.from_json(answer["part"])
    return answer["generation"], replace(part, policy=policy) if policy else part


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


if __name__ == "__main__":
    print(_MARK + json.dumps(_answer(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)))
