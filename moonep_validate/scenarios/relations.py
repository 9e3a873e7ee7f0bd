"""Which passes must agree without an oracle? The same problem from another side, promised as data.

The inputs are those of data/transforms.py.
"""

from __future__ import annotations

from moonep_validate.data.transforms import (
    every_other,
    first_expert,
    half,
    in_place,
    others_changed,
    permuted,
    relabelled,
    relabelled_weights,
    rotated,
    scaled_weights,
    some_routes,
    taken,
)
from moonep_validate.scenarios.rig import Rig


def metamorphic(rig: Rig) -> None:
    """Tokens in another order, on other ranks, in two halves, with renumbered experts: the same outputs."""
    case, rank = rig.case, rig.comm.rank
    moves = {
        "permuted": ("V9", permuted(case)),
        "rotated": ("V11", rotated(case)),
        "first_half": ("V12", half(case, second=False)),
        "second_half": ("V12", half(case, second=True)),
    }
    with rig.open() as session:
        session.forward("base", rig.batch())
        for step, (id, places) in moves.items():
            session.forward(step, taken(case, rank, places))
            rig.promise(id, step, "base", "layer.out", tokens=places, terms={"base": 1})
        session.forward("relabelled", relabelled(case, rank), layer=rig.layer(relabelled_weights(case)))
        rig.promise("V10", "relabelled", "base", "layer.out", tokens=in_place(case), terms={"base": 1})


def independent(rig: Rig) -> None:
    """Every other token changes, the routing does not: the outputs of the tokens in between keep their bits."""
    kept = every_other(rig.case)
    with rig.open() as session:
        session.forward("base", rig.batch())
        session.forward("others_changed", others_changed(rig.case, rig.comm.rank, kept))
        rig.promise("V13", "others_changed", "base", "layer.out", tokens=kept)


def linear(rig: Rig) -> None:
    """Contributions add up: of scaled experts, of some routes alone, of routes of weight 0, of one taken twice."""
    case, rank, tokens = rig.case, rig.comm.rank, in_place(rig.case)
    with rig.open() as session:
        session.forward("base", rig.batch())
        for step, factor in (("silenced", 0), ("negated", -1)):
            session.forward(step, rig.batch(), layer=rig.layer(scaled_weights(case, factor)))
        rig.promise("V14", "negated", "base", "layer.out", tokens=tokens, terms={"silenced": 2, "base": -1})
        session.forward("even_routes", some_routes(case, rank, odd=False))
        session.forward("odd_routes", some_routes(case, rank, odd=True))
        rig.promise("V15", "odd_routes", "base", "layer.out", tokens=tokens, terms={"base": 1, "even_routes": -1})
        session.forward("elsewhere", some_routes(case, rank, odd=False, elsewhere=True))
        rig.promise("V16", "elsewhere", "even_routes", "layer.out", tokens=tokens, terms={"even_routes": 1})
        session.forward("once", first_expert(case, rank, twice=False))
        session.forward("twice", first_expert(case, rank, twice=True))
        rig.promise("V17", "twice", "once", "layer.out", tokens=tokens, terms={"once": 1})


def slot_counts(rig: Rig) -> None:
    """Generation A: Buffers with other slot counts compute the same."""
    tokens = in_place(rig.case)
    with rig.open() as session:
        session.forward("base", rig.batch())
    for step, slots in (("one_slot", 1), ("all_slots", None)):
        with rig.open(slots=slots) as session:
            session.forward(step, rig.batch())
        rig.promise("V18", step, "base", "layer.out", tokens=tokens, terms={"base": 1})
