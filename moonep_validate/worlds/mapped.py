"""How do processes reach each other's memory? Through one shared file on the CPU, peer to peer between GPUs.

On the CPU every rank maps the same unlinked file, so that rows of peers are ordinary memory. Between GPUs it is
PyTorch's symmetric memory over NVLink, without multicast. Both are what a one-sided library does: a rank writes
into a peer's rows, and only a fence says when they are there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moonep_validate.worlds.warden import PREFIX, SHARED

#: Bytes by which the ranks of one host know a file from one of the same name on another.
_MARK = 16


@dataclass(frozen=True)
class Mapped:
    """Memory of all ranks.

    Attributes:
        tensor: ``[size, *shape]``; row ``rank`` is mine.
        rows: the row of every rank, mapped here.
        barrier: makes the current stream wait until every rank's stream is here; None where the host has to wait.
        handle: what keeps the mapping alive.
    """

    tensor: Tensor
    rows: Sequence[Tensor]
    barrier: Callable[[], None] | None = None
    handle: Any = None


def allocate(comm: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Mapped | None:
    """Allocate ``[size, *shape]`` over all ranks, uninitialised; collective.

    Args:
        comm: a ``DistComm``.
        name: says in errors what it is for.
        shape: of one rank's row.
        dtype: of the elements.

    Returns:
        None on every rank, if any rank cannot map the others' memory.
    """
    make = _on_gpus if comm.device.type == "cuda" else _in_a_file
    return make(comm, name, shape, dtype)


def _in_a_file(comm: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Mapped | None:
    count = comm.size * prod(shape)
    mark = os.urandom(_MARK)
    offer = (_new_file(count * dtype.itemsize, mark), mark) if comm.rank == 0 else None
    path, mark = comm.exchange(f"symmetric {name}", offer)[0]
    memory, problem = torch.empty(0, dtype=dtype), None
    try:
        if path is None or not _has(path, mark):
            problem = "there is no such file here"
        elif count:
            memory = torch.from_file(path, shared=True, size=count, dtype=dtype)
    except (OSError, RuntimeError) as error:
        problem = str(error)
    answers = comm.exchange(f"symmetric {name} mapped", problem)
    # All have it mapped, or never will: without a name it is gone when the last of them ends, however that ends.
    if comm.rank == 0 and path is not None:
        Path(path).unlink(missing_ok=True)
    if any(answers):
        return None
    tensor = memory.view(comm.size, *shape)
    return Mapped(tensor, tensor.unbind(0))


def _has(path: str, mark: bytes) -> bool:
    """Whether this is the file that rank 0 made; on another host it is not."""
    with suppress(OSError), Path(path).open("rb") as file:
        return file.read(_MARK) == mark
    return False


def _new_file(num_bytes: int, mark: bytes) -> str | None:
    """A file of this size that the kernel has really given memory, with a mark at its beginning, or None."""
    folder = SHARED if os.access(SHARED, os.W_OK) else None
    try:
        descriptor, path = tempfile.mkstemp(prefix=f"{PREFIX}{os.getpid()}-", dir=folder)
    except OSError:
        return None
    try:
        # Else the file is sparse, and a rank that writes where the disk is full is killed by a signal.
        os.posix_fallocate(descriptor, 0, max(num_bytes, _MARK))
        os.write(descriptor, mark)
    except OSError:  # no room: the ranks fall back to messages
        Path(path).unlink()
        return None
    finally:
        os.close(descriptor)
    return path


def _on_gpus(comm: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Mapped | None:
    """Row ``rank`` is a symmetric allocation of this GPU, repeated over the first axis without memory."""
    import torch.distributed._symmetric_memory as symm

    group: Any = comm.group if comm.group is not None else dist.group.WORLD
    mine, handle, problem = None, None, None
    try:
        mine = symm.empty(tuple(shape), dtype=dtype, device=comm.device)
    except RuntimeError as error:
        problem = str(error)
    if any(comm.exchange(f"symmetric {name}", problem)) or mine is None:
        return None
    try:
        handle = symm.rendezvous(mine, group.group_name)
    except RuntimeError as error:  # no peer access, or another host
        problem = str(error)
    if any(comm.exchange(f"symmetric {name} mapped", problem)) or handle is None:
        return None
    rows = [
        mine if peer == comm.rank else handle.get_buffer(peer, tuple(shape), dtype) for peer in range(comm.size)
    ]
    return Mapped(mine.expand(comm.size, *shape), rows, lambda: handle.barrier(channel=0), handle)
