"""What must an engine around a Buffer stand? Bad ids, a failed step, other weights, bad configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonep_validate.scenarios.base import LAYER_TAPS
from moonep_validate.scenarios.registry import scenario, unlike

if TYPE_CHECKING:
    from moonep_validate.cases.case import Case
    from moonep_validate.sessions.rig import Rig

#: To the seed of a case, where a session has other tokens and weights.
_OTHER_DATA = 1000


@scenario(needs=("engine",))
def invalid_ids(rig: Rig) -> None:
    """Expert ids -1, as engines hand them on for skipped routes, and repeated ones."""
    with rig.open() as session:
        session.forward("base", rig.data.odd_ids())


@scenario(needs=("engine",))
def abort(rig: Rig) -> None:
    """An exception between prepare and finalize on every rank; the step after it must be healthy."""
    with rig.open_engine() as session:
        session.forward("base", rig.batch())
        session.abort("broken", rig.data.shifted())
        session.forward("after", rig.batch())
        rig.promise("I11", "after", "base", *LAYER_TAPS)


@scenario(needs=("engine",))
def reload(rig: Rig) -> None:
    """Other weights are loaded into a living layer; the engine follows, or refuses and keeps what it had."""
    with rig.open_engine() as session:
        session.forward("base", rig.batch())
        if session.reload(1):
            session.forward("reloaded", rig.batch(), weights=1)
        else:
            session.forward("kept", rig.batch())
            rig.promise("I11", "kept", "base", *LAYER_TAPS)


def _other_lives(case: Case) -> dict[str, dict[str, int]]:
    """Step -> in what a life cycle differs: in its weights alone, or in one size too; slots stay as many."""
    sizes = {name: 2 * getattr(case, name) for name in ("E", "H", "I")} | {"S": case.S + 1, "K": case.K + 1}
    lives = {f"other_{name}": {name: size} for name, size in sizes.items()}
    lives["other_E"]["slots"] = case.slots or case.experts_per_rank
    return {
        step: {"seed": case.seed + _OTHER_DATA, **changes} for step, changes in {"other_data": {}, **lives}.items()
    }


def _lives_fit(case: Case) -> str | None:
    return next(filter(None, (unlike(case, **changes) for changes in _other_lives(case).values())), None)


@scenario(needs=("engine",), limits=(_lives_fit,))
def lives(rig: Rig) -> None:
    """Life cycles one after the other, each with other weights and one other size, then the first again."""
    with rig.open_engine() as session:
        session.forward("base", rig.batch())
    for step, changes in _other_lives(rig.case).items():
        other = rig.but(**changes)
        with other.open_engine() as session:
            session.forward(step, other.batch())
    with rig.open_engine() as session:
        session.forward("other_layer", rig.data.shifted(), layer=1)
        session.forward("again", rig.batch())
    rig.promise("V7", "again", "base", *LAYER_TAPS)


@scenario(needs=("engine",))
def configurations(rig: Rig) -> None:
    """Configurations and inputs that an engine must refuse, and some that it must accept."""
    with rig.open_engine() as session:
        session.probe()
        session.forward("after", rig.batch())  # what was refused must leave nothing behind
