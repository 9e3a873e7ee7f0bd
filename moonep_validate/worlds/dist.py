"""How does ``Comm`` look over torch.distributed? One all_gather_object per collective.

Small and slow on purpose: it moves what it is given and names what it waits for. The name travels with the
value, so that ranks which call different collectives are told so instead of exchanging the wrong things.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moonep_validate.worlds.comm import CollectiveError, Deadlock

T = TypeVar("T")


class DistComm:
    """A process group as a ``Comm``; ranks are group ranks.

    Args:
        group: a torch.distributed process group, or None for the default one.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.calls = 0

    def exchange(self, name: str, value: T) -> list[T]:
        """See ``Comm.exchange``.

        Raises:
            CollectiveError: if a peer does not arrive within the group's timeout.
            Deadlock: if the ranks are in different collectives.
        """
        self.calls += 1
        gathered: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(gathered, (name, value), group=self.group)
        except RuntimeError as error:
            raise CollectiveError(f"{name} (collective #{self.calls}): {str(error).splitlines()[0]}") from None
        names = [other for other, _ in gathered]
        if len(set(names)) > 1:
            places = "; ".join(f"rank {rank} is in {other}" for rank, other in enumerate(names))
            raise Deadlock(f"{places} (collective #{self.calls})")
        return [received for _, received in gathered]

    def symmetric(self, name: str, shape: Sequence[int], dtype: Any) -> Tensor:
        """See ``Comm.symmetric``; here peers' rows are private memory, only row ``rank`` means anything."""
        self.exchange(f"symmetric {name}", None)
        return torch.empty((self.size, *shape), dtype=dtype)


def as_comm(group: Any) -> Any:
    """A ``Comm`` for whatever a Buffer is given as its group."""
    return group if hasattr(group, "exchange") else DistComm(group)
