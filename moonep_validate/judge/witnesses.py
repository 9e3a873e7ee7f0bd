"""Did the case exercise what it exists for? Events of the real trace, counted.

A case that names a witness (``@slot_used``) and does not show it is vacuous. So is one in which two ranks hold
the same payload: a row of the wrong rank would then look right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import numpy as np

from moonep_validate.cases.case import Case
from moonep_validate.cases.layout import Ints
from moonep_validate.judge.facts import Missing, Step
from moonep_validate.judge.oracle.combine import combined
from moonep_validate.trace.trace import bits, same_bits


def count_witnesses(case: Case, steps: Iterable[Step]) -> dict[str, int]:
    """How often each known event occurs; an event that cannot be seen counts 0.

    Sensitivity witnesses recompute an oracle, so they are counted only where the case claims them.
    """
    counts, steps = dict.fromkeys(WITNESSES, 0), list(steps)
    for step in steps:
        for witness, count in WITNESSES.items():
            if witness in _SENSITIVITY and witness not in case.witnesses:
                continue
            try:
                counts[witness] += int(count(step))
            except Missing:
                continue
    counts["slots_everywhere"] = _slots_on_every_rank(case, steps)
    return counts


def vacuous_reasons(case: Case, steps: Iterable[Step], counts: Mapping[str, int]) -> list[str]:
    """Why a pass of this trace would mean nothing."""
    reasons = absent_events(case, counts)
    for step in steps:
        reasons += _equal_payloads(step) + _not_dispatched(step)
    return reasons


def absent_events(case: Case, counts: Mapping[str, int]) -> list[str]:
    """The events that a case claims and did not show."""
    absent = [name for name in case.witnesses if not counts[name]]
    return [f"the case claims @{name}, but that event did not occur" for name in absent]


def _not_dispatched(step: Step) -> list[str]:
    """Ranks whose layer ran through without a dispatch: whatever computed the result, MoonEP was not used."""
    silent = []
    for rank in range(step.case.R):
        try:
            whole = step.call("layer", rank).error is None
            silent += [rank] if whole and not step.has_call("dispatch", rank) else []
        except Missing:
            continue
    return [f"rank {rank} made no dispatch in step {step.name!r}: MoonEP was not used" for rank in silent]


def _equal_payloads(step: Step) -> list[str]:
    """Ranks whose real tokens are the same bits; ranks without tokens aside."""
    seen: dict[bytes, int] = {}
    reasons = []
    for rank in range(step.case.R):
        try:
            count = step.case.token_count(rank)
            if step.has_call("layer", rank):
                count = step.call("layer", rank).info.get("tokens", count)
            hidden = step.call("dispatch", rank).tensors["hidden"][:count]
        except LookupError:
            continue
        if hidden.any() and (other := seen.setdefault(bits(hidden).numpy().tobytes(), rank)) != rank:
            reasons.append(f"ranks {other} and {rank} hold the same payload in step {step.name!r}")
    return reasons


def _rows_of_token(s: Step) -> Ints:
    """Rows that each token has on each rank: ``[R*S, R]``."""
    place = s.rank_of.reshape(-1, s.case.K)
    return np.stack([(place == rank).sum(axis=1) for rank in range(s.case.R)], axis=1)


def _slots_used(s: Step) -> Ints:
    """Slots with rows, per rank: ``[R]``."""
    slots = s.group_expert[:, s.layout.num_home_groups :]
    lengths = np.diff(s.cu_seqlens, axis=1, prepend=0)[:, s.layout.num_home_groups :]
    used: Ints = ((slots >= 0) & (lengths > 0)).sum(axis=1)
    return used


def _slots_on_every_rank(case: Case, steps: Iterable[Step]) -> int:
    """Whether every rank used a slot in some step."""
    used = np.zeros(case.R, np.int64)
    for step in steps:
        with suppress(Missing):
            used[list(step.ranks)] += _slots_used(step)
    return int((used > 0).all())


def _donor_receivers(s: Step) -> int:
    """Ranks whose experts are partly computed elsewhere and that compute experts of others."""
    home = s.layout.home(s.topk)
    moved = home != s.rank_of
    return len(set(home[moved]) & set(s.rank_of[moved]))


def _empty_ranks(s: Step) -> int:
    case: Case = s.case
    return sum(case.token_count(rank) == 0 for rank in range(case.R))


def _remote_reads(s: Step) -> int:
    """Rows of remote experts that lie in a home group (generation A with too few slots)."""
    return int((~s.in_slot & (s.layout.home(s.topk) != s.rank_of)).sum())


def _odd_bits(s: Step) -> int:
    """Steps whose payload holds a NaN with a payload and a negative zero."""
    hidden = bits(s.tap("dispatch", "hidden"))
    nan_payload = ((hidden & 0x7F80) == 0x7F80) & ((hidden & 0x7F) != 0) & ((hidden & 0x7F) != 0x40)
    return int(bool(nan_payload.any()) and bool((hidden == -0x8000).any()))


def _visible(s: Step, **without: bool) -> int:
    """Whether combine's oracle with one rule switched off gives another result on this data."""
    rows = s.tap("combine", "rows")
    return int(not same_bits(combined(rows, s.rank_of, s.row_of), combined(rows, s.rank_of, s.row_of, **without)))


_SENSITIVITY = ("order_visible", "rounding_visible")
WITNESSES: dict[str, Callable[[Step], int]] = {
    "slot_used": lambda s: int(_slots_used(s).sum()),
    "two_slots": lambda s: int((_slots_used(s) >= 2).sum()),
    "duplicate": lambda s: int((_rows_of_token(s) >= 2).sum()),
    "triple": lambda s: int((_rows_of_token(s) >= 3).sum()),
    "padding": lambda s: int(((s.row_group < s.layout.num_groups) & (s.row_route < 0)).sum()),
    "empty_expert": lambda s: s.case.E - len(np.unique(s.topk)),
    "empty_rank": _empty_ranks,
    "remote_read": _remote_reads,
    "empty_plan": lambda s: int(not (s.copies >= 0).any()),
    "full_plan": lambda s: int((s.copies >= 0).all(axis=1).sum()),
    "buffer_full": lambda s: int((s.cu_seqlens[:, -1] == s.num_rows).sum()),
    "odd_bits": _odd_bits,
    "order_visible": lambda s: _visible(s, reverse=True),
    "rounding_visible": lambda s: _visible(s, rounding=False),
    "wide_ids": lambda s: int((s.topk >= 2**8).sum()),
    "wide_rows": lambda s: int((s.row_of >= 2**16).sum()),
    "donor_receiver": _donor_receivers,
    "slots_everywhere": lambda s: 0,  # counted over all steps, see count_witnesses
}
