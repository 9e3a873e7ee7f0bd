"""How good are the plans? Figures for information, never a status."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from moonep_validate.cases.layout import Ints, Layout
from moonep_validate.judge.facts import Missing, Step
from moonep_validate.judge.oracle.offsets import offsets
from moonep_validate.judge.oracle.plan import make_plan
from moonep_validate.judge.oracle.statistics import plan_stats


def measures(steps: Iterable[Step]) -> dict[str, float]:
    """Rows computed away from home and padding per real row, over all steps; what an engine's own padding costs.

    Returns:
        ``rows_moved``, ``padding_ratio``, ``offset_bits``; where an engine padded its batch also ``pads_slots``,
        ``pads_rows_moved`` and ``pads_prefetch_bytes`` of all ranks, and the same with ``local_`` for padding that
        stays at home.
    """
    steps = list(steps)
    return {**_moved(steps), **_cost_of_pads(steps), **_offset_bits(steps)}


def balance(steps: Iterable[Step]) -> dict[str, Any]:
    """What the plan of the first step that shows one does to each rank.

    Returns:
        Lists of one whole number a rank: ``before`` (rows of its own experts), ``rows`` (that it computes),
        ``moved`` (of these, rows of other ranks' experts), ``slots`` (that hold an expert), ``padding`` (rows) and
        ``bytes`` (of weights that it prefetches); empty where no step shows a plan whose ids are legal.
    """
    for step in steps:
        try:
            home, ranks, size = step.layout.home(step.topk).ravel(), step.rank_of.ravel(), step.case.R
            ends, slots = step.cu_seqlens[:, -1], (step.copies >= 0).sum(axis=1)
        except (Missing, IndexError):
            continue
        if any(((one < 0) | (one >= size)).any() for one in (home, ranks)):
            continue
        rows = np.bincount(ranks, minlength=size)
        figures = {
            "before": np.bincount(home, minlength=size),
            "rows": rows,
            "moved": np.bincount(ranks[home != ranks], minlength=size),
            "slots": slots,
            "padding": ends - rows,
            "bytes": slots * step.format.expert_bytes(step.case.H, step.case.I),
        }
        return {name: values.tolist() for name, values in figures.items()}
    return {}


def _offset_bits(steps: list[Step]) -> dict[str, float]:
    """Bits of the largest element offset of the compute stage; above 31, 32-bit arithmetic would wrap."""
    ran = [step for step in steps if "experts" in step.ops()]
    return {"offset_bits": max(one.end for one in offsets(ran[0].case)).bit_length()} if ran else {}


def _moved(steps: list[Step]) -> dict[str, float]:
    moved = padding = rows = 0
    for step in steps:
        try:
            moved += int((step.layout.home(step.topk) != step.rank_of).sum())
            padding += int(step.cu_seqlens[:, -1].sum()) - step.raw.size
            rows += step.raw.size
        except Missing:
            continue
    return {"rows_moved": moved / rows, "padding_ratio": padding / rows} if rows else {}


def _cost_of_pads(steps: list[Step]) -> dict[str, float]:
    """Slots, moved rows and prefetched bytes of the plans as dispatched, and with pads routed to own experts."""
    totals: dict[str, float] = {}
    for step in steps:
        try:
            topk, layout = step.topk, step.layout
            tokens = np.array([call.info["tokens"] for call in step.calls("layer")])
        except (Missing, KeyError):
            continue
        if ((topk < 0) | (topk >= layout.E)).any():  # check I2 says so; there is no plan to compare with
            continue
        size = step.format.expert_bytes(step.case.H, step.case.I)
        as_dispatched = step.oracle_plan or make_plan(topk, layout)
        at_home = make_plan(_at_home(topk, tokens, layout), layout)
        for prefix, plan in (("pads", as_dispatched), ("local_pads", at_home)):
            stats = plan_stats(plan, size)
            for name, key in (("slots", "slots_used"), ("rows_moved",) * 2, ("prefetch_bytes",) * 2):
                totals[f"{prefix}_{name}"] = totals.get(f"{prefix}_{name}", 0) + stats[key]
    return totals


def _at_home(topk: Ints, tokens: Ints, layout: Layout) -> Ints:
    """The routing with the tokens after the real ones dealt in turn to the experts of their own rank."""
    rank, token, k = np.indices(topk.shape)
    own = rank * layout.experts_per_rank + (token * layout.K + k) % layout.experts_per_rank
    routes: Ints = np.where(token < tokens[:, None, None], topk, own)
    return routes
