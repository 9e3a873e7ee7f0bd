"""Which passes must agree without an oracle? The same problem from another side, promised as data.

The inputs are those of data/transforms.py. They run at the layer door, so that an engine contradicts itself too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonep_validate.scenarios.registry import scenario

if TYPE_CHECKING:
    from moonep_validate.cases.case import Case
    from moonep_validate.sessions.rig import Rig


def _sums_are_exact(case: Case) -> str | None:
    if case.fill.name == "ints":
        return None
    return (
        f"needs fill:ints, not fill:{case.fill}: another plan sums and rounds in another order, "
        "so only exact sums must agree; with real values there is independent"
    )


def _two_tokens(case: Case) -> str | None:
    return None if case.S >= 2 else "needs S >= 2: one token has no other order"


def _two_routes(case: Case) -> str | None:
    return None if case.K >= 2 else "needs K >= 2: it splits the routes of a token"


def _slots_can_differ(case: Case) -> str | None:
    return None if case.generation == "A" else "needs genA: generation B has E/R slots always"


@scenario(limits=(_sums_are_exact, _two_tokens))
def metamorphic(rig: Rig) -> None:
    """Tokens in another order, on other ranks, in two halves, with renumbered experts: the same outputs."""
    data = rig.data
    moves = {
        "permuted": ("V9", data.permuted()),
        "rotated": ("V11", data.rotated()),
        "first_half": ("V12", data.half(second=False)),
        "second_half": ("V12", data.half(second=True)),
    }
    with rig.open() as session:
        session.forward("base", rig.batch())
        for step, (id, places) in moves.items():
            session.forward(step, data.taken(places))
            rig.promise(id, step, "base", "layer.out", tokens=places, terms={"base": 1})
        session.forward("relabelled", data.relabelled(), layer=rig.layer(data.relabelled_weights()))
        rig.promise("V10", "relabelled", "base", "layer.out", tokens=data.in_place(), terms={"base": 1})


@scenario()
def independent(rig: Rig) -> None:
    """Every other token changes, the routing does not: the outputs of the tokens in between keep their bits."""
    kept = rig.data.every_other()
    with rig.open() as session:
        session.forward("base", rig.batch())
        session.forward("others_changed", rig.data.others_changed(kept))
        rig.promise("V13", "others_changed", "base", "layer.out", tokens=kept)


@scenario(limits=(_sums_are_exact, _two_routes))
def linear(rig: Rig) -> None:
    """Contributions add up: of scaled experts, of some routes alone, of routes of weight 0, of one taken twice."""
    data, tokens = rig.data, rig.data.in_place()
    with rig.open() as session:
        session.forward("base", rig.batch())
        for step, factor in (("silenced", 0), ("negated", -1)):
            session.forward(step, rig.batch(), layer=rig.layer(data.scaled_weights(factor)))
        rig.promise("V14", "negated", "base", "layer.out", tokens=tokens, terms={"silenced": 2, "base": -1})
        session.forward("even_routes", data.some_routes(odd=False))
        session.forward("odd_routes", data.some_routes(odd=True))
        rig.promise("V15", "odd_routes", "base", "layer.out", tokens=tokens, terms={"base": 1, "even_routes": -1})
        session.forward("elsewhere", data.some_routes(odd=False, elsewhere=True))
        rig.promise("V16", "elsewhere", "even_routes", "layer.out", tokens=tokens, terms={"even_routes": 1})
        session.forward("once", data.first_expert(twice=False))
        session.forward("twice", data.first_expert(twice=True))
        rig.promise("V17", "twice", "once", "layer.out", tokens=tokens, terms={"once": 1})


@scenario(needs=("buffer",), limits=(_sums_are_exact, _slots_can_differ))
def slot_counts(rig: Rig) -> None:
    """Generation A: Buffers with other slot counts compute the same."""
    tokens = rig.data.in_place()
    with rig.open() as session:
        session.forward("base", rig.batch())
    for step, slots in (("one_slot", 1), ("all_slots", None)):
        with rig.but(slots=slots).open() as session:
            session.forward(step, rig.batch())
        rig.promise("V18", step, "base", "layer.out", tokens=tokens, terms={"base": 1})
