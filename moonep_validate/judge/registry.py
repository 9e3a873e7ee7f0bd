"""Which promises does the suite check? One record per check; whatever lists checks reads this registry.

It knows no trace and no result, so that a verdict can say what a check promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonep_validate.judge.stages import STAGES
from moonep_validate.trace.recording import AMOUNTS

if TYPE_CHECKING:
    from moonep_validate.judge.checks import Compared
    from moonep_validate.judge.facts import Step

    Function = Callable[[Step], Iterator[Compared]]

#: ``law`` gates everywhere, ``drop_in`` where the part promises upstream's exact behaviour, ``relation`` is a
#: promise between steps (relations.py), ``returns`` is F1: a call came back.
KINDS = ("law", "drop_in", "relation", "returns")


@dataclass(frozen=True)
class Check:
    """One promise.

    Attributes:
        id: the invariant's id in docs/contract.md.
        name: one word for people, ``slot-content``.
        stage: the stage it judges; a relation and F1 judge several, and this is where their passes are shown.
        kind: one of ``KINDS``.
        promise: a sentence that a user understands.
        function: what judges one step; None for F1 and relations, which are no function of a step.
        needs: what the recorder must have kept, one of ``AMOUNTS``: bits that moved are in a digest, sums of
            rows are in their columns.
        bounded: whether it compares with a bound on real data, so that it could alarm on right code.
        needs_gpu: whether it compares something on GPUs only.
        about_form: whether it compares shapes and dtypes, and no value.
        about_callers: whether it judges what an engine or another caller does around a Buffer: no fault of a
            Buffer makes it fail.
    """

    id: str
    name: str
    stage: str
    kind: str
    promise: str
    function: Function | None = None
    needs: str = "plan"
    bounded: bool = False
    needs_gpu: bool = False
    about_form: bool = False
    about_callers: bool = False

    def __str__(self) -> str:
        return f"{self.id} {self.name}"

    @property
    def said(self) -> str:
        """``W1 slot-content: each used slot holds ...``, for a failure."""
        return f"{self}: {self.promise[0].lower()}{self.promise[1:]}"


#: Every check by id, F1 and relations among them, in the order of the pipeline's modules.
CHECKS: dict[str, Check] = {}


def register(check: Check) -> Check:
    """Add a record; ids and names are unique."""
    assert check.stage in STAGES
    assert check.kind in KINDS
    assert check.needs in AMOUNTS
    assert check.id not in CHECKS, f"check id {check.id} is taken"
    assert check.name not in {other.name for other in CHECKS.values()}, f"check name {check.name} is taken"
    CHECKS[check.id] = check
    return check


def check(
    id: str,
    stage: str,
    kind: str = "law",
    needs: str = "plan",
    bounded: bool = False,
    about_callers: bool = False,
) -> Callable[[Function], Function]:
    """Register a function of one step; its name is the check's, its docstring's first line the promise."""

    def decorate(function: Function) -> Function:
        name = function.__name__.replace("_", "-")
        promise = (function.__doc__ or "").splitlines()[0].rstrip(".")
        register(
            Check(id, name, stage, kind, promise, function, needs, bounded=bounded, about_callers=about_callers)
        )
        return function

    return decorate


def step_checks() -> list[Check]:
    """The checks that judge one step by itself."""
    return [check for check in CHECKS.values() if check.function]


def said(id: str) -> str:
    """What a check promises, for a failure; the bare id where no check has it."""
    return CHECKS[id].said if id in CHECKS else id
