"""Did every token arrive, bit for bit, where the build's own plan says?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from moonep_validate.judge.checks import Compared, axes, differ, differ_bits, unchanged_inputs
from moonep_validate.judge.facts import Absent, Step
from moonep_validate.judge.registry import check
from moonep_validate.trace.recording import DIGEST


@check("D1", "dispatch", needs="digest")
def row_payload(s: Step) -> Iterator[Compared]:
    """Each planned row holds its token's bits and route weight"""
    rows, hidden = s.tap("dispatch", "rows"), s.tap("dispatch", "hidden")
    inside = s.in_range
    rank, row = torch.from_numpy(s.rank_of[inside]), torch.from_numpy(s.row_of[inside])
    routes = np.flatnonzero(inside)
    token = torch.from_numpy(routes // s.case.K)

    def place(i: tuple[int, ...]) -> dict[str, int]:
        return {**s.route_place(int(routes[i[0]])), **({"column": i[1]} if len(i) > 1 else {})}

    yield differ_bits("hidden", hidden.flatten(0, 1)[token], rows[rank, row], place)
    if s.has("dispatch", "rows" + DIGEST):  # of all columns, where only some of them are kept
        given, got = (s.tap("dispatch", name + DIGEST) for name in ("hidden", "rows"))
        yield differ_bits("digest of hidden", given.flatten(0, 1)[token], got[rank, row], place)
    if s.has("dispatch", "topk_weights"):
        want = s.tap("dispatch", "topk_weights").flatten()[torch.from_numpy(routes)]
        yield differ_bits("route weight", want, s.tap("dispatch", "row_weights")[rank, row], place)


@check("D2", "dispatch", needs="digest")
def zero_padding(s: Step) -> Iterator[Compared]:
    """Padding rows are zero, with zero weight"""
    rank, row = np.nonzero(s.in_group & (s.row_route < 0))
    if not len(rank):
        raise Absent("no group of this step has padding rows")
    index = (torch.from_numpy(rank), torch.from_numpy(row))

    def place(i: tuple[int, ...]) -> dict[str, int]:
        return {"rank": int(rank[i[0]]), "row": int(row[i[0]]), **({"column": i[1]} if len(i) > 1 else {})}

    for name in ("rows", "rows" + DIGEST, "row_weights"):
        if s.has("dispatch", name):
            got = s.tap("dispatch", name)[index]
            yield differ_bits(f"padding {name}", torch.zeros_like(got), got, place)


@check("A1", "dispatch")
def zero_copy_view(s: Step) -> Iterator[Compared]:
    """A dispatch with zero_copy returns the Buffer's own memory, any other one a copy"""
    told = 0
    for what, found, flag in (
        ("rows", "is_view", "zero_copy"),
        ("row weights", "weights_are_view", "router_weights_zero_copy"),
    ):
        if (is_view := s.all_info("dispatch", found)) is not None:
            told += 1
            want = np.full(s.case.R, bool(s.info("dispatch", flag, False)))
            yield differ(f"{what} are the Buffer's own", want, np.array(is_view), axes("rank"))
    if not told:
        raise Absent("this Buffer has no view of its memory to compare with")


@check("A2", "dispatch")
def replay_form(s: Step) -> Iterator[Compared]:
    """A replay returns the plan it was given, and no cu_seqlens"""
    if not s.info("dispatch", "replay", False):
        raise Absent("this step replays no plan")
    for key, what in (("same_plan", "the same plan object"), ("no_cu_seqlens", "None as cu_seqlens")):
        got = np.array([call.info.get(key) for call in s.calls("dispatch")])
        yield differ(f"replay returns {what}", np.ones(s.case.R, bool), got, axes("rank"))


@check("U1", "dispatch")
def dispatch_inputs(s: Step) -> Iterator[Compared]:
    """Dispatch leaves its inputs as they are, every field of a plan that it replays too"""
    yield from unchanged_inputs(s, "dispatch")
