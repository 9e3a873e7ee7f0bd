"""Do two steps that must agree agree bit for bit?"""

from __future__ import annotations

from collections.abc import Iterator

from moonep_validate.checks import Compared, check, differ_bits
from moonep_validate.facts import Step


@check("I10", "layer", kind="relation")
def equal_steps(s: Step) -> Iterator[Compared]:
    """Steps that must agree agree bit for bit."""
    for relation, base in s.relations():
        for tap in relation.taps:
            op, name = tap.split(".")
            want, got = base.tap(op, name), s.tap(op, name)
            what = f"{tap} of step {s.name!r} against {base.name!r}:"
            yield differ_bits(what, want, got, lambda i: {"rank": i[0], "row": i[1], "column": i[-1]})
