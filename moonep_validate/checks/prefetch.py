"""Does every used slot hold the weights of the expert that the plan put there?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from moonep_validate.checks import Compared, check, differ_bits
from moonep_validate.facts import Step
from moonep_validate.problem import PROJECTIONS


@check("W1", "prefetch")
def slot_content(s: Step) -> Iterator[Compared]:
    """Each used slot holds its expert's weights, bit for bit."""
    copies = s.ints("prefetch", "experts_to_copy")[np.arange(s.case.R), np.arange(s.case.R)]
    rank, slot = np.nonzero(copies >= 0)
    expert = copies[rank, slot]
    for name in PROJECTIONS:
        local = s.tap("prefetch", f"local_{name}").flatten(0, 1)  # [E, rows, columns]
        slots = s.tap("prefetch", f"slot_{name}")
        want = local[torch.from_numpy(expert)]
        got = slots[torch.from_numpy(rank), torch.from_numpy(slot)]

        def place(i: tuple[int, ...]) -> dict[str, int]:
            return {
                "rank": int(rank[i[0]]),
                "slot": int(slot[i[0]]),
                "expert": int(expert[i[0]]),
                "weight_row": i[1],
                "weight_column": i[2],
            }

        yield differ_bits(f"{name} weight", want, got, place)
    if not len(rank):
        yield Compared(copies.size)  # the plan uses no slot: that is what was examined
