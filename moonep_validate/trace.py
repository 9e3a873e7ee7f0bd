"""What really happened? Calls with what went in and what came out, per rank, and one byte format for them.

A trace is self-contained: judging needs no engine, no ranks and no case data. An exception inside the subject
is recorded on its call, since it is a finding, not an error of the suite. The byte format is one safetensors
file whose metadata holds JSON; nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moonep_validate.case import Case
from moonep_validate.worlds.comm import Abandoned, PeerFailed

FORMAT = 1
_KEY = "moonep_validate"


class TraceError(ValueError):
    """A file that is no trace, is damaged, or comes from another format version."""


@dataclass(frozen=True)
class Part:
    """What stood behind one stage.

    Attributes:
        origin: ``real`` (the package under test), ``reference`` (ours) or ``stand-in`` (ours, in a real
            package's place).
        package, version, revision: what was imported; revision is a source revision or None.
        policy: ``upstream`` where the part promises upstream's exact plan and rounding, else ``legal``.
        seams: where code was replaced; each lowers the level.
    """

    origin: str
    package: str
    version: str
    revision: str | None = None
    policy: str = "legal"
    seams: tuple[str, ...] = ()


@dataclass(frozen=True)
class Relation:
    """A promise between two steps: the named taps of ``step`` equal those of ``base`` bit for bit.

    Attributes:
        taps: ``op.tensor`` names.
    """

    step: str
    base: str
    taps: tuple[str, ...]


@dataclass
class Call:
    """One call of one rank.

    Attributes:
        step: name of the scenario's step.
        op: ``load``, ``dispatch``, ``prefetch``, ``experts``, ``combine`` or ``layer``.
        tensors: copies of inputs and outputs, on the CPU.
        info: JSON data.
        error: ``{"type", "message", "where", "peer"}`` if the call raised; ``peer`` says that it only stopped
            because of another rank.
        done: whether it returned or raised; a call that did neither is where a rank hung.
    """

    step: str
    op: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    done: bool = False

    def put(self, **tensors: Tensor | None) -> None:
        """Keep a copy of each tensor that is not None."""
        for name, tensor in tensors.items():
            if tensor is not None:
                self.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()


class Recorder:
    """Notes the calls of one rank."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    @contextmanager
    def call(self, step: str, op: str) -> Iterator[Call]:
        """Record one call; an exception is noted on it and raised on."""
        call = Call(step, op)
        self.calls.append(call)
        try:
            yield call
        except Abandoned:
            raise
        except BaseException as error:
            call.error, call.done = described(error), True
            raise
        call.done = True


def described(error: BaseException) -> dict[str, Any]:
    """An exception as data."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    peer = isinstance(error, PeerFailed)
    return {"type": type(error).__name__, "message": str(error), "where": where, "peer": peer}


@dataclass
class Trace:
    """All that judging needs.

    Attributes:
        case: what ran.
        calls: per rank, in order.
        subject: who ran it.
        parts: stage -> Part (``plan``, ``dispatch``, ``prefetch``, ``experts``, ``combine``).
        relations: promises between steps.
        hung: ``{"rank", "stack"}`` of ranks whose deadline passed.
        errors: errors of the suite itself, as text; not the subject's.
        not_run: why the subject did not run the case, or empty.
        reproducer: the options beside ``--case`` that reproduce this trace, e.g. ``--fault slot-not-filled``.
    """

    case: Case
    subject: str
    calls: list[list[Call]]
    parts: dict[str, Part]
    relations: list[Relation] = field(default_factory=list)
    hung: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    not_run: str = ""
    reproducer: str = ""

    def steps(self) -> list[str]:
        """Names of the steps in order of first appearance."""
        return list(dict.fromkeys(call.step for calls in self.calls for call in calls))

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by ``rank/call/name``."""
        return {
            f"{rank}/{index}/{name}": tensor
            for rank, calls in enumerate(self.calls)
            for index, call in enumerate(calls)
            for name, tensor in call.tensors.items()
        }

    def digest(self) -> str:
        """A hash over all recorded bytes: equal digests mean that nothing observable differed."""
        return _digest(self.tensors())

    def to_bytes(self) -> bytes:
        """The trace as one safetensors file."""
        tensors = self.tensors()
        calls = [
            [{"step": c.step, "op": c.op, "info": c.info, "error": c.error, "done": c.done} for c in calls]
            for calls in self.calls
        ]
        head = {
            "format": FORMAT,
            "case": str(self.case),
            "subject": self.subject,
            "calls": calls,
            "parts": {stage: asdict(part) for stage, part in self.parts.items()},
            "relations": [asdict(relation) for relation in self.relations],
            "hung": self.hung,
            "errors": self.errors,
            "not_run": self.not_run,
            "reproducer": self.reproducer,
            "digest": _digest(tensors),
        }
        # A tensor with NaN payloads or of zero size travels unchanged; an empty dict needs a placeholder.
        return safetensors.torch.save(tensors or {"none": torch.zeros(0)}, {_KEY: json.dumps(head)})

    def save(self, path: Path) -> None:
        """Write the trace to one file."""
        path.write_bytes(self.to_bytes())

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read a trace file.

        Raises:
            TraceError: if it is no trace, damaged, or of another format version.
        """
        try:
            with safe_open(path, framework="pt") as file:
                head = json.loads((file.metadata() or {}).get(_KEY, "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise TraceError(f"{path} is damaged or no trace: {error}") from None
        if head is None:
            raise TraceError(f"{path} is a safetensors file, but no trace of moonep-validate")
        if head.get("format") != FORMAT:
            raise TraceError(
                f"{path} has trace format {head.get('format')}, this version reads {FORMAT}: record anew"
            )
        tensors.pop("none", None)
        if _digest(tensors) != head["digest"]:
            raise TraceError(f"{path} is damaged: its tensors do not match their recorded digest")
        return cls._from(head, tensors)

    @classmethod
    def _from(cls, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Trace:
        calls = [[Call(**data) for data in rank] for rank in head["calls"]]
        for key, tensor in tensors.items():
            rank, index, name = key.split("/")
            calls[int(rank)][int(index)].tensors[name] = tensor
        parts = {stage: Part(**{**part, "seams": tuple(part["seams"])}) for stage, part in head["parts"].items()}
        relations = [Relation(**{**relation, "taps": tuple(relation["taps"])}) for relation in head["relations"]]
        return cls(
            Case.parse(head["case"]),
            head["subject"],
            calls,
            parts,
            relations,
            **{name: head[name] for name in ("hung", "errors", "not_run", "reproducer")},
        )


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
