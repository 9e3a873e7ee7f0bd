"""Does every used slot hold the weights of the expert that the plan put there, and nothing else changed?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from moonep_validate.cases.layout import Ints, local_first_rows
from moonep_validate.judge.checks import Compared, axes, differ, differ_bits, unchanged_inputs
from moonep_validate.judge.facts import Absent, Step
from moonep_validate.judge.registry import check
from moonep_validate.trace.trace import bits


def _copies(s: Step) -> Ints:
    """What each rank's slots should hold: ``[R, slots]``."""
    everybody = s.ints("prefetch", "experts_to_copy")
    return everybody[np.arange(s.case.R), np.arange(s.case.R)]


def _names(s: Step) -> list[str]:
    """The weight tensors of the call, scales included."""
    return [name[len("local_") :] for name in s.call("prefetch", 0).tensors if name.startswith("local_")]


def _place(rank: Ints, slot: Ints, expert: Ints | None = None) -> Callable[[tuple[int, ...]], dict[str, int]]:
    def place(i: tuple[int, ...]) -> dict[str, int]:
        where = {"rank": int(rank[i[0]]), "slot": int(slot[i[0]])}
        if expert is not None:
            where["expert"] = int(expert[i[0]])
        return {**where, "weight_row": i[1], "weight_column": i[2]}

    return place


@check("W6", "prefetch", needs="digest")
def own_experts_first(s: Step) -> Iterator[Compared]:
    """In the order that puts a rank's own experts first, each row holds its expert's weights and scales"""
    if not s.has("prefetch", "full_gate"):
        raise Absent("the rows are in the order of the expert ids")
    rows = torch.stack([torch.from_numpy(local_first_rows(s.case, r)).flatten() for r in range(s.case.R)])
    ranks = torch.arange(s.case.R)[:, None]
    for name in _names(s):
        due = s.tap("prefetch", f"local_{name}").flatten(0, 1).expand(s.case.R, *[-1] * 3)
        got = s.tap("prefetch", f"full_{name}")[ranks, rows]
        yield differ_bits(f"{name} weight", due, got, axes("rank", "expert", "weight_row", "weight_column"))


@check("W1", "prefetch", needs="digest")
def slot_content(s: Step) -> Iterator[Compared]:
    """Each used slot holds the weights of its expert"""
    copies = _copies(s)
    rank, slot = np.nonzero(copies >= 0)
    if not len(rank):
        raise Absent("the plan uses no slot")
    expert = copies[rank, slot]
    for name in _names(s):
        local = s.tap("prefetch", f"local_{name}").flatten(0, 1)  # [E, rows, columns]
        got = s.tap("prefetch", f"slot_{name}")[torch.from_numpy(rank), torch.from_numpy(slot)]
        want = local[torch.from_numpy(expert)]
        compared = differ_bits(f"{name} weight", want, got, _place(rank, slot, expert))
        yield compared.noting(_owner(s, name, want, got)) if compared.findings else compared


def _owner(s: Step, name: str, want: Tensor, got: Tensor) -> str:
    """Whose weights the first wrong slot holds, if they are any expert's: of this tensor or of another one."""
    wrong = int((bits(want) != bits(got)).flatten(1).any(dim=1).nonzero()[0])
    for other in sorted(_names(s), key=lambda one: one != name):
        local = s.tap("prefetch", f"local_{other}").flatten(0, 1)
        if local.shape[1:] == got.shape[1:]:
            holders = (bits(local) == bits(got[wrong])).flatten(1).all(dim=1).nonzero()[:, 0].tolist()
            if holders:
                return f"; the slot holds {f'{other} of ' * (other != name)}expert {holders[0]}"
    return "; the slot holds no expert's weights"


@check("W7", "prefetch", needs="full", about_callers=True)
def slots_read(s: Step) -> Iterator[Compared]:
    """What an engine's experts read in a used slot are the weights of its expert"""
    if not s.by_engine or "experts" not in s.ops():
        raise Absent("no engine read the slots of this step")
    rank, slot = np.nonzero(s.copies >= 0)
    if not len(rank):
        raise Absent("the plan uses no slot")
    expert = s.copies[rank, slot]
    first = 0 if s.layout.num_home_groups == s.case.E else s.layout.home(expert) * s.case.experts_per_rank
    home, group = s.layout.home(expert), s.layout.num_home_groups + slot
    marked = s.has_call("layer", 0) and s.info("layer", "marked", False)  # then the slots' down changed its sign
    for name in s.stored_names("experts", "weight_")[: 2 if marked else None]:
        held = s.tap("experts", f"weight_{name}")
        due, got = held[home, expert - first], held[rank, group]
        yield differ_bits(f"{name} weight that the experts read", due, got, _place(rank, slot, expert))


@check("W2", "prefetch", needs="digest")
def other_slots_unchanged(s: Step) -> Iterator[Compared]:
    """Unused slots, and gaps behind the slots, stay as they were"""
    rank, slot = np.nonzero(_copies(s) < 0)
    gaps = [name for name in _names(s) if s.has("prefetch", f"gap_{name}")]
    for name in gaps:
        before, after = (s.tap("prefetch", f"{when}gap_{name}") for when in ("before_", ""))
        place = axes("rank", "row", "weight_row", "weight_column")
        yield differ_bits(f"{name} of the gap behind the slots", before, after, place)
    if not len(rank):
        if gaps:
            return
        raise Absent("the plan uses every slot")
    index = (torch.from_numpy(rank), torch.from_numpy(slot))
    for name in _names(s):
        before, after = (s.tap("prefetch", f"{when}_{name}")[index] for when in ("before", "slot"))
        yield differ_bits(f"{name} of an unused slot", before, after, _place(rank, slot))


@check("W4", "prefetch", about_callers=True)
def slots_quiet_before(s: Step) -> Iterator[Compared]:
    """No rank writes its own slots between the last collective and prefetch"""
    order = []
    for rank in range(s.case.R):
        ops = [call.op for call in s.calls_of(rank)]
        if "poison_slots" not in ops or "prefetch" not in ops:
            raise Absent("no slot is written locally in this step")
        last_write = len(ops) - 1 - ops[::-1].index("poison_slots")
        order.append("dispatch" in ops[last_write : ops.index("prefetch")])
    yield differ(
        "a collective between a local write and prefetch", np.ones(s.case.R, bool), np.array(order), axes("rank")
    )


@check("W5", "prefetch")
def empty_plan_returns(s: Step) -> Iterator[Compared]:
    """Prefetch returns on every rank, also for a plan without copies"""
    if (_copies(s) >= 0).any():
        raise Absent("the plan uses a slot")
    done = np.array([call.done and not call.error for call in s.calls("prefetch")])
    yield differ("prefetch returned", np.ones(s.case.R, bool), done, axes("rank"))


@check("U2", "prefetch")
def prefetch_inputs(s: Step) -> Iterator[Compared]:
    """Prefetch leaves the owners' weights as they are, and every field of the plan"""
    yield from unchanged_inputs(s, "prefetch")
