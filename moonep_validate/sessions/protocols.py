"""What may a script ask of a session? Three doors, and the things that pass through them.

The layer door is everybody's. The Buffer door adds the single stages, the engine door what an engine can do around
a Buffer. All members of a door are methods, so that ``isinstance`` tells which door a session has without calling
anything: a property might allocate memory, which is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from moonep_validate.data.problem import Batch, EachExpert


class BufferPlan(Protocol):
    """MoonEP's plan, as a Buffer returns it; the tensors are those of docs/contract.md, Plan."""

    @property
    def experts_to_copy(self) -> Tensor:
        """int32 ``[R, slots]``: the expert in each slot, -1 for an unused one."""

    @property
    def zero_fill_ranges(self) -> Tensor:
        """int32 ``[n, 2]``: first row and number of the padding rows of each group."""

    @property
    def dst(self) -> Tensor:
        """int32 ``[S, K]``: where the rows of this rank's tokens are."""


class MoonEPBuffer(Protocol):
    """MoonEP's Buffer as a bad call sees it: any arguments, and no promise of a result."""

    def dispatch(self, *args: object, **flags: object) -> object:
        """Must refuse what it is given, or plan and send it."""

    def combine(self, *args: object, **flags: object) -> object:
        """Must refuse what it is given, or sum it."""


@dataclass(frozen=True)
class GroupedRows:
    """Rows in the order of their expert groups, as the experts of one rank take them.

    Attributes:
        rows: ``[NvS, H]`` bf16.
        row_weights: ``[NvS]`` float32, or None.
        cu_seqlens: ``[G]`` int32, the end of each group; of a replay, that of the dispatch which made the plan.
    """

    rows: Tensor
    row_weights: Tensor | None
    cu_seqlens: Tensor

    @property
    def end(self) -> int:
        """First row after the last group."""
        return int(self.cu_seqlens[-1])


@dataclass(frozen=True)
class Dispatched(GroupedRows):
    """What a dispatch gave one rank.

    Attributes:
        plan: the subject's plan object.
        turn: of rows that are a view: the write that they are promised, where the Buffer stamps leases.
    """

    plan: BufferPlan
    turn: int | None = None


class WeightSlots(Protocol):
    """Expert weights of one rank with room for redundant experts, see ``subjects/buffer/api.py``."""

    @property
    def names(self) -> Sequence[str]:
        """Of the tensors."""

    @property
    def gap(self) -> int:
        """Rows behind the slots that nobody may write."""

    def load_each(self, weights: EachExpert) -> None:
        """Put weights in place that are made expert by expert."""

    def renew(self) -> None:
        """Take new tensors for what prefetch reads."""

    def local(self, name: str) -> Tensor:
        """The rank's own experts, ``[E/R, ...]``."""

    def slots(self, name: str) -> Tensor:
        """The rank's slots, ``[slots, ...]``."""

    def sources(self, name: str) -> Tensor | None:
        """All experts in it, ``[E, ...]``, of rows in an order of their own."""

    def guards(self, name: str) -> Tensor:
        """The gap, ``[gap, ...]``."""

    def readable(self, name: str) -> Tensor | None:
        """What a rank may read beside its own experts: those of all ranks in generation A."""

    def plan(self, plan: BufferPlan) -> BufferPlan:
        """The plan that prefetch is given."""

    def prefetch_arguments(self) -> dict[str, Tensor]:
        """Keyword arguments of ``prefetch_weight``."""


class GradientSlots(Protocol):
    """float32 gradients of one rank with those of its slots."""

    @property
    def full(self) -> Mapping[str, Tensor]:
        """Projection -> gradients that the Buffer adds to, those of other ranks' experts among them in A."""

    def local(self, name: str) -> Tensor:
        """Of the owned experts, ``[E/R, ...]``."""

    def slots(self, name: str) -> Tensor:
        """In this rank's slots, ``[slots, ...]``."""

    def arguments(self) -> dict[str, Tensor]:
        """Keyword arguments of ``reduce_grad``."""


