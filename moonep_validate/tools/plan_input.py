"""How is a routing read from a file or a pipe, and a plan written? One routing, or its loads, a line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from moonep_validate.cases.layout import Ints, Layout
from moonep_validate.errors import CaseError
from moonep_validate.judge.oracle.plan import ExpectedPlan, make_plan, plan_of_loads
from moonep_validate.trace.schema import SchemaError, build, decoded, parsed, shown

_KEYS = ("generation", "S", "K", "E", "R", "B", "token_padding", "topk", "loads")
#: Bytes of a line.
MAX_LINE = 2**28
_NUMBERS = re.compile(r"[\s\d,;]+", re.ASCII)


class Planned(NamedTuple):
    """The plan of one line, and what is odd about the line, or an empty text."""

    number: int
    plan: ExpectedPlan
    remark: str


@dataclass(frozen=True)
class _Geometry:
    """The sizes of a line."""

    generation: str
    S: int
    K: int
    E: int
    R: int
    token_padding: int
    B: int | None = None


def read_routings(source: BinaryIO, name: str, layout: Layout | None = None) -> Iterator[Planned]:
    """Plan each line as it is read.

    Args:
        source: of bytes.
        name: what errors call it.
        layout: given, each line holds the loads of E experts, as a list or as comma-separated values; a file of
            one number a line is one such line.

    Raises:
        CaseError: naming the line, the value and the limit.
        OSError: if the source cannot be read.
    """
    found = False
    for number, line in _lines(source, name) if layout is None else _rows(_lines(source, name), layout):
        found = True
        try:
            yield Planned(number, *(_planned(line) if layout is None else _loads_alone(line, layout)))
        except ValueError as error:  # CaseError and SchemaError among them
            raise CaseError(f"{name}, line {number}: {error}") from None
    if not found:
        raise CaseError(f"{name} holds no routing: one JSON object a line is needed")


def plan_json(plan: ExpectedPlan, stats: dict[str, Any]) -> str:
    """One plan as one line of JSON; the outer index is the rank, in ``alloc`` the expert; no ``dst`` of loads."""
    data: dict[str, Any] = {"NvS": plan.layout.num_rows}
    names = ("dst",) if plan.dst.size else ()
    for name in (*names, "cu_seqlens", "experts_to_copy", "zero_fill_ranges", "remote_stats", "alloc"):
        data[name] = getattr(plan, name).tolist()
    return json.dumps({**data, "stats": stats})


def _lines(source: BinaryIO, name: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers."""
    number = 0
    while line := source.readline(MAX_LINE + 1):
        number += 1
        try:
            if len(line) > MAX_LINE:
                raise SchemaError(f"has more than {MAX_LINE} bytes")
            text = decoded(line).strip()
        except SchemaError as error:
            raise CaseError(f"{name}, line {number}: {error}") from None
        if text:
            yield number, text


def _rows(lines: Iterable[tuple[int, str]], layout: Layout) -> Iterator[tuple[int, str]]:
    """The same, a column of E numbers joined to one line."""
    column: list[str] = []
    for number, line in lines:
        if layout.E == 1 or not line.isdigit():
            yield number, line
            continue
        column.append(line)
        if len(column) == layout.E:
            yield number, ",".join(column)
            column = []
    if column:
        yield number, ",".join(column)


