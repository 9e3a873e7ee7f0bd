"""What follows from the calls of one step? All ranks lined up, with derived facts that checks share.

Routes have the axes ``[R, S, K]``; ranks' own things have the leading axis ``[R]``. Integers are numpy int64,
payloads are torch tensors. A fact that needs a tap which the trace lacks raises ``Missing``: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.cases.layout import Bools, Ints, Layout
from moonep_validate.cases.limits import buffer_rows
from moonep_validate.formats.stored import FORMATS
from moonep_validate.formats.weight_format import PROJECTIONS, WeightFormat
from moonep_validate.judge.forms import Called, Misfit, expected, misfits
from moonep_validate.judge.oracle.arithmetic import Arithmetic
from moonep_validate.judge.oracle.plan import ExpectedPlan
from moonep_validate.trace.recording import DIGEST, Recording
from moonep_validate.trace.trace import Call, Relation, Trace


class Missing(LookupError):
    """A tap that this step should have and has not: unknown, unless a call that did not return explains it."""


class Absent(Missing):
    """A tap of an operation that no rank called in this step: what needs it does not apply."""


class Malformed(Missing):
    """A tap of another form than promised: its values are compared with nothing; the check of forms says so."""


class Undecided(LookupError):
    """The trace does not show whether the promise was kept: the answer is unknown, and no pass."""


def _changed(case: Case, differs: Mapping[str, Any]) -> Case:
    """The case of a session that says in what it differs.

    Raises:
        CaseError: for a trace that names ranks that it has not, or sizes that no case has.
    """
    fields = {name: value for name, value in differs.items() if name != "ranks"}
    changed = case.session(**fields) if fields else case
    ranks = differs.get("ranks", range(changed.R))
    if len(ranks) != changed.R or not set(ranks) <= set(range(case.R)):
        raise CaseError(f"a session of R={changed.R} names the ranks {list(ranks)} of R={case.R}")
    return changed


def tally(ids: Ints, size: int) -> Ints:
    """How often each of ``0..size-1`` occurs: ``[size]``; other ids aside, since a subject may return anything."""
    return np.bincount(ids[(ids >= 0) & (ids < size)].ravel(), minlength=size)


class Step:
    """One call group over all ranks.

    Args:
        trace: the trace.
        name: the step.
        siblings: all steps of the trace by name, this one among them.
    """

    def __init__(self, trace: Trace, name: str, siblings: Mapping[str, Step] | None = None) -> None:
        self.trace, self.name, self.siblings = trace, name, {} if siblings is None else siblings
        self.differs: Mapping[str, Any] = next(iter(self._said_differences()), {})
        self.case: Case = _changed(trace.case, self.differs)
        self.ranks: Sequence[int] = self.differs.get("ranks", range(trace.case.R))
        self._taps: dict[tuple[str, str], Tensor] = {}
        self._misfits: dict[tuple[str, int], Mapping[str, Misfit]] = {}
        self.oracle_plan: ExpectedPlan | None = None  # filled by the first check that asks
        self._calls: list[Mapping[str, Call]] = [
            {call.op: call for call in self.calls_of(rank)} for rank in range(self.case.R)
        ]

    def _said_differences(self) -> Iterator[Mapping[str, Any]]:
        calls = (call for calls in self.trace.calls for call in calls if call.step == self.name)
        return (call.info["differs"] for call in calls if "differs" in call.info)

    def calls_of(self, rank: int) -> list[Call]:
        """All calls of one rank in this step, in order; its number is that in the step's session."""
        return [call for call in self.trace.calls[self.ranks[rank]] if call.step == self.name]

    def call(self, op: str, rank: int) -> Call:
        """One rank's call of this step; ``load`` is the one of the layer that the step used."""
        call = self._load(rank) if op == "load" else self._calls[rank].get(op)
        if call is None:
            kind = Missing if self._anybody_called(op) else Absent
            raise kind(f"rank {rank} made no {op} call in step {self.name!r}")
        return call

    def has_call(self, op: str, rank: int) -> bool:
        """Whether a rank made a call in this step."""
        return op in self._calls[rank]

    def _anybody_called(self, op: str) -> bool:
        """Whether a rank made such a call in this step; a load is a step of its own."""
        if op == "load":
            return any(call.op == op for calls in self.trace.calls for call in calls)
        return op in self.ops()

    def _load(self, rank: int) -> Call | None:
        """The load of the step's layer; of layer 0, which scripts load, where the step is no pass of a layer."""
        layer = self.call("layer", rank).info.get("layer", 0) if "layer" in self.ops() else 0
        loads = (call for call in self.trace.calls[self.ranks[rank]] if call.op == "load")
        mine = (call for call in loads if call.info.get("differs", {}) == self.differs)
        return next((call for call in mine if call.info.get("layer") == layer), None)

    def recorded(self, op: str, rank: int) -> bool:
        """Whether a rank made a call of which anything is known; of a lost rank nothing is."""
        if op != "load" and not self.has_call(op, rank):
            return False
        try:
            call = self.call(op, rank)
        except Missing:
            return False
        return bool(call.tensors or call.info.get("forms"))

    def calls(self, op: str) -> list[Call]:
        """The calls of all ranks, in rank order."""
        return [self.call(op, rank) for rank in range(self.case.R)]

    def info(self, op: str, key: str, default: Any = None) -> Any:
        """JSON data of rank 0's call; the scenario is the same on every rank."""
        return self.call(op, 0).info.get(key, default)

    def ops(self) -> list[str]:
        """Operations that any rank called in this step."""
        return self._ops

    @cached_property
    def _ops(self) -> list[str]:
        return list(dict.fromkeys(op for calls in self._calls for op in calls))

    def has(self, op: str, name: str) -> bool:
        """Whether every rank recorded a tensor that a step may lack.

        Raises:
            Missing: if some ranks did and others did not.
        """
        having = [op in calls and name in calls[op].tensors for calls in self._calls]
        if any(having) and not all(having):
            raise Missing(f"{op}.{name} is missing on ranks {_listed(having, False)} of step {self.name!r}")
        return all(having)

    def all_info(self, op: str, key: str) -> list[Any] | None:
        """JSON data of all ranks' calls that a subject may leave out (or None), or None if all of them do.

        Raises:
            Missing: if some ranks have it and others have not.
        """
        found = [call.info.get(key) for call in self.calls(op)]
        having = [one is not None for one in found]
        if any(having) and not all(having):
            raise Missing(f"{op} says no {key} on ranks {_listed(having, False)} of step {self.name!r}")
        return found if all(having) else None

    @cached_property
    def stopped(self) -> bool:
        """Whether a call of this step did not return, so that F1 says why taps are missing."""
        mine = [call for calls in self.trace.calls for call in calls if call.step == self.name]
        ends = [call for calls in self.trace.calls for call in calls if _ended(call)]
        told = any(not call.done or not (call.error or {}).get("peer") for call in ends)
        return told and any(map(_ended, mine))

    def one(self, op: str, rank: int, name: str) -> Tensor:
        """One recorded tensor of one rank, whose shape may differ from those of the others.

        Raises:
            Missing: if the rank did not record it.
            Malformed: if it has not the promised shape and dtype, or is not what the recorder noted.
        """
        call = self.call(op, rank)
        if name not in call.tensors:
            reason = f" ({call.error['type']}: {call.error['message']})" if call.error else ""
            raise Missing(f"rank {rank} has no {op}.{name} in step {self.name!r}{reason}")
        misfit = self.misfits(op, rank).get(name.removesuffix(DIGEST))
        if misfit and not misfit.usable:
            raise Malformed(f"rank {rank}: {op}.{name} is {misfit.actual}; promised is {misfit.expected}")
        return call.tensors[name]

    def misfits(self, op: str, rank: int) -> Mapping[str, Misfit]:
        """The tensors of one rank's call that have not the promised form."""
        if (op, rank) not in self._misfits:
            call, (layout, rows) = self.call(op, rank), self._sizes[rank]
            noted = call.info.get("forms", {})
            called = Called(self.case, layout, rows, self.by_engine, call.info, noted)
            recording = Recording.parse(self.trace.recording)
            self._misfits[op, rank] = misfits(op, expected(op, called), call, recording)
        return self._misfits[op, rank]

    def noted(self, op: str, name: str) -> dict[int, Mapping[str, Any]]:
        """The noted form of a tensor by rank, of those that recorded it."""
        forms = {rank: calls[op].info.get("forms", {}) for rank, calls in enumerate(self._calls) if op in calls}
        return {rank: form[name] for rank, form in forms.items() if name in form}

    def tap(self, op: str, name: str) -> Tensor:
        """One recorded tensor of all ranks: ``[R, ...]``; shared by all checks, so not to be changed.

        Raises:
            Missing: if a rank did not record it, or has another form of it, see ``one``.
        """
        if (op, name) in self._taps:
            return self._taps[op, name]
        tensors = [self.one(op, rank, name) for rank in range(self.case.R)]
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if len(shapes) > 1:
            raise Missing(f"{op}.{name} has different shapes on the ranks: {sorted(shapes)}")
        self._taps[op, name] = torch.stack(tensors)
        return self._taps[op, name]

    def ints(self, op: str, name: str) -> Ints:
        """An integer tap as numpy int64."""
        return self.tap(op, name).numpy().astype(np.int64)

    @property
    def format(self) -> WeightFormat:
        """The format that the layer's weights are stored in."""
        return FORMATS[self.case.format.name]

    def stored_names(self, op: str, prefix: str) -> list[str]:
        """The weights of a call, as ``format.names`` has them; without scales where they were decoded before."""
        recorded = self.call(op, 0).tensors  # a trace that has travelled keeps no order
        scaled = f"{prefix}{self.format.names[-1]}" in recorded
        return list(self.format.names if scaled else PROJECTIONS)

    @property
    def arithmetic(self) -> Arithmetic:
        """How the experts of this case compute, with the rounding points that their part declares."""
        return Arithmetic.of(self.case, self.trace.parts["experts"].rounds)

    def relations(self) -> list[tuple[Relation, Step]]:
        """Promises that this step makes, each with its base step."""
        made = [relation for relation in self.trace.relations if relation.step == self.name]
        return [(relation, self.sibling(relation.base)) for relation in made]

    def sibling(self, name: str) -> Step:
        """Another step of the same trace."""
        return self.siblings.get(name) or Step(self.trace, name)

    @cached_property
    def layout(self) -> Layout:
        """The geometry that this step was really dispatched with; an engine chooses its own capacity S.

        A session that was opened with another slot count than the case says so.

        Raises:
            Missing: if the ranks dispatched different numbers of tokens.
        """
        layouts = {self._sizes[rank][0] for rank in self.noted("dispatch", "hidden")}
        if len(layouts) > 1:
            sizes = sorted(layout.S for layout in layouts)
            raise Missing(f"the ranks dispatched different numbers of tokens: {sizes}")
        return layouts.pop() if layouts else self._sizes[0][0]

    @cached_property
    def by_engine(self) -> bool:
        """Whether an engine made the calls; a session of a Buffer says with how many slots it was opened."""
        infos = [calls["dispatch"].info for calls in self._calls if "dispatch" in calls]
        return bool(infos) and not any("slots" in info for info in infos)

    @cached_property
    def _sizes(self) -> list[tuple[Layout, int]]:
        """Geometry and NvS of each rank; every tensor's form is asked for them."""
        layouts = [self._layout_on(rank) for rank in range(self.case.R)]
        rows = {layout: self._rows(layout) for layout in dict.fromkeys(layouts)}
        return [(layout, rows[layout]) for layout in layouts]

    def _layout_on(self, rank: int) -> Layout:
        """The geometry of one rank: what its caller asked for, whatever came of it."""
        layout = Layout.of(self.case)
        infos = [calls["dispatch"].info for calls in self._calls if "dispatch" in calls]
        opened = next((info["slots"] for info in infos if "slots" in info), layout.num_slots)
        if opened != layout.num_slots:
            layout = replace(layout, slots=opened)
        asked = self.noted("dispatch", "hidden").get(rank) if self.by_engine else None
        return replace(layout, S=asked["shape"][0]) if asked and asked["shape"] else layout

    def _rows(self, layout: Layout) -> int:
        """NvS of a geometry; whether it is rounded up is the build's choice, if all ranks choose alike."""
        steps = [self] if "dispatch" in self.ops() else list(self.siblings.values())
        got = {form["shape"][0] for step in steps for form in step.noted("dispatch", "rows").values()}
        sizes = (layout.R, layout.E, layout.K, layout.S, layout.pad)
        legal = {buffer_rows(generation, *sizes) for generation in ("A", "B")}
        return got.pop() if len(got) == 1 and got <= legal else layout.num_rows

    @cached_property
    def real(self) -> Bools:
        """Tokens that the layer was given, on an engine without the padding up to S: bool ``[R, S]``."""
        counts = [call.info.get("tokens", self.case.S) for call in self.calls("layer")]
        real: Bools = np.arange(self.case.S) < np.array(counts)[:, None]
        return real

    @cached_property
    def topk(self) -> Ints:
        """Expert of each route: ``[R, S, K]``."""
        return self.ints("dispatch", "topk_ids").reshape(self.case.R, self.layout.S, self.case.K)

    @cached_property
    def dst(self) -> Ints:
        """The plan's encoded destinations: ``[R, S, K]``."""
        return self.ints("dispatch", "dst").reshape(self.case.R, self.layout.S, self.case.K)

    @cached_property
    def raw(self) -> Ints:
        """Decoded destinations, rank * NvS + row: ``[R, S, K]``."""
        return np.where(self.dst < 0, -self.dst - 1, self.dst)

    @cached_property
    def num_rows(self) -> int:
        """NvS of the build."""
        return self._rows(self.layout)

    @cached_property
    def rank_of(self) -> Ints:
        """Destination rank of each route: ``[R, S, K]``."""
        return self.raw // self.num_rows

    @cached_property
    def row_of(self) -> Ints:
        """Destination row of each route on its rank: ``[R, S, K]``."""
        return self.raw % self.num_rows

    @cached_property
    def in_range(self) -> Bools:
        """Whether each route's destination rank exists: bool ``[R, S, K]``."""
        return (self.rank_of >= 0) & (self.rank_of < self.case.R)

    @cached_property
    def cu_seqlens(self) -> Ints:
        """Inclusive padded end of each group: ``[R, G]``."""
        return self.ints("dispatch", "cu_seqlens")

    @cached_property
    def copies(self) -> Ints:
        """``experts_to_copy`` as each rank sees its own slots: ``[R, slots]``."""
        everybody = self.ints("dispatch", "experts_to_copy")
        return everybody[np.arange(self.case.R), np.arange(self.case.R)]

    @cached_property
    def group_expert(self) -> Ints:
        """Expert of each group, -1 for an unused slot: ``[R, G]``."""
        return self.layout.group_experts(self.copies)

    @cached_property
    def row_group(self) -> Ints:
        """Group of each row of each rank: ``[R, NvS]``; G for rows after the last group."""
        rows = np.arange(self.num_rows)
        return np.stack([np.searchsorted(cu, rows, side="right") for cu in self.cu_seqlens])

    @cached_property
    def row_expert(self) -> Ints:
        """Expert that each row of each rank is computed with: ``[R, NvS]``, -1 where none is."""
        none = np.full((self.case.R, 1), -1)
        return np.take_along_axis(np.concatenate([self.group_expert, none], axis=1), self.row_group, axis=1)

    @cached_property
    def in_group(self) -> Bools:
        """Whether each row lies inside a group: ``[R, NvS]``; the rows after the last group are undefined."""
        inside: Bools = self.row_group < self.cu_seqlens.shape[1]
        return inside

    @cached_property
    def row_route(self) -> Ints:
        """Route ``(rank * S + token) * K + k`` that occupies each row: ``[R, NvS]``, -1 for none."""
        routes = np.full((self.case.R, self.num_rows), -1)
        inside = self.in_range
        routes[self.rank_of[inside], self.row_of[inside]] = np.flatnonzero(inside)
        return routes

    @cached_property
    def group_rows(self) -> Ints:
        """Routes whose row lies in each group: ``[R, G]``."""
        groups = self.cu_seqlens.shape[1]
        rank, row = self.rank_of[self.in_range], self.row_of[self.in_range]
        flat = rank * (groups + 1) + self.row_group[rank, row]
        return np.bincount(flat, minlength=self.case.R * (groups + 1)).reshape(self.case.R, -1)[:, :groups]

    @cached_property
    def alloc(self) -> Ints:
        """Routes of each expert that each rank computes: ``[E, R]``; ids of no expert aside."""
        flat = (self.topk * self.case.R + self.rank_of)[self.in_range]
        return tally(flat, self.case.E * self.case.R).reshape(self.case.E, self.case.R)

    @cached_property
    def is_duplicate(self) -> Bools:
        """Whether an earlier k of the same token goes to the same rank: ``[R, S, K]``."""
        same = self.rank_of[..., :, None] == self.rank_of[..., None, :]
        duplicate: Bools = np.tril(same, -1).any(axis=-1)
        return duplicate

    @cached_property
    def in_slot(self) -> Bools:
        """Whether each route is computed from a redundant slot: ``[R, S, K]``."""
        rank = np.where(self.in_range, self.rank_of, 0)
        inside: Bools = self.row_group[rank, self.row_of] >= self.layout.num_home_groups
        return inside

    def route_place(self, route: int) -> dict[str, int]:
        """Where a route comes from and goes to, for findings."""
        source, token, k = np.unravel_index(route, self.raw.shape)
        return {
            "rank": int(self.rank_of[source, token, k]),
            "row": int(self.row_of[source, token, k]),
            "source_rank": int(source),
            "token": int(token),
            "k": int(k),
            "expert": int(self.topk[source, token, k]),
        }

    def row_place(self, rank: int, row: int) -> dict[str, int]:
        """The same for a row; only rank and row where no route occupies it."""
        route = self.row_route[rank, row]
        return self.route_place(int(route)) if route >= 0 else {"rank": rank, "row": row}


def _ended(call: Call) -> bool:
    """Whether a call raised or never came back."""
    return not call.done or call.error is not None


def _listed(having: list[bool], wanted: bool) -> str:
    return ", ".join(str(rank) for rank, has in enumerate(having) if has is wanted)


def steps_of(trace: Trace) -> dict[str, Step]:
    """All steps of a trace in order; they share what one derives for another."""
    steps: dict[str, Step] = {}
    for name in trace.steps():
        steps[name] = Step(trace, name, steps)
    return steps
