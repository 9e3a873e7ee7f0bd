"""How do rows reach another rank's memory? Written and read there where it is mapped, else sent as messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moonep_validate.reference.moves import Pairs
from moonep_validate.worlds.comm import Comm, all_to_all


def put(comm: Comm, name: str, memory: Tensor, source: Tensor, sends: Sequence[Pairs]) -> None:
    """Write rows of ``source`` into the memory of each rank; there for all after the next fence.

    Args:
        comm: the group.
        name: of the messages, where the memory is not mapped; collective then.
        memory: ``[R, rows, ...]``, row ``rank`` mine.
        source: ``[n, ...]``.
        sends: for each rank: places in ``source``, rows there.
    """
    peers = comm.peers(memory)
    if peers is not None:
        for peer, (place, row) in zip(peers, sends, strict=True):
            peer[row] = source[place]
            comm.pause(name)
        return
    messages = [(row.cpu(), source[place].cpu()) for place, row in sends]
    for row, values in all_to_all(comm, name, messages):
        memory[comm.rank][row.to(memory.device)] = values.to(memory.device)


def get(comm: Comm, name: str, memory: Tensor, reads: Sequence[Pairs], count: int) -> Tensor:
    """Read rows of the memory of each rank: ``[count, ...]``.

    Args:
        comm: the group.
        name: of the messages, where the memory is not mapped; collective then.
        memory: ``[R, rows, ...]``, row ``rank`` mine.
        reads: for each rank: places in the result, rows there.
        count: number of rows of the result; what no place names is undefined.
    """
    out = torch.empty((count, *memory.shape[2:]), dtype=memory.dtype, device=memory.device)
    peers = comm.peers(memory)
    if peers is not None:
        for peer, (place, row) in zip(peers, reads, strict=True):
            out[place] = peer[row]
            comm.pause(name)
        return out
    asked = all_to_all(comm, f"{name} index", [row.cpu() for _, row in reads])
    answers = [memory[comm.rank][row.to(memory.device)].cpu() for row in asked]
    for (place, _), answer in zip(reads, all_to_all(comm, name, answers), strict=True):
        out[place] = answer.to(memory.device)
    return out
