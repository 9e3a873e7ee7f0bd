"""What may SPMD code ask of its world? A small set of collectives, the same in every world.

The reference transport and all our scenario code talk through ``Comm`` only. Every collective names itself,
so that ranks which disagree about what comes next are told so instead of waiting for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:  # a worker knows these before it has imported torch
    import torch
    from torch import Tensor

T = TypeVar("T")


class CollectiveError(RuntimeError):
    """A collective that cannot complete; raised on every rank that waits in it."""


class PeerFailed(CollectiveError):
    """Another rank raised: this rank stops too, but the finding is the peer's."""


class Deadlock(CollectiveError):
    """No rank can go on: a rank finished, or entered another collective, while others wait."""


class Abandoned(BaseException):
    """Raised inside a hung rank, so that Python code which it still runs ends; its call stays open."""


class Comm(Protocol):
    """Collectives of one rank in a group of ``size``; every rank must call them in the same order.

    Attributes:
        device: where tensors of this rank live.
    """

    rank: int
    size: int
    device: torch.device

    def exchange(self, name: str, value: T) -> list[T]:
        """Give one value, get those of all ranks in rank order. The others are built on this one."""

    def fence(self, name: str, memory: Tensor) -> None:
        """What any rank has written to symmetric memory before it is there for all ranks after it.

        On the CPU the calling thread waits; on a GPU the current stream does, by signals that belong to
        ``memory``, which ``symmetric`` made: fences on several streams at a time need a memory each.
        """

    def symmetric(self, name: str, shape: Sequence[int], dtype: Any) -> Tensor:
        """Allocate uninitialised ``[size, *shape]``, whose row ``rank`` is mine; collective.

        What the other rows are is the world's business: reach peers' memory by ``peers``.
        """

    def peers(self, tensor: Tensor) -> Sequence[Tensor] | None:
        """The rows of all ranks of a tensor that ``symmetric`` made, mapped here, or None if it made it not so."""

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        """Collectives of the ranks of one group, the one that this rank is in; collective over all ranks.

        Args:
            groups: ranks, of each group in the order of its own ranks; each rank is in one group.
        """

    def pause(self, name: str) -> None:
        """A point at which the schedule may change; only a world that was told to ``disturb`` does."""

    def disturb(self, seed: int) -> None:
        """From now on, change the schedule at every collective and pause, as the seed says."""


def barrier(comm: Comm, name: str = "barrier") -> None:
    """Wait for all ranks, on the host."""
    comm.exchange(name, None)


def all_to_all(comm: Comm, name: str, values: Sequence[T]) -> list[T]:
    """Send ``values[d]`` to rank ``d``; get one value from each rank, in rank order."""
    return [sent[comm.rank] for sent in comm.exchange(name, list(values))]


def agree(comm: Comm, name: str, error: str | None) -> str | None:
    """Make one rank's error everybody's: the lowest failing rank's message, or None."""
    for rank, message in enumerate(comm.exchange(name, error)):
        if message is not None:
            return f"rank {rank}: {message}"
    return None


@dataclass
class Outcome:
    """How one rank ended.

    Attributes:
        error: what its function raised, or None.
        stack: where it was when its deadline passed, or None if it ended by itself.
    """

    error: BaseException | None = None
    stack: str | None = None
