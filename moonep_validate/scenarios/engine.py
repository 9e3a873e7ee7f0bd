"""What must an engine around a Buffer stand? Bad ids, a failed step, other weights, bad configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonep_validate.scenarios.base import LAYER_TAPS
from moonep_validate.scenarios.registry import scenario

if TYPE_CHECKING:
    from moonep_validate.sessions.rig import Rig


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


@scenario(needs=("engine",))
def configurations(rig: Rig) -> None:
    """Configurations and inputs that an engine must refuse, and some that it must accept."""
    with rig.open_engine() as session:
        session.probe()
        session.forward("after", rig.batch())  # what was refused must leave nothing behind
