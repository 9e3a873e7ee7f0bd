"""Which API generation is it, and how are its weights laid out? The only place that calls a Buffer by generation.

A module is judged if it offers MoonEP's ``Buffer``. The generation is read from signatures: ``B`` in the
constructor and ``full_gate_weight`` in ``prefetch_weight`` mean A, ``local_gate_weight`` means B.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from copy import copy
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.cases.layout import Layout
from moonep_validate.data.problem import PROJECTIONS, EachExpert
from moonep_validate.sessions.protocols import BufferPlan
from moonep_validate.worlds.comm import Comm


def import_module(name: str) -> ModuleType:
    """Import a module that offers ``Buffer``.

    Raises:
        CaseError: if it cannot be imported, or has no class ``Buffer``; never replaced by anything else.
    """
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise CaseError(f"--moonep-module {name} cannot be imported: {type(error).__name__}: {error}") from None
    if not inspect.isclass(getattr(module, "Buffer", None)):
        raise CaseError(
            f"--moonep-module {name} has no class Buffer; it offers: {', '.join(_public(module)) or 'nothing'}"
        )
    return module


def detect_generation(buffer: type, forced: str | None = None) -> str:
    """``"A"`` or ``"B"``.

    Raises:
        CaseError: if the signatures do not tell (use ``--api``), contradict each other, or contradict ``forced``.
    """
    constructor, prefetch = (
        parameters_of(getattr(buffer, name, None)) for name in ("__init__", "prefetch_weight")
    )
    said = {"A"} if "B" in constructor else set()
    said |= {"A"} if "full_gate_weight" in prefetch else set()
    said |= {"B"} if "local_gate_weight" in prefetch else set()
    if len(said) == 2:
        raise CaseError(
            f"{buffer.__module__}.Buffer mixes both generations: B in the constructor, local_* in prefetch"
        )
    if forced and said and said != {forced}:
        raise CaseError(f"--api {forced}, but the signatures of {buffer.__module__}.Buffer say {said.pop()}")
    if not said and not forced:
        raise CaseError(
            f"the signatures of {buffer.__module__}.Buffer do not tell the generation; give --api A or --api B"
        )
    return forced or said.pop()


def make_buffer(buffer: Callable[..., Any], case: Case, group: Any) -> Any:
    """Construct a Buffer for a case; collective."""
    slots = {"B": Layout.of(case).num_slots} if case.generation == "A" else {}
    return buffer(case.S, case.H, case.K, case.E, case.R, token_padding=case.pad, group=group, **slots)


def parameters_of(function: Any) -> set[str]:
    """Names of a function's parameters; empty where its signature does not tell."""
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def _public(module: ModuleType) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_")][:10]


