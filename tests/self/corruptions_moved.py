"""Known ways to break a promise about steps of other inputs, whose outputs are moved or summed first."""

from __future__ import annotations

from moonep_validate.cases.case import Case
from tests.self.corruptions import SIZES, Corruption, put

METAMORPHIC = Case.parse(f"genB+{SIZES}+hot:1+metamorphic")
INDEPENDENT = Case.parse(f"genB+{SIZES}+hot:1+fill:real+independent")
LINEAR = Case.parse(f"genB+{SIZES}+hot:1+linear")
SLOT_COUNTS = Case.parse(f"genA+{SIZES}+hot:1+slot_counts")

#: Promise -> step that makes it, what it is compared with, case; rank 1's token 1 changes in column 3.
_MOVED = {
    "V9": ("permuted", "'base'", METAMORPHIC),
    "V10": ("relabelled", "'base'", METAMORPHIC),
    "V11": ("rotated", "'base'", METAMORPHIC),
    "V12": ("second_half", "'base'", METAMORPHIC),
    "V13": ("others_changed", "'base'", INDEPENDENT),
    "V14": ("negated", "+2 * 'silenced' -1 * 'base'", LINEAR),
    "V15": ("odd_routes", "+1 * 'base' -1 * 'even_routes'", LINEAR),
    "V16": ("elsewhere", "'even_routes'", LINEAR),
    "V17": ("twice", "'once'", LINEAR),
    "V18": ("one_slot", "'base'", SLOT_COUNTS),
}
MOVED = [
    Corruption(
        check,
        "layer",
        f"layer.out of step {step!r} against {base}:{' bits' * (check == 'V13')} at rank 1, token 1, column 3",
        put("layer", "out", (1, 3), 16.0, 1, step),
        case,
    )
    for check, (step, base, case) in _MOVED.items()
]
