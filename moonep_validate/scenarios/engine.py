"""What must an engine around a Buffer stand? Bad ids, a failed step, other weights, bad configurations."""

from __future__ import annotations

from moonep_validate.data.problem import odd_ids, shifted
from moonep_validate.scenarios.base import LAYER_TAPS
from moonep_validate.scenarios.rig import Rig


def invalid_ids(rig: Rig) -> None:
    """Invalid and repeated expert ids, as engines hand them on for skipped routes."""
    with rig.open() as session:
        session.forward("base", odd_ids(rig.case, rig.comm.rank))


def abort(rig: Rig) -> None:
    """An exception between prepare and finalize on every rank; the step after it must be healthy."""
    with rig.open() as session:
        session.forward("base", rig.batch())
        session.abort("broken", shifted(rig.case, rig.comm.rank))
        session.forward("after", rig.batch())
        rig.promise("I11", "after", "base", *LAYER_TAPS)


def reload(rig: Rig) -> None:
    """Other weights are loaded into a living layer; the engine follows, or refuses and keeps what it had."""
    with rig.open() as session:
        session.forward("base", rig.batch())
        if session.reload(1):
            session.forward("reloaded", rig.batch(), weights=1)
        else:
            session.forward("kept", rig.batch())
            rig.promise("I11", "kept", "base", *LAYER_TAPS)


def answers(rig: Rig) -> None:
    """Configurations and inputs that an engine must refuse, and some that it must not."""
    with rig.open() as session:
        session.probe()
        session.forward("after", rig.batch())
