"""Can the suite fail? A fault wraps one call of the pipeline, a seam, and makes it go wrong.

A fault is text, so that it reaches ranks that are other processes: ``id`` or ``id:name=value,...``, e.g.
``slot-not-filled:rank=3``. ``rank`` says where it acts: on rank 1, on the one named, or on ``all``; what is wrong
on all ranks alike is another fault than what is wrong on one. Faults of an engine also take ``first`` and
``every``: from which call of their seam on they act, and on each how-manieth call from there.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from moonep_validate.cases.case import CaseError, Spec
from moonep_validate.cases.near import meant

_MODULES = (
    "plan",
    "dispatch",
    "prefetch",
    "experts",
    "combine",
    "reduce",
    "life",
    "waits",
    "load",
    "packed",
    "adapter",
    "engine_layer",
    "k3",
    "relations",
    "widths",
    "form",
    "inputs",
    "kept",
)
SEAMS = (
    "buffer.construct",
    "buffer.dispatch",
    "buffer.prefetch_weight",
    "weights",
    "weights.rows",
    "weights.stored",
    "experts",
    "buffer.combine",
    "buffer.reduce_grad",
    "buffer.destroy",
    "comm.fence",
    "event.wait",
    "schedule",
    "engine.load",
    "engine.dispatch",
    "engine.experts",
    "engine.layer",
    "model.router",
    "model.latent",
    "model.activation",
    "model.norm",
    "model.shared",
    "model.output",
)
#: When a fault of an engine acts: from call ``first`` on, counted from 0, on each ``every``-th.
_TURNS = {"first": 0, "every": 1}
#: Seams that a tap on an engine's Buffer has too.
_BOTH = ("buffer.construct", "buffer.dispatch", "buffer.prefetch_weight", "buffer.combine", "buffer.destroy")


@dataclass(frozen=True)
class Next:
    """The call that a fault stands in place of: call it to go on.

    Attributes:
        rank: the rank it runs on.
        memory: what the fault keeps between its calls on this rank, in one session.
        everywhere: the same in all sessions of a case.
    """

    rank: int
    function: Callable[..., Any]
    memory: dict[Any, Any] = field(default_factory=dict)
    everywhere: dict[Any, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped function."""
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Fault:
    """One seeded fault.

    Attributes:
        seam: where it sits, one of ``SEAMS``.
        stage: the stage at which it must be located.
        bugs: ids of public bugs and fault kinds that it stands for.
        defaults: its parameters.
        crashes: whether raising, hanging or ending a rank is what it does; else a crash is an accident.
        needs_gpu: whether it changes nothing where all work is done by the time a call returns.
        alone: whether it is none on all ranks: what they all do alike is allowed.
        words: values of a parameter beside numbers; the catalogue seeds each of them.
    """

    id: str
    seam: str
    stage: str
    bugs: str
    summary: str
    function: Callable[..., Any]
    defaults: dict[str, int | str]
    crashes: bool = False
    needs_gpu: bool = False
    alone: bool = False
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def for_engine(self) -> bool | None:
        """True if only an engine has its seam, False if only a bare Buffer has, None if both have."""
        if self.seam.startswith("engine."):
            return True
        return None if self.seam in _BOTH else False

    @property
    def texts(self) -> list[str]:
        """How the catalogue seeds it: by its bare id, then with each word of each parameter."""
        changes = [
            f"{name}={word}"
            for name, words in self.words.items()
            for word in words
            if word != self.defaults[name] and not (name == "rank" and self.alone)
        ]
        return [self.id, *(f"{self.id}:{change}" for change in changes)]


FAULTS: dict[str, Fault] = {}


