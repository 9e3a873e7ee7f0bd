"""How is code from outside asked what it is? In a process of its own, with a deadline.

Importing it can do anything, so the process that judges imports none of it: an import that never returns, exits or
crashes is one sentence.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from moonep_validate.cases.case import CaseError
from moonep_validate.trace.schema import SchemaError, build
from moonep_validate.worlds import launch
from moonep_validate.worlds.ask import answer as answer_through
from moonep_validate.worlds.ask import ask as ask_process

T = TypeVar("T")
#: Importing an engine's package takes half a minute on two cores.
SECONDS = 120
#: Question -> who answers it in the other process: ``(arguments) -> JSON object``.
_ANSWERS = {
    "module": "moonep_validate.subjects.identify:answer",
    "experts": "moonep_validate.subjects.experts:answer",
    "engine": "moonep_validate.subjects.engines.start:answer",
}


def ask(
    kind: type[T], question: str, arguments: dict[str, Any], named: str, environment: dict[str, str] | None = None
) -> T:
    """Ask in another process.

    Args:
        kind: a dataclass, which is what the answer must be.
        question: of ``_ANSWERS``.
        arguments: JSON data for who answers.
        named: the option and its value, for errors.
        environment: extra variables.

    Raises:
        CaseError: what the answer says is wrong, or why there is none.
    """
    said = ask_process(__name__, [question, json.dumps(arguments)], environment or {}, SECONDS)
    if said.data is None and said.ended is None:
        raise CaseError(f"{named} did not finish importing within {SECONDS} s")
    if said.data is None:
        last = said.last_words.rpartition(" | ")[2]
        raise CaseError(f"{named}: importing it ended the process with code {said.ended}: {last}")
    if reason := said.data.get("error") or launch.difference(said.data.get("identity")):
        raise CaseError(reason if str(reason).startswith("--") else f"{named}: {reason}")
    try:
        return build(kind, said.data.get("found"), "it")
    except SchemaError as error:
        raise CaseError(f"{named}: what it says about itself cannot be read: {error}") from None


def main() -> None:
    """In a process of its own: the question, its arguments, and where to answer."""
    question, arguments, descriptor = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)
    launch.adopt_orphans()
    module, _, name = _ANSWERS[question].partition(":")
    found: Callable[..., dict[str, Any]] = getattr(importlib.import_module(module), name)
    said: dict[str, Any]
    try:
        said = {"found": found(**json.loads(arguments)), "identity": launch.identity()}
    except CaseError as error:
        said = {"error": str(error)}
    answer_through(said, descriptor)
    os._exit(0)  # what the import started need not end
