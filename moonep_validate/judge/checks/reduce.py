"""Do the gradients of redundant experts come home, once, in order, and leave clean slots?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from moonep_validate.data.problem import PROJECTIONS
from moonep_validate.judge.checks import Compared, axes, differ, differ_bits, unchanged_inputs
from moonep_validate.judge.facts import Absent, Step, tally
from moonep_validate.judge.registry import check

_AXES = axes("rank", "expert_of_rank", "weight_row", "weight_column")


@check("R1", "reduce", needs="full")
def summed_in_order(s: Step) -> Iterator[Compared]:
    """An owner adds the gradients of slots in ascending order of (rank, slot), in float32"""
    copies = s.ints("reduce", "experts_to_copy")[0]
    for name in PROJECTIONS:
        want = s.tap("reduce", f"local_{name}").flatten(0, 1).clone()
        slots = s.tap("reduce", f"slot_{name}")
        for rank, slot in np.argwhere(copies >= 0):
            want[copies[rank, slot]] += slots[rank, slot]
        got = s.tap("reduce", f"after_local_{name}")
        yield differ_bits(f"{name} gradient", want.view_as(got), got, _AXES)


@check("R2", "reduce", needs="full")
def slots_cleared(s: Step) -> Iterator[Compared]:
    """Used slots are zero afterwards, and nothing else changes"""
    copies = s.ints("reduce", "experts_to_copy")[0]
    own = np.arange(s.case.R)[:, None] * s.layout.experts_per_rank + np.arange(s.layout.experts_per_rank)
    for name in PROJECTIONS:
        want = s.tap("reduce", f"slot_{name}").clone()
        want[torch.from_numpy(copies >= 0)] = 0
        got = s.tap("reduce", f"after_slot_{name}")
        yield differ_bits(f"{name} slot gradient", want, got, axes("rank", "slot", "weight_row", "weight_column"))
        before, after = s.tap("reduce", f"full_{name}").clone(), s.tap("reduce", f"after_full_{name}")
        if s.case.generation == "A":  # rows of other ranks' experts lie in the same tensor
            ranks, rows = torch.arange(s.case.R)[:, None], torch.from_numpy(own)
            before[ranks, rows] = after[ranks, rows]
            yield differ_bits(
                f"{name} gradient of another rank's expert",
                before,
                after,
                axes("rank", "group", "weight_row", "weight_column"),
            )


@check("U4", "reduce")
def reduce_inputs(s: Step) -> Iterator[Compared]:
    """Reducing gradients leaves every field of the plan as it is"""
    yield from unchanged_inputs(s, "reduce")


@check("R3", "reduce", needs="full")
def every_copy_counted(s: Step) -> Iterator[Compared]:
    """Each copy adds exactly one contribution"""
    copies = s.ints("reduce", "experts_to_copy")[0]
    counts = tally(copies, s.case.E).reshape(s.case.R, -1)
    for name in PROJECTIONS:
        local = s.tap("reduce", f"local_{name}")
        if not bool((local == 1).all()):
            continue
        got = s.tap("reduce", f"after_local_{name}") - 1
        want = torch.from_numpy(counts)[..., None, None].expand(got.shape).to(got.dtype)
        yield differ(f"contributions to the {name} gradient", want, got, _AXES)
    if not bool((s.tap("reduce", "local_gate") == 1).all()):
        raise Absent("this step does not count with ones")
