"""How is a routing read from a file, and a plan written to one? JSON Lines, one routing or plan a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moonep_validate.cases.case import CaseError
from moonep_validate.cases.layout import Ints, Layout
from moonep_validate.judge.oracle.plan import Plan, make_plan

_SIZES = ("S", "K", "E", "R", "token_padding")
_KEYS = {"generation", *_SIZES, "B", "topk"}


def read_routings(path: Path) -> Iterator[tuple[int, Plan]]:
    """Plan each line of a JSON Lines file.

    Yields:
        Line number and plan.

    Raises:
        CaseError: naming the line, the value and the limit.
        OSError: if the file cannot be read.
    """
    found = False
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        found = True
        try:
            yield number, _plan_line(line)
        except ValueError as error:  # CaseError and json's own error among them
            raise CaseError(f"{path}, line {number}: {error}") from None
    if not found:
        raise CaseError(f"{path} holds no routing: one JSON object a line is needed")


def plan_json(plan: Plan, stats: dict[str, Any]) -> str:
    """One plan as one line of JSON; the outer index is the rank, in ``alloc`` the expert."""
    data: dict[str, Any] = {"NvS": plan.layout.num_rows}
    for name in ("dst", "cu_seqlens", "experts_to_copy", "zero_fill_ranges", "remote_stats", "alloc"):
        data[name] = getattr(plan, name).tolist()
    return json.dumps({**data, "stats": stats})


def _plan_line(line: str) -> Plan:
    data = json.loads(line)
    if not isinstance(data, dict):
        raise ValueError('a routing is a JSON object, e.g. {"generation": "B", "S": 3, ...}')
    unknown, missing = sorted(data.keys() - _KEYS), sorted(_KEYS - data.keys() - {"B"})
    if unknown or missing:
        raise ValueError(f"unknown keys {unknown}, missing keys {missing}; known: {', '.join(sorted(_KEYS))}")
    for name in (*_SIZES, *(["B"] if data.get("B") is not None else [])):
        if type(data[name]) is not int:
            raise ValueError(f"{name} is {data[name]!r}, a whole number is needed")
    layout = Layout(
        generation=data["generation"],
        R=data["R"],
        E=data["E"],
        K=data["K"],
        S=data["S"],
        pad=data["token_padding"],
        slots=data.get("B"),
    )
    return make_plan(_topk(data["topk"], layout), layout)


def _topk(nested: Any, layout: Layout) -> Ints:
    try:
        topk = np.array(nested)
    except ValueError:
        topk = np.array(None)
    wanted = (layout.R, layout.S, layout.K)
    if topk.shape != wanted or topk.dtype.kind != "i":
        raise ValueError(
            f"topk is not a list of whole numbers [rank][token][k] with sizes {wanted}: it has "
            f"{topk.shape if topk.dtype.kind == 'i' else 'uneven or other content'}"
        )
    return topk.astype(np.int64)
