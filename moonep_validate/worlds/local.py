"""How do ranks of one host exchange small values fast? Through sockets of rank 0, in a hundredth of gloo's time.

Everything else of ``DistComm`` stays: memory that ranks share, fences, and what a Buffer does with its group.
"""

from __future__ import annotations

import pickle
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, TypeVar

from moonep_validate.worlds.comm import CollectiveError, Deadlock
from moonep_validate.worlds.dist import DistComm

T = TypeVar("T")


class Star:
    """Connections of one rank: of rank 0 to all others, of the others to rank 0; collective.

    Args:
        folder: where the socket is; the same on every rank, private to the group.
        rank, size: of the group.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.connections: list[Connection] = []

        address = str(folder / "star")
        import torch.distributed as dist

        if rank == 0:
            with Listener(address, family="AF_UNIX", backlog=size) as listener:
                dist.barrier()
                numbered = {}
                for _ in range(size - 1):
                    connection = listener.accept()
                    numbered[int(connection.recv_bytes())] = connection
            self.connections = [numbered[other] for other in range(1, size)]
        else:
            dist.barrier()
            self.connections = [Client(address, family="AF_UNIX")]
            self.connections[0].send_bytes(str(rank).encode())

    def gather(self, value: bytes) -> list[bytes]:
        """One value from each rank, in rank order.

        Raises:
            OSError, EOFError: if a peer is gone.
        """
        if self.rank != 0:
            (hub,) = self.connections
            hub.send_bytes(value)
            return [value if rank == self.rank else hub.recv_bytes() for rank in range(self.size)]
        values = [value, *(connection.recv_bytes() for connection in self.connections)]
        for place, connection in enumerate(self.connections, 1):
            for rank, received in enumerate(values):
                if rank != place:
                    connection.send_bytes(received)
        return values


class LocalComm(DistComm):
    """The default process group as a ``Comm``, all of whose ranks are workers of one pool.

    Args:
        star: the connections; one per process, for all its cases.
    """

    def __init__(self, star: Star) -> None:
        super().__init__(None)
        self.star = star

    def exchange(self, name: str, value: T) -> list[T]:
        """See ``DistComm.exchange``; the same answers, and the same errors."""
        self.calls += 1
        try:
            gathered: list[Any] = [pickle.loads(one) for one in self.star.gather(pickle.dumps((name, value)))]
        except (OSError, EOFError) as error:
            reason = "Connection closed by peer" if isinstance(error, EOFError) else str(error)
            raise CollectiveError(f"{name} (collective #{self.calls}): {reason}") from None
        names = [other for other, _ in gathered]
        if len(set(names)) > 1:
            places = "; ".join(f"rank {rank} is in {other}" for rank, other in enumerate(names))
            raise Deadlock(f"{places} (collective #{self.calls})")
        return [received for _, received in gathered]
