"""Which API generation is it, and how are its weights laid out? The only place that calls a Buffer by generation.

A module is judged if it offers MoonEP's ``Buffer``. The generation is read from signatures: ``B`` in the
constructor and ``full_gate_weight`` in ``prefetch_weight`` mean A, ``local_gate_weight`` means B.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moonep_validate.case import Case, CaseError
from moonep_validate.contract import Layout
from moonep_validate.problem import PROJECTIONS
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
    constructor, prefetch = (_parameters(getattr(buffer, name, None)) for name in ("__init__", "prefetch_weight"))
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


def _parameters(function: Any) -> set[str]:
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
    """

    def __init__(
        self, case: Case, comm: Comm, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, torch.dtype]
    ) -> None:
        self.case, self.rank, self.names = case, comm.rank, list(shapes)
        layout = Layout.of(case)
        per_rank = layout.experts_per_rank
        self.own = slice(self.rank * per_rank, (self.rank + 1) * per_rank)
        self._store: dict[str, Tensor] = {}
        self._local: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            if case.generation == "A":
                rows = case.E + layout.num_slots
                self._store[name] = torch.zeros((rows, *shape), dtype=dtypes[name], device=comm.device)
                self._local[name] = self._store[name][self.own]
            else:
                self._store[name] = comm.symmetric(name, (per_rank, *shape), dtypes[name])
                self._local[name] = torch.zeros((per_rank, *shape), dtype=dtypes[name], device=comm.device)

    @property
    def needs_all_experts(self) -> bool:
        """Whether ``load`` needs the experts of every rank (generation A pulls from rows that it can read)."""
        return self.case.generation == "A"

    def load(self, weights: dict[str, Tensor]) -> None:
        """Put expert weights in place: ``[E, ...]`` or ``[E/R, ...]``, see ``needs_all_experts``."""
        for name, tensor in weights.items():
            target = self._store[name][: self.case.E] if self.needs_all_experts else self._local[name]
            target.copy_(tensor)

    def local(self, name: str) -> Tensor:
        """The rank's own experts, ``[E/R, ...]``."""
        return self._local[name]

    def slots(self, name: str) -> Tensor:
        """The rank's slots, ``[slots, ...]``."""
        return self._store[name][self.case.E :] if self.needs_all_experts else self._store[name][self.rank]

    def groups(self, name: str) -> Tensor:
        """A copy of the weight of every compute group, ``[groups, ...]``."""
        parts = [self._store[name]] if self.needs_all_experts else [self.local(name), self.slots(name)]
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