def _planned(line: str) -> tuple[ExpectedPlan, str]:
    try:
        data = parsed(line)
    except SchemaError as error:
        raise SchemaError(f"{_likely(line)} ({error})") from None
    if not isinstance(data, dict):
        raise ValueError(f'a routing is a JSON object, e.g. {{"generation": "B", "S": 3, ...}}; {_WITH_CASE}')
    kinds = [name for name in ("topk", "loads") if name in data]
    unknown = sorted(data.keys() - set(_KEYS))
    missing = sorted(set(_KEYS[:-2]) - {"B"} - data.keys()) + ([] if kinds else ["topk"])
    if unknown or missing or len(kinds) > 1:
        raise ValueError(
            f"unknown keys {unknown}, missing keys {missing}; known: {', '.join(sorted(_KEYS))}, of which topk "
            "(ids of each token) or loads (routes to each expert) is needed"
        )
    one = build(_Geometry, {name: value for name, value in data.items() if name not in kinds})
    layout = Layout(one.generation, R=one.R, E=one.E, K=one.K, S=one.S, pad=one.token_padding, slots=one.B)
    if kinds == ["loads"]:
        return plan_of_loads(_whole(data["loads"], "loads"), layout), ""
    topk = _topk(data["topk"], layout)
    return make_plan(topk, layout), _zeros(topk)


_WITH_CASE = "loads of experts alone need the sizes: plan --case 'genB+R4+E8+K2+S9+pad16' --input FILE"


def _likely(line: str) -> str:
    """What a line that is no JSON probably is, and what to do."""
    if _NUMBERS.fullmatch(line):
        return f"one JSON object a line is needed, this looks like CSV; {_WITH_CASE}"
    if line in ("{", "[") or line.endswith((",", "{", "[")):
        return "one JSON object a line is needed, this looks like one over several lines: try jq -c . FILE"
    return "one JSON object a line is needed, this is no JSON"


def _loads_alone(line: str, layout: Layout) -> tuple[ExpectedPlan, str]:
    """A line of E loads, as JSON or as CSV."""
    values = line if line.startswith("[") else f"[{','.join(re.split('[,; ]+', line))}]"
    return plan_of_loads(_whole(parsed(values), "the line"), layout), ""


def _whole(values: Any, name: str) -> Ints:
    """A list of whole numbers as an array."""
    if not isinstance(values, list) or set(map(type, values)) - {int}:
        raise ValueError(f"{name} is {shown(values)}, a list of whole numbers, one an expert, is needed")
    return _array(values, len(values))


def _array(values: Iterable[int], count: int) -> Ints:
    try:
        return np.fromiter(values, np.int64, count)
    except OverflowError:
        raise ValueError("a number has more than 64 bits") from None


def _topk(nested: Any, layout: Layout) -> Ints:
    """Expert ids ``[R, S, K]``; looked at before anything of their size is built."""
    ranks = _sizes([nested])
    tokens = _sizes(nested) if ranks else None
    wanted, got = (layout.R, layout.S, layout.K), "uneven or other content"
    ids = _sizes(list(chain.from_iterable(nested))) if tokens else None
    if tokens and ids and len(set(tokens)) > 1:
        raise ValueError(
            f"topk: the ranks have {min(tokens)} to {max(tokens)} tokens, every rank dispatches S: pad others to "
            f"S={max(tokens)} with legal ids; a padding token is computed as any other, with route weight 0"
        )
    if ranks and tokens and ids and len(set(ids)) == 1:
        flat = list(chain.from_iterable(chain.from_iterable(nested)))
        if set(map(type, flat)) == {int}:
            if (shape := (ranks[0], tokens[0], ids[0])) == wanted:
                return _array(flat, len(flat)).reshape(shape)
            got = str(shape)
    raise ValueError(f"topk is not a list of whole numbers [rank][token][k] with sizes {wanted}: it has {got}")


def _sizes(lists: list[Any]) -> list[int] | None:
    """Lengths of some lists; None if one is no list or there are none."""
    return list(map(len, lists)) if lists and set(map(type, lists)) == {list} else None


def _zeros(topk: Ints) -> str:
    """A remark on tokens all of whose routes go to expert 0: rows of an array that were never written look so."""
    tokens = topk.reshape(-1, topk.shape[-1])
    left = int((tokens == 0).all(axis=1).sum()) if tokens.shape[1] > 1 else 0
    if not left:
        return ""
    return f"{left} of {len(tokens)} tokens have expert 0 for every k: rows left at zero? MoonEP computes them all"