class CapturedPass(Protocol):
    """A pass in a CUDA graph."""

    def launch(self, step: str, batch: Batch) -> None:
        """Launch it with a batch of the routing of its plan, and record that as a step."""


@runtime_checkable
class LayerDoor(Protocol):
    """One live layer, or several, on one rank."""

    def forward(self, step: str, batch: Batch, layer: int = 0, mark: bool = False, **flags: bool) -> Tensor:
        """Run dispatch, prefetch, experts and combine as one recorded step; returns ``[S, H]``."""

    def unrecorded(self, batch: Batch, times: int) -> None:
        """Run so many passes of a batch of which nothing is noted; of a Buffer without experts."""

    def close(self) -> None:
        """Collective."""


@runtime_checkable
class BufferDoor(LayerDoor, Protocol):
    """A layer whose Buffer can be called stage by stage; each call is recorded under its step."""

    def load(self, layer: int) -> None:
        """Bring a layer's weights in place."""

    def num_groups(self) -> int:
        """Length of ``cu_seqlens``."""

    def takes(self, call: str, flag: str) -> bool:
        """Whether this build's Buffer has a flag of a call, which other builds do without."""

    def poison_slots(self, step: str) -> None:
        """Fill this rank's slots, so that what the next prefetch leaves out shows."""

    def dispatch(
        self,
        step: str,
        batch: Batch,
        *,
        replay: Dispatched | None = None,
        route_weights: bool = True,
        **flags: bool,
    ) -> Dispatched:
        """Dispatch a batch, or replay an earlier plan with it."""

    def prefetch(
        self, step: str, plan: BufferPlan, weights: WeightSlots | None = None, async_finish: bool = False
    ) -> None:
        """Fill the slots that a plan uses; by default those of the layer's own weights."""

    def experts(self, step: str, sent: Dispatched, in_place: bool = False) -> Tensor:
        """Compute all groups: ``[NvS, H]``."""

    def combine(self, step: str, sent: Dispatched, rows: Tensor, repeat: int = 0, **flags: bool) -> Tensor:
        """Sum rows back to tokens: ``[S, H]``."""

    def compute_alone(self, step: str, number: int, lengths: Sequence[int]) -> Tensor:
        """The experts on groups of given lengths, without dispatch."""

    def make_packed_slots(self, weights: EachExpert, gap: int = 0, local_first: bool = False) -> WeightSlots:
        """Allocate uint8 weights with slots; collective."""

    def make_gradients(self) -> GradientSlots:
        """Allocate gradients with slots; collective."""

    def reduce(self, step: str, plan: BufferPlan, grads: GradientSlots) -> None:
        """Bring the slots' gradients home."""

    def unrecorded_reduces(self, plan: BufferPlan, grads: GradientSlots, times: int) -> None:
        """Bring gradients home so many times, of which nothing is noted."""

    def capture(self, step: str, sent: Dispatched) -> CapturedPass:
        """Capture a pass by the plan of an earlier dispatch; collective."""

    def planning_in_capture(self, batch: Batch) -> Callable[[MoonEPBuffer], object]:
        """A call that plans while a CUDA graph is captured."""

    def refuses(self, step: str, what: str, call: Callable[[MoonEPBuffer], object]) -> None:
        """Record how the Buffer answers a call that it must refuse; every rank makes the same one."""


@runtime_checkable
class EngineDoor(LayerDoor, Protocol):
    """The layers of an engine, and what else it must stand."""

    def forward(
        self,
        step: str,
        batch: Batch,
        layer: int = 0,
        mark: bool = False,
        weights: int | None = None,
        **flags: bool,
    ) -> Tensor:
        """As ``LayerDoor.forward``; ``weights`` says whose weights the layer was reloaded with."""

    def abort(self, step: str, batch: Batch) -> None:
        """A step in which combine raises on every rank."""

    def reload(self, index: int) -> bool:
        """Load another layer's weights into layer 0; whether the engine did it."""

    def probe(self) -> None:
        """Ask the engine everything that it must answer in a known way."""