class Slots:
    """Expert weights of one rank with room for redundant experts, in the layout of a generation.

    Args:
        case: the geometry.
        comm: for memory that peers map.
        shapes: name -> shape of one expert; names with ``scale`` are scales.
        dtypes: name -> dtype.
        gap: rows behind a rank's slots that nobody may write, as where pools are padded to an allocation.
        rows: of generation A, in which row each rank's experts are in a tensor of a name, ``[R, E/R]``; None: in
            that of their id. In B a rank has its own experts only.
    """

    def __init__(
        self,
        case: Case,
        comm: Comm,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        gap: int = 0,
        rows: Callable[[str], Tensor] | None = None,
    ) -> None:
        self.case, self.rank, self.names = case, comm.rank, list(shapes)
        self.gap, self._rows = gap, rows if case.generation == "A" else None
        layout = Layout.of(case)
        per_rank = layout.experts_per_rank
        self.own = slice(self.rank * per_rank, (self.rank + 1) * per_rank)
        self._whole: dict[str, Tensor] = {}  # gaps included
        self._store: dict[str, Tensor] = {}
        self._local: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            if case.generation == "A":
                rows_in_all = case.E + layout.num_slots
                whole = torch.zeros((rows_in_all + gap, *shape), dtype=dtypes[name], device=comm.device)
                self._keep(name, whole, whole[:rows_in_all])
            else:
                whole = comm.symmetric(name, (per_rank + gap, *shape), dtypes[name])
                self._keep(name, whole, whole[:, :per_rank])
                self._local[name] = torch.zeros((per_rank, *shape), dtype=dtypes[name], device=comm.device)

    def _keep(self, name: str, whole: Tensor, store: Tensor) -> None:
        self._whole[name], self._store[name] = whole, store
        if self.needs_all_experts:
            self._local[name] = store[self.own]

    @property
    def needs_all_experts(self) -> bool:
        """Whether ``load`` needs the experts of every rank (generation A pulls from rows that it can read)."""
        return self.case.generation == "A"

    def load(self, weights: dict[str, Tensor]) -> None:
        """Put expert weights in place: ``[E, ...]`` or ``[E/R, ...]``, see ``needs_all_experts``."""
        for name, tensor in weights.items():
            target = self._store[name][: self.case.E] if self.needs_all_experts else self._local[name]
            if self._rows:  # what a rank owns is told by what it loaded, not by where it should be
                target[self._rows(name).flatten().to(target.device)] = tensor.to(target.device)
                self._local[name] = tensor[self.own].to(target.device)
            else:
                target.copy_(tensor)

    def load_each(self, weights: EachExpert) -> None:
        """Put weights in place that are made expert by expert."""
        experts = range(self.case.E) if self.needs_all_experts else range(self.case.E)[self.own]
        self.load({name: torch.stack([make(e) for e in experts]) for name, (_, make) in weights.items()})

    def renew(self) -> None:
        """Take new tensors for what prefetch reads, as after a second load; slots that peers map stay."""
        for name, local in self._local.items():
            if self.needs_all_experts:
                whole = torch.zeros_like(self._whole[name])
                self._keep(name, whole, whole[: len(self._store[name])])
            else:
                self._local[name] = torch.zeros_like(local)

    def guards(self, name: str) -> Tensor:
        """The gap behind the rank's slots, ``[gap, ...]``."""
        whole = self._whole[name] if self.needs_all_experts else self._whole[name][self.rank]
        return whole[len(whole) - self.gap :]

    def sources(self, name: str) -> Tensor | None:
        """Of rows in an order of their own: all experts in it, ``[E, ...]``."""
        return self._store[name][: self.case.E] if self._rows else None

    def readable(self, name: str) -> Tensor | None:
        """What a rank may read beside its own experts: those of all ranks in A, ``[E, ...]``."""
        return self._store[name][: self.case.E] if self.needs_all_experts else None

    def plan(self, plan: BufferPlan) -> BufferPlan:
        """The plan that prefetch is given: with row numbers in place of expert ids where the two differ."""
        if not self._rows:
            return plan
        copies = plan.experts_to_copy
        rows = self._rows("prefetch").flatten().to(device=copies.device, dtype=copies.dtype)
        changed = copy(plan)  # what else a build keeps in its plan goes along
        numbers = torch.where(copies >= 0, rows[copies.clamp(min=0).long()], copies)
        object.__setattr__(changed, "experts_to_copy", numbers)  # plans of some builds are frozen
        return changed

    def local(self, name: str) -> Tensor:
        """The rank's own experts, ``[E/R, ...]``."""
        return self._local[name]

    def slots(self, name: str) -> Tensor:
        """The rank's slots, ``[slots, ...]``."""
        return self._store[name][self.case.E :] if self.needs_all_experts else self._store[name][self.rank]

    def groups(self, name: str) -> Tensor:
        """A copy of the weight of every compute group, ``[groups, ...]``."""
        parts = [self._store[name]] if self.needs_all_experts else [self.local(name), self.slots(name)]
        if self._rows:
            parts = [parts[0][self._rows("experts").flatten()], self.slots(name)]
        return torch.cat(parts)

    def prefetch_arguments(self) -> dict[str, Tensor]:
        """Keyword arguments of ``prefetch_weight``."""
        if self.needs_all_experts:
            return {f"full_{_kind(name)}": self._store[name] for name in self.names}
        local = {f"local_{_kind(name)}": self._local[name] for name in self.names}
        return {**local, **{f"{name}_prefetch_buffer": self._store[name] for name in self.names}}


def _kind(name: str) -> str:
    """``gate`` -> ``gate_weight``; ``gate_scale`` stays."""
    return name if name.endswith("_scale") else f"{name}_weight"


class Gradients:
    """float32 gradients of one rank in the layout of a generation; the buffers are what peers read.

    Args:
        case: the geometry.
        comm: for memory that peers map.
        shapes: projection -> shape of one expert.
    """

    def __init__(self, case: Case, comm: Comm, shapes: dict[str, tuple[int, ...]]) -> None:
        self.case, self.rank = case, comm.rank
        layout = Layout.of(case)
        per_rank = layout.experts_per_rank
        self.own = (
            slice(self.rank * per_rank, (self.rank + 1) * per_rank) if case.generation == "A" else slice(None)
        )
        rows = layout.num_groups if case.generation == "A" else per_rank
        self.full = {name: torch.zeros((rows, *shape), device=comm.device) for name, shape in shapes.items()}
        self.buffers = {
            name: comm.symmetric(f"grad {name}", (layout.num_slots, *s), torch.float32)
            for name, s in shapes.items()
        }

    def local(self, name: str) -> Tensor:
        """Gradients of the owned experts, ``[E/R, ...]``."""
        return self.full[name][self.own]

    def slots(self, name: str) -> Tensor:
        """Gradients in this rank's slots, ``[slots, ...]``."""
        return self.buffers[name][self.rank]

    def arguments(self) -> dict[str, Tensor]:
        """Keyword arguments of ``reduce_grad``."""
        kind = "full" if self.case.generation == "A" else "local"
        grads = {f"{kind}_{name}_grad": self.full[name] for name in PROJECTIONS}
        return {**grads, **{f"{name}_reduce_buffer": self.buffers[name] for name in PROJECTIONS}}
