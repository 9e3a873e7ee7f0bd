"""What really happened? Calls with what went in and what came out, per rank, and one byte format for them.

A trace is self-contained: judging needs no engine, no ranks and no case data. An exception inside the subject
is recorded on its call, since it is a finding, not an error of the suite. The byte format is one safetensors
file whose metadata holds JSON; nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.trace.keep import Keep
from moonep_validate.worlds.comm import Abandoned, PeerFailed

FORMAT = 3
_KEY = "moonep_validate"
_TEXTS = ("proves", "leaves_open", "not_run", "reproducer", "keep")
_FULL = Keep()


class TraceError(ValueError):
    """A file that is no trace, is damaged, or comes from another format version."""


@dataclass(frozen=True)
class Part:
    """What stood behind one stage.

    Attributes:
        origin: ``real`` (the package under test), ``reference`` (ours) or ``stand-in`` (ours, in a real
            package's place), ``none`` (no such stage runs).
        package, version, revision, dirty, editable, url, file: what was imported, see provenance.py.
        policy: ``upstream`` where the part promises upstream's exact plan and rounding, else ``legal``.
        seams: where code was replaced; each lowers the level.
        rounds: rounding points beyond those of the reference experts (oracle/arithmetic.py).
    """

    origin: str
    package: str
    version: str
    revision: str | None = None
    dirty: str | None = None
    editable: bool = False
    url: str | None = None
    file: str = ""
    policy: str = "legal"
    seams: tuple[str, ...] = ()
    rounds: tuple[str, ...] = ()

    @property
    def level(self) -> str:
        """What a result of this part counts as; real code in which something was replaced is ``patched``."""
        return "patched" if self.origin == "real" and self.seams else self.origin

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Part:
        """Read ``asdict`` after a trip through JSON."""
        return cls(**{**data, "seams": tuple(data["seams"]), "rounds": tuple(data["rounds"])})


@dataclass(frozen=True)
class Relation:
    """A promise between steps: the named taps of ``step`` equal those of ``base``, moved or summed as it says.

    It is data, so that judging needs neither the case's data nor its scenario.

    Attributes:
        id: which promise of docs/contract.md it is an instance of.
        taps: ``op.tensor`` names; of row buffers only the rows inside groups count, the rest is undefined.
        tokens: for taps of ``[R, S, ...]``: for each token of each rank of ``step`` the token ``rank * S + token``
            of ``base`` that it must equal, or -1 where nothing is promised. None: each its own.
        terms: steps and factors whose sum takes the place of ``base``, computed in float64. Without terms the
            taps agree bit for bit; with them by value: +0 equals -0, and NaN equals nothing.
    """

    id: str
    step: str
    base: str
    taps: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...] | None = None
    terms: tuple[tuple[str, int], ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Relation:
        """Read ``asdict`` after a trip through JSON."""
        tokens = data["tokens"] and tuple(map(tuple, data["tokens"]))
        terms = tuple((step, factor) for step, factor in data["terms"])
        return cls(**{**data, "taps": tuple(data["taps"]), "tokens": tokens, "terms": terms})


@dataclass
class Call:
    """One call of one rank.

    Attributes:
        step: name of the scenario's step.
        op: ``open``, ``construct``, ``load``, ``poison_slots``, ``dispatch``, ``prefetch``, ``experts``,
            ``combine``, ``layer``, ``reduce``, ``refusal``, ``close`` or ``buffers``; with the model k3 also
            ``router``, ``latent``, ``norm``, ``shared`` and ``output``.
        tensors: what is kept of inputs and outputs; copies, on their device until ``settle``.
        info: JSON data.
        error: ``{"type", "message", "where", "peer"}`` if the call raised; ``peer`` says that it only stopped
            because of another rank.
        done: whether it returned or raised; a call that did neither is where a rank hung.
        policy: how much of a tensor is kept.
        later: what waits for the device.
    """

    step: str
    op: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    done: bool = False
    policy: Keep = _FULL
    later: list[Callable[[], None]] = field(default_factory=list)

    def put(self, **tensors: Tensor | None) -> None:
        """Keep a copy of each tensor that is not None, made in the order of the current stream.

        Raises:
            ValueError: for a tensor without data; later on it would be the next call that fails.
        """
        for name, tensor in tensors.items():
            if tensor is not None:
                if tensor.is_meta:
                    raise ValueError(f"{name} is a meta tensor: it holds no data")
                for part, kept in self.policy.of(name, tensor.detach()).items():
                    # what indexing made is a copy already
                    copied = kept is not tensor and kept.data_ptr() != tensor.data_ptr()
                    self.tensors[part] = kept if copied else kept.clone(memory_format=torch.contiguous_format)

    def keep(self, **tensors: Tensor) -> None:
        """Keep tensors that nothing changes afterwards, without a copy."""
        for name, tensor in tensors.items():
            self.tensors |= self.policy.of(name, tensor.detach())

    def whole(self, **tensors: Tensor | None) -> None:
        """Keep small tensors, which nothing changes afterwards, whatever the policy is."""
        self.tensors |= {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}

    def note(self, **tensors: Tensor | None) -> None:
        """Keep what a copy may lose: whether each tensor is contiguous, its device, and its form."""
        for name, tensor in tensors.items():
            if tensor is not None:
                layout = {"contiguous": tensor.is_contiguous(), "device": tensor.device.type}
                form = [*tensor.shape, str(tensor.dtype).removeprefix("torch.")]
                self.info.setdefault("layout", {})[name] = {**layout, "form": form}

    def unchanged(self, **tensors: Tensor | None) -> None:
        """Note which tensors no longer hold the bits that ``put`` kept under their names."""
        changed: list[str] = self.info.setdefault("changed", [])
        for name, tensor in tensors.items():
            if tensor is not None and name in self.tensors:
                for part, now in self.policy.of(name, tensor.detach()).items():
                    before = self.tensors[part]
                    if not before.is_cuda:
                        changed += [] if same_bits(before, now.cpu()) else [name]
                    else:  # the answer is not waited for
                        self._ask_later(name, (bits(before) != bits(now)).any(), changed)
        changed[:] = dict.fromkeys(changed)

    def _ask_later(self, name: str, differs: Tensor, changed: list[str]) -> None:
        def answer() -> None:
            if bool(differs) and name not in changed:
                changed.append(name)

        self.later.append(answer)

    def settle(self) -> None:
        """Bring everything to the CPU; called once, when the rank is done."""
        self.tensors = {name: tensor.to("cpu").contiguous() for name, tensor in self.tensors.items()}
        for answer in self.later:
            answer()
        self.later.clear()


class Recorder:
    """Notes the calls of one rank.

    Args:
        tell: called with (step, op, done) when a call begins and ends, so that a lost rank has a place.
        policy: how much of each tensor is kept.
    """

    def __init__(
        self, tell: Callable[[str, str, bool], None] = lambda step, op, done: None, policy: Keep = _FULL
    ) -> None:
        self.calls: list[Call] = []
        self.tell, self.policy = tell, policy

    def settle(self) -> None:
        """Bring what was recorded to the CPU; once, when the rank is done.

        What a GPU has lost is left out: its error is that of the last call, unless a call has one already.
        """
        for call in self.calls:
            try:
                call.settle()
            except RuntimeError as error:
                call.tensors.clear()
                call.later.clear()
                if not any(other.error for other in self.calls):
                    self.calls[-1].error = described(error)

    @contextmanager
    def call(self, step: str, op: str, **info: Any) -> Iterator[Call]:
        """Record one call with JSON data; an exception is noted on it and raised on."""
        call = Call(step, op, info=info, policy=self.policy)
        self.calls.append(call)
        self.tell(step, op, False)
        try:
            yield call
        except Abandoned:
            raise
        except BaseException as error:
            call.error, call.done = described(error), True
            self.tell(step, op, True)
            raise
        call.done = True
        self.tell(step, op, True)


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
        autopsy: what is known of the ranks of a case that did not come to its end (worlds/autopsy.py), or empty.
        proves, leaves_open: what a pass of this trace means, and what it does not say.
        not_run: why the subject did not run the case, or empty.
        reproducer: the options beside ``--case`` that reproduce this trace, e.g. ``--fault slot-not-filled``.
        keep: the policy of the recorder, see keep.py.
    """

    case: Case
    subject: str
    calls: list[list[Call]]
    parts: dict[str, Part]
    relations: list[Relation] = field(default_factory=list)
    hung: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    autopsy: dict[str, Any] = field(default_factory=dict)
    proves: str = ""
    leaves_open: str = ""
    not_run: str = ""
    reproducer: str = ""
    keep: str = "full"

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

    def to_bytes(self, sealed: bool = True) -> bytes:
        """The trace as one safetensors file; not ``sealed``, for a pipe, it carries no digest, to save time."""
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
            "autopsy": self.autopsy,
            **{name: getattr(self, name) for name in _TEXTS},
            "digest": _digest(tensors) if sealed else None,
        }
        # A tensor with NaN payloads or of zero size travels unchanged; an empty dict needs a placeholder.
        return safetensors.torch.save(_unshared(tensors) or {"none": torch.zeros(0)}, {_KEY: json.dumps(head)})

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
            data = path.read_bytes()
        except OSError as error:
            raise TraceError(f"{path} cannot be read: {error.strerror}") from None
        return cls.from_bytes(data, str(path))

    @classmethod
    def from_bytes(cls, data: bytes, name: str, sealed: bool = True) -> Trace:
        """Read ``to_bytes``.

        Args:
            data: the bytes.
            name: what to call them in errors.
            sealed: see ``to_bytes``; what is kept in files always is.

        Raises:
            TraceError: see ``load``.
        """
        try:
            tensors = safetensors.torch.load(data)
            size = int.from_bytes(data[:8], "little")
            head = json.loads(json.loads(data[8 : 8 + size]).get("__metadata__", {}).get(_KEY, "null"))
        except (SafetensorError, ValueError) as error:
            raise TraceError(f"{name} is damaged or no trace: {error}") from None
        if head is None:
            raise TraceError(f"{name} is a safetensors file, but no trace of moonep-validate")
        if head.get("format") != FORMAT:
            raise TraceError(
                f"{name} has trace format {head.get('format')}, this version reads {FORMAT}: record anew"
            )
        tensors.pop("none", None)
        if sealed and _digest(tensors) != head["digest"]:
            raise TraceError(f"{name} is damaged: its tensors do not match their recorded digest")
        return cls._from(head, tensors)

    @classmethod
    def _from(cls, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Trace:
        calls = [[Call(**data) for data in rank] for rank in head["calls"]]
        for key, tensor in tensors.items():
            rank, index, name = key.split("/")
            calls[int(rank)][int(index)].tensors[name] = tensor
        parts = {stage: Part.from_json(part) for stage, part in head["parts"].items()}
        relations = [Relation.from_json(relation) for relation in head["relations"]]
        return cls(
            Case.parse(head["case"]),
            head["subject"],
            calls,
            parts,
            relations,
            **{name: head[name] for name in ("hung", "errors", *_TEXTS)},
            autopsy=head.get("autopsy", {}),
        )


def bits(tensor: Tensor) -> Tensor:
    """The raw bits as integers of the same width and shape, so that NaN payloads and -0.0 count."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits in the same shape and dtype."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, each with memory of its own: safetensors takes no other."""
    seen: set[int] = set()
    own = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return own


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        flat = tensors[name].reshape(-1)
        if flat.stride() != (1,):  # a tensor of one element counts as contiguous with any stride
            flat = flat.new_empty(len(flat)).copy_(flat)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
