"""Which calls are made? Plain SPMD functions over a rig, and the relations they promise between steps.

Each variant step differs from the base step in exactly one thing.
"""

from __future__ import annotations

from collections.abc import Callable

from moonep_validate.rig import Rig


def base(rig: Rig) -> None:
    """One forward pass."""
    with rig.open() as session:
        session.forward("base", rig.batch())


def two_poisons(rig: Rig) -> None:
    """The same pass twice, undefined memory filled with NaN, then with a large number: same output."""
    with rig.open() as session:
        session.forward("base", rig.batch())
        rig.poison_value = 2.0**40
        session.forward("other_poison", rig.batch())
    rig.promise("other_poison", "base", "layer.out")


SCENARIOS: dict[str, Callable[[Rig], None]] = {"base": base, "two_poisons": two_poisons}