def fault(
    id: str,
    on: str,
    stage: str,
    bugs: str = "",
    *,
    ranks: int | str = 1,
    words: Mapping[str, tuple[str, ...]] | None = None,
    alone: bool = False,
    crashes: bool = False,
    needs_gpu: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register ``f(call, *args, **kwargs)``, called in place of the seam; keyword defaults are parameters.

    Args:
        id, on, stage, bugs, words, alone, crashes, needs_gpu: see ``Fault``; ``on`` is its seam.
        ranks: the rank that it acts on, if none is named; ``all`` for one that is of all ranks only.
    """
    assert on in SEAMS
    where = {} if ranks == "all" else {"rank": ranks}

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(function).parameters.values()
        defaults = where | {p.name: p.default for p in parameters if isinstance(p.default, int | str)}
        defaults |= _TURNS if on.startswith("engine.") else {}
        summary = (function.__doc__ or "").splitlines()[0]
        known = {**(words or {}), **dict.fromkeys(where, ("all",))}
        FAULTS[id] = Fault(id, on, stage, bugs, summary, function, defaults, crashes, needs_gpu, alone, known)
        return function

    return register


def parse_fault(text: str) -> Spec:
    """Read a fault id with its parameters.

    Raises:
        CaseError: for an unknown id or parameter, or a value that is no number.
    """
    spec = Spec.parse(text)
    if spec.name not in FAULTS:
        raise CaseError(f"unknown fault {spec.name!r}{meant(spec.name, FAULTS)}")
    _parameters(spec)
    return spec


def _parameters(spec: Spec) -> dict[str, int | str]:
    about = FAULTS[spec.name]
    values = dict(about.defaults)
    for arg in spec.args:
        name, equals, value = arg.partition("=")
        if not equals or name not in values:
            raise CaseError(f"fault {spec.name!r} has no parameter {arg!r}{meant(name, values)}")
        values[name] = _value(about, name, value)
    if int(values.get("every", 1)) < 1:
        raise CaseError(f"fault {spec.name!r}: every is {values['every']}, 1 or more is needed")
    return values


def _value(about: Fault, name: str, text: str) -> int | str:
    words = about.words.get(name, ())
    number = isinstance(about.defaults[name], int)
    if text in words:
        return text
    if number and text.removeprefix("-").isdigit():
        return int(text)
    needed = " or ".join(["a whole number"] * number + [", ".join(words)] * bool(words))
    raise CaseError(f"fault {about.id!r}: {name} is {text!r}, {needed} is needed")


class Seams:
    """The seams of one rank with the faults that sit on them."""

    def __init__(self, faults: Sequence[Spec], rank: int) -> None:
        self.faults, self.rank = faults, rank
        self._everywhere: dict[str, dict[Any, Any]] = {}

    def around(self, seam: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with this seam's faults around it."""
        for spec in self.faults:
            if FAULTS[spec.name].seam == seam:
                values = _parameters(spec)
                if values.pop("rank", self.rank) not in (self.rank, "all"):
                    continue
                turns = [int(values.pop(name, default)) for name, default in _TURNS.items()]
                kept = self._everywhere.setdefault(str(spec), {})
                faulty = partial(FAULTS[spec.name].function, Next(self.rank, function, everywhere=kept), **values)
                function = faulty if turns == [0, 1] else _in_turn(faulty, function, *turns)
        return function

    def of_comm(self, comm: Any) -> Any:
        """The ``Comm`` of our own Buffer with the faults of its fences."""
        return _Fenced(comm, self.around("comm.fence", comm.fence)) if self.faults else comm


class _Fenced:
    """A ``Comm`` with another ``fence``."""

    def __init__(self, comm: Any, fence: Callable[..., None]) -> None:
        self._comm, self.fence = comm, fence

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def _in_turn(faulty: Callable[..., Any], plain: Callable[..., Any], first: int, every: int) -> Callable[..., Any]:
    """``faulty`` from call ``first`` on, on each ``every``-th; ``plain`` else."""
    calls = itertools.count(-first)

    def either(*args: Any, **kwargs: Any) -> Any:
        turn = next(calls)
        return (plain if turn < 0 or turn % every else faulty)(*args, **kwargs)

    return either


for _module in _MODULES:
    importlib.import_module(f"{__name__}.{_module}")
