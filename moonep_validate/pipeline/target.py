"""Who is judged? A target is a value: the reference, a module with MoonEP's ``Buffer``, or a serving engine.

Each says what its ranks must be told, which subject it is, and how it is spelled on the command line. What all
targets of a kind share is in kinds.py.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar

from moonep_validate.cases.case import CaseError
from moonep_validate.pipeline.kinds import KINDS, Kind
from moonep_validate.subjects import REFERENCE, Subject, module_subject
from moonep_validate.subjects.engines import start as engines
from moonep_validate.trace.trace import Part


@dataclass(frozen=True)
class Reference:
    """The embedded reference: our own MoonEP of both generations."""

    kind: ClassVar[Kind] = KINDS["reference"]
    name: ClassVar[str] = "reference"
    generations: ClassVar[tuple[str, ...]] = ("A", "B")
    portable_only: ClassVar[bool] = False
    spelled: ClassVar[str] = ""
    known_by: ClassVar[Part | None] = None
    reset_request: ClassVar[bytes | None] = None

    def environment(self, device: str) -> dict[str, str]:
        """Variables of the worker processes."""
        return engines.on_device(device)

    def start_request(self, device: str) -> bytes | None:
        """Nothing: the ranks import what they need with the first case."""
        return None

    def subject(self, device: str, not_run: str | None) -> Subject:
        """What runs."""
        return REFERENCE


@dataclass(frozen=True)
class Module:
    """An importable module with MoonEP's ``Buffer``, with our experts around it.

    Attributes:
        name: of the module.
        generation, part: what it is, from identify.
        api, policy: as they were given, or None.
        relaxed: also run cases that real hardware refuses.
        destructive: also run bad input that may trap, hang or end the process.
    """

    kind: ClassVar[Kind] = KINDS["module"]
    known_by: ClassVar[Part | None] = None
    reset_request: ClassVar[bytes | None] = None

    name: str
    generation: str
    part: Part
    api: str | None = None
    policy: str | None = None
    relaxed: bool = False
    destructive: bool = False

    @property
    def generations(self) -> tuple[str, ...]:
        """The API generations that it offers."""
        return (self.generation,)

    @property
    def portable_only(self) -> bool:
        """Whether it takes only what real hardware does."""
        return not self.relaxed

    @property
    def spelled(self) -> str:
        """The options that name it."""
        text = _spelled({"moonep-module": self.name, "api": self.api, "policy": self.policy})
        return text + " --relaxed" * self.relaxed + " --destructive" * self.destructive

    def environment(self, device: str) -> dict[str, str]:
        """Variables of the worker processes."""
        return relaxed_environment(self.relaxed) | engines.on_device(device)

    def start_request(self, device: str) -> bytes | None:
        """Nothing: the ranks import what they need with the first case."""
        return None

    def subject(self, device: str, not_run: str | None) -> Subject:
        """What runs."""
        return _module_subject(self, device)


@dataclass(frozen=True)
class Engine:
    """A serving engine.

    Attributes:
        name: ``vllm``, ``sglang``, or MODULE:CLASS of an ``Integration``.
        generations: the API generations of MoonEP that it calls.
        path: a folder that goes first on the import path of the workers, or None.
        moonep, part: what stands behind ``moonep`` and the engine; None where it cannot run.
    """

    kind: ClassVar[Kind] = KINDS["engine"]
    portable_only: ClassVar[bool] = True

    name: str
    generations: tuple[str, ...]
    path: str | None = None
    moonep: Part | None = None
    part: Part | None = None

    @property
    def known_by(self) -> Part | None:
        """What the versions of waivers are compared with."""
        return self.part

    @property
    def spelled(self) -> str:
        """The options that name it."""
        return _spelled({"subject": self.name, "engine-path": self.path})

    def start_request(self, device: str) -> bytes:
        """What a new pool of workers is told first: to import and initialise the engine."""
        return json.dumps({"start": self.name, "device": device}).encode()

    @property
    def reset_request(self) -> bytes:
        """What the workers are told after a case in which a rank raised; an engine is dear to start anew."""
        return json.dumps({"reset": self.name}).encode()

    def environment(self, device: str) -> dict[str, str]:
        """Variables of the worker processes."""
        return engines.environment(self.name, self.path, device)

    def subject(self, device: str, not_run: str | None) -> Subject:
        """What runs; ``not_run`` is why nothing can, or None."""
        return _engine_subject(self, device, not_run)


Target = Reference | Module | Engine
EMBEDDED = Reference()
_CLASSES: dict[str, type[Target]] = {"reference": Reference, "module": Module, "engine": Engine}
_PARTS = ("part", "moonep")


def _spelled(options: dict[str, str | None]) -> str:
    return " ".join(f"--{name} {value}" for name, value in options.items() if value)


def relaxed_environment(relaxed: bool) -> dict[str, str]:
    """What tells our stand-ins to take what real hardware refuses."""
    return {"MOONEP_VALIDATE_RELAXED": "1"} if relaxed else {}


# A subject is a closure over its target, and is asked for on every case.
@lru_cache(maxsize=8)
def _module_subject(target: Module, device: str) -> Subject:
    return module_subject(target.name, target.generation, target.part, target.relaxed, target.destructive, device)


@lru_cache(maxsize=8)
def _engine_subject(target: Engine, device: str, not_run: str | None) -> Subject:
    return engines.engine_subject(target.name, target.generations, target.moonep, target.part, not_run, device)


def to_json(target: Target) -> dict[str, Any]:
    """A target as JSON data."""
    kind = next(name for name, one in _CLASSES.items() if isinstance(target, one))
    return {"kind": kind, **asdict(target)}


def from_json(data: dict[str, Any]) -> Target:
    """Read ``to_json``.

    Raises:
        CaseError: for another kind, or fields that it does not have or lacks.
    """
    given = dict(data)
    if (kind := given.pop("kind", None)) not in _CLASSES:
        raise CaseError(f"a target of kind {kind!r}; known: {', '.join(_CLASSES)}")
    made = _CLASSES[kind]
    if (wanted := {one.name for one in fields(made)}) != set(given):
        raise CaseError(f"a target of kind {kind} has {sorted(wanted)}, got {sorted(given)}")
    given |= {name: Part.from_json(given[name]) for name in _PARTS if given.get(name)}
    if "generations" in given:
        given["generations"] = tuple(given["generations"])
    return made(**given)
