"""What does a serving engine do at MoonEP's door? Methods of ``moonep.Buffer`` record, and pass through.

Installed once per process on the class itself, so that it does not matter how an engine imports it, nor whether it
is the real package or our stand-in. A tap observes; it also owns what a composed session owns elsewhere: poison in
memory that the contract leaves undefined, marked slots, and the seams of seeded faults.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from torch import Tensor

from moonep_validate.data.problem import Batch
from moonep_validate.sessions.protocols import Dispatched
from moonep_validate.sessions.rig import Rig
from moonep_validate.subjects.engines import notes


class Injected(RuntimeError):
    """Raised in place of a combine, to see whether an engine survives a failed step."""


@dataclass
class Tap:
    """What one session sees; the living one is ``current``.

    Attributes:
        step: name that the next calls are recorded under.
        given: what the layer was given in this step; a fault that plays a wrong adapter starts from it.
        mark: change the sign of the slots' down projection after prefetch.
        fail: raise ``Injected`` at the next combine.
        sent: the last dispatch.
        full: the weights that the last prefetch was given, ``[E+B, ...]`` each.
        dispatches: dispatch calls of the step.
    """

    rig: Rig
    step: str = ""
    given: Batch | None = None
    mark: bool = False
    fail: bool = False
    sent: Dispatched | None = None
    full: dict[str, Tensor] = field(default_factory=dict)
    dispatches: int = 0
    _seams: dict[tuple[str, int], Callable[..., Any]] = field(default_factory=dict)

    def begin(self, step: str, given: Batch | None = None, mark: bool = False, fail: bool = False) -> None:
        """A new step; nothing of the one before is left."""
        self.step, self.given, self.mark, self.fail = step, given, mark, fail
        self.sent, self.full, self.dispatches = None, {}, 0

    def _around(self, seam: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of a Buffer or of a tap with the faults of a seam; their memory lasts as long as its object."""
        key = seam, id(method.__self__)  # type: ignore[attr-defined]
        if key not in self._seams:
            self._seams[key] = self.rig.seams.around(seam, method)
        return self._seams[key]

    def construct(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Note which Buffer is built in which step."""

        def build() -> object:
            function(*args, **kwargs)
            return function.__self__  # type: ignore[attr-defined]

        sizes = {name: kwargs[name] for name in ("S", "H", "K", "E", "B", "token_padding") if name in kwargs}
        with self.rig.recorder.call(self.step, "construct", **sizes):
            self.rig.seams.around("buffer.construct", build)()

    def dispatch(self, function: Callable[..., Any], *args: Any, **flags: Any) -> Any:
        """Dispatch as the engine asks, or as the faults of its adapter make it ask."""
        return self._around("engine.dispatch", self._dispatch)(function, self.given, *args, **flags)

    def _dispatch(
        self,
        function: Callable[..., Any],
        given: Batch | None,
        hidden: Tensor,
        weights: Tensor | None = None,
        ids: Tensor | None = None,
        counts: Tensor | None = None,
        **flags: Any,
    ) -> Any:
        """Record a dispatch, then poison the rows after the last group; ``given`` is for faults."""
        self.dispatches += 1
        with self.rig.recorder.call(self.step, "dispatch") as call:
            asked = dict(zip(notes.ASKED, (hidden, weights, ids, counts), strict=True))
            notes.asked(call, asked, flags.get("plan"))
            out = self._around("buffer.dispatch", function)(hidden, weights, ids, counts, **flags)
            self.sent = notes.dispatched(call, asked, flags.get("plan"), out)
        self.rig.poison(self.sent.rows[self.sent.end :])
        return out

    def prefetch_weight(self, function: Callable[..., Any], plan: Any, **arguments: Any) -> Any:
        """Record a prefetch of generation A into slots that hold poison before it, then mark them if asked."""
        self.full = notes.full_of(arguments)
        case = self.rig.case
        first = self.rig.comm.rank * case.experts_per_rank
        own, slots = slice(first, first + case.experts_per_rank), slice(case.E, None)
        with self.rig.recorder.call(self.step, "prefetch") as call:
            call.info["same_plan"] = self.sent is not None and plan is self.sent.plan
            for tensor in self.full.values():
                self.rig.poison(tensor[slots])
            notes.slots_before(call, self.full, own, case.E, plan)
            out = self._around("buffer.prefetch_weight", function)(plan, **arguments)
            notes.slots_after(call, self.full, own, case.E, plan)
        if self.mark:
            self.full["down"][slots].neg_()
        return out

    def combine(self, function: Callable[..., Any], *args: Any, **flags: Any) -> Any:
        """Combine what the engine's experts computed, or what the faults behind them make of it."""
        if self.fail:
            self.fail = False
            raise Injected("a failure between prepare and finalize, injected by moonep-validate")
        return self._around("engine.experts", self._combine)(function, self.sent, *args, **flags)

    def _combine(
        self,
        function: Callable[..., Any],
        given: Dispatched | None,
        plan: Any,
        hidden_nvsh: Tensor,
        route_weights_nvs: Tensor | None = None,
        **flags: Any,
    ) -> Any:
        """Record the experts, whose output this is, and the combine; undefined rows hold poison.

        ``given``, the dispatch that this belongs to, is for faults.
        """
        recorder = self.rig.recorder
        if self.sent is not None:
            with recorder.call(self.step, "experts") as call:
                sent = self.sent
                call.put(**notes.given_to_experts(sent, self.full), out=hidden_nvsh)
            self.rig.poison(hidden_nvsh[sent.end :])
            for first, count in sent.plan.zero_fill_ranges.tolist():
                self.rig.poison(hidden_nvsh[first : first + count])
        with recorder.call(self.step, "combine") as call:
            call.info["same_plan"] = self.sent is not None and plan is self.sent.plan
            notes.rows_before(call, hidden_nvsh, route_weights_nvs, plan)
            out = self._around("buffer.combine", function)(plan, hidden_nvsh, route_weights_nvs, **flags)
            zero_copy = bool(flags.get("zero_copy"))
            notes.combined(call, hidden_nvsh, route_weights_nvs, plan, out, zero_copy)
        return out


#: The session that is watching.
current: Tap | None = None
#: Serial numbers of the Buffers of this process that were built and not destroyed; collection alone is not enough.
_living: set[int] = set()
_serial = itertools.count()
#: API generations whose prefetch the taps can read; see ``Tap.prefetch_weight``.
GENERATIONS = ("A",)
_RECORDED = ("dispatch", "prefetch_weight", "combine")


def watch(tap: Tap | None) -> None:
    """Make a session the watching one; None ends it."""
    global current
    current = tap


def living() -> int:
    """How many Buffers of this process were built and never destroyed, collected or not."""
    return len(_living)


def forget() -> None:
    """No Buffer that was built so far counts as living any more."""
    _living.clear()


def install(buffer: type) -> None:
    """Put the taps on a Buffer class, once."""
    if getattr(buffer, "__moonep_tapped__", False):
        return
    buffer.__moonep_tapped__ = True  # type: ignore[attr-defined]
    for name in _RECORDED:
        setattr(buffer, name, _tapped(name, getattr(buffer, name)))
    buffer.__init__ = _constructed(buffer.__init__)  # type: ignore[misc]
    buffer.destroy = _destroyed(buffer.destroy)  # type: ignore[attr-defined]


def _tapped(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = method.__get__(self)
        return bound(*args, **kwargs) if current is None else getattr(current, name)(bound, *args, **kwargs)

    return wrapper


def _constructed(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = method.__get__(self)
        bound(*args, **kwargs) if current is None else current.construct(bound, *args, **kwargs)
        self.__moonep_serial__ = next(_serial)
        _living.add(self.__moonep_serial__)

    return wrapper


def _destroyed(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def wrapper(self: Any) -> None:
        if current is None:
            really(self)
        else:
            current._around("buffer.destroy", really.__get__(self))()

    def really(self: Any) -> None:
        method(self)
        _living.discard(self.__moonep_serial__)

    return wrapper
