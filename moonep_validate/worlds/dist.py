"""How does ``Comm`` look over torch.distributed? Small values by all_gather_object, and memory that peers map.

The name of a collective travels with the value, so that ranks which call different ones are told so instead of
exchanging the wrong things. Rows travel through symmetric memory (mapped.py) wherever it can be had. Workers of
one host pass small values faster (local.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from random import Random
from time import sleep
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from moonep_validate.worlds import mapped
from moonep_validate.worlds.comm import CollectiveError, Deadlock

T = TypeVar("T")

#: Longest delay of a disturbed world at one point, in seconds on the host and in clock cycles of a GPU.
#: Far more than a call of a small case takes, so that peers overtake; short enough for hundreds of seeds.
_LONGEST = 0.004
_CYCLES = 12_000_000


class DistComm:
    """A process group as a ``Comm``; ranks are group ranks.

    Args:
        group: a torch.distributed process group, or None for the default one.
        device: where tensors live; by default the current GPU if the group has NCCL, else the CPU.
    """

    _living: ClassVar[WeakSet[DistComm]] = WeakSet()

    def __init__(self, group: Any = None, device: torch.device | None = None) -> None:
        self.group = group
        self._living.add(self)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.device = device or device_of(group)
        self.calls = 0
        self._mapped: dict[int, mapped.Mapped] = {}
        self._random: Random | None = None

    def exchange(self, name: str, value: T) -> list[T]:
        """See ``Comm.exchange``.

        Raises:
            CollectiveError: if a peer is gone, or does not arrive within the group's timeout.
            Deadlock: if the ranks are in different collectives.
        """
        self.pause(name)
        self.calls += 1
        try:
            gathered = self._gather((name, value))
        except (RuntimeError, OSError) as error:
            raise CollectiveError(f"{name} (collective #{self.calls}): {str(error).splitlines()[0]}") from None
        names = [other for other, _ in gathered]
        if len(set(names)) > 1:
            places = "; ".join(f"rank {rank} is in {other}" for rank, other in enumerate(names))
            raise Deadlock(f"{places} (collective #{self.calls})")
        return [received for _, received in gathered]

    def _gather(self, value: Any) -> list[Any]:
        """One value from each rank, in rank order."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def fence(self, name: str, memory: Tensor) -> None:
        """See ``Comm.fence``; on a GPU without symmetric memory the host waits for the stream."""
        self.pause(name)
        shared = self._memory_of(memory)
        if shared is not None and shared.barrier is not None:
            shared.barrier()
            return
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self.exchange(name, None)

    def symmetric(self, name: str, shape: Sequence[int], dtype: Any) -> Tensor:
        """See ``Comm.symmetric``.

        Where nothing can be mapped, ``peers`` says None for it, and peers' rows are private memory.
        """
        memory = mapped.allocate(self, name, tuple(shape), dtype)
        if memory is None:
            return torch.empty((self.size, *shape), dtype=dtype, device=self.device)
        self._mapped[memory.tensor.data_ptr()] = memory
        return memory.tensor

    def peers(self, tensor: Tensor) -> Sequence[Tensor] | None:
        """See ``Comm.peers``; memory that another Comm of this group made counts too."""
        memory = self._memory_of(tensor)
        return memory.rows if memory else None

    def _memory_of(self, tensor: Tensor) -> mapped.Mapped | None:
        same = [comm for comm in self._living if comm.group is self.group]
        return next((m for comm in same if (m := comm._mapped.get(tensor.data_ptr()))), None)

    def split(self, groups: Sequence[Sequence[int]]) -> DistComm:
        """See ``Comm.split``; of a torch that sorts the ranks of a group, groups are in that order."""
        made = [_process_group(self.group, tuple(group)) for group in groups]
        return DistComm(next(one for one, group in zip(made, groups, strict=True) if self.rank in group))

    def pause(self, name: str) -> None:
        """See ``Comm.pause``: a disturbed world waits a while, on the host and on the current stream."""
        if self._random is None:
            return
        if self._random.random() < 0.5:
            # To the third power: mostly short, so that neighbouring calls change places as well as far ones.
            sleep(self._random.random() ** 3 * _LONGEST)
        if self.device.type == "cuda" and self._random.random() < 0.5:
            torch.cuda._sleep(int(self._random.random() ** 3 * _CYCLES))

    def disturb(self, seed: int) -> None:
        """See ``Comm.disturb``; each rank waits at other points."""
        self._random = Random(seed * self.size + self.rank)


@lru_cache(maxsize=64)
def _process_group(whole: Any, ranks: tuple[int, ...]) -> Any:
    """A process group of some ranks of another; every rank of that makes it, once for all cases of its worker."""
    everywhere = list(ranks) if whole is None else [dist.get_global_rank(whole, rank) for rank in ranks]
    free = "sort_ranks" in inspect.signature(dist.new_group).parameters
    options: dict[str, Any] = {"sort_ranks": False} if free else {}
    return dist.new_group(everywhere, **options)


def device_of(group: Any) -> torch.device:
    """Where the tensors of a group live: the current GPU for one with NCCL, else the CPU."""
    if dist.is_initialized() and "nccl" in str(dist.get_backend_config(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def as_comm(group: Any) -> Any:
    """A ``Comm`` for whatever a Buffer is given as its group."""
    return group if hasattr(group, "exchange") else DistComm(group)
