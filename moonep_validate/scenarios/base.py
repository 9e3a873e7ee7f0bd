"""Which passes through a layer are made? Scenarios at the layer door, for a Buffer and for an engine alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonep_validate.scenarios.registry import scenario

if TYPE_CHECKING:
    from moonep_validate.sessions.rig import Rig

#: What a whole pass shows at both doors; of an engine there is nothing more to compare.
LAYER_TAPS = ("dispatch.rows", "prefetch.slot_gate", "combine.hidden", "layer.out")
_BOTH = ("moe", "k3")
#: Large and finite: where NaN is filtered or absorbed on its way, a number still shows, and the other way round.
OTHER_POISON = 2.0**40


@scenario(models=_BOTH)
def base(rig: Rig) -> None:
    """One forward pass, all undefined memory poisoned with NaN."""
    with rig.open() as session:
        session.forward("base", rig.batch())


@scenario(models=_BOTH)
def two_poisons(rig: Rig) -> None:
    """The same pass twice, undefined memory filled with NaN, then with a large number: same output."""
    with rig.open() as session:
        session.forward("base", rig.batch())
        rig.poison_value = OTHER_POISON
        session.forward("other_poison", rig.batch())
    rig.promise("I10", "other_poison", "base", "layer.out")


@scenario(models=_BOTH)
def marked_slots(rig: Rig) -> None:
    """The slots change sign between prefetch and experts; the rows computed from them must follow."""
    with rig.open() as session:
        session.forward("marked", rig.batch(), mark=True)


@scenario(models=_BOTH)
def layers(rig: Rig) -> None:
    """Two layers in turn, with other tokens in between: they share slots and Buffers, not weights."""
    batch = rig.batch()
    with rig.open() as session:
        session.forward("base", batch)
        session.forward("other_layer", rig.data.shifted(), layer=1)
        session.forward("back", batch)
        rig.promise("V8", "back", "base", *LAYER_TAPS)
        session.forward("other_tokens", batch, layer=1)


@scenario()
def token_counts(rig: Rig) -> None:
    """Steps with other token counts on each rank, among them none, one, and one beside a power of two."""
    S, ranks = rig.case.S, rig.case.R
    counts = [count for count in (0, 1, S // 2 - 1, S // 2, S // 2 + 1, S - 1, S) if count >= 0]
    with rig.open() as session:
        for first, count in enumerate(counts):
            mine = counts[(first + 2 * rig.comm.rank) % len(counts)] if ranks > 1 else count
            session.forward(f"counts_{first}", rig.batch(mine))


@scenario()
def hundredth(rig: Rig) -> None:
    """The same pass after a hundred others that nobody records, and after 30 more: the same bits."""
    batch = rig.batch()
    with rig.open() as session:
        session.forward("base", batch)
        for step, passes in (("hundredth", 100), ("later", 30)):
            session.unrecorded(rig.data.shifted(), passes)
            session.forward(step, batch)
            rig.promise("V1", step, "base", *LAYER_TAPS)
