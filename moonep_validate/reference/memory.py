"""The symmetric-memory helpers that integrations import from ``moonep.buffer``, without symmetric memory.

A tensor of R chunks is private to its process here; only the calling rank's chunk is meaningful, which is all
that the reference Buffers read and write. It lives where the group's tensors do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moonep_validate.worlds.dist import device_of

#: Allocation granularity of CUDA's virtual memory management on current GPUs, in bytes.
GRANULARITY = 2 * 2**20


def pad_to_granularity(num_bytes: int, granularity: int = GRANULARITY) -> int:
    """Round bytes up to a multiple of the granularity."""
    return -(-num_bytes // granularity) * granularity


def pad_dim0_for_alignment(shape: Sequence[int], dtype: torch.dtype, granularity: int = GRANULARITY) -> int:
    """The smallest first dimension >= shape[0] with which a chunk is a multiple of the granularity."""
    row = dtype.itemsize
    for size in shape[1:]:
        row *= size
    rows = shape[0]
    while rows * row % granularity:
        rows += 1
    return rows


def create_nvl_dist_tensor(
    chunk_shape: Sequence[int], dtype: torch.dtype, local_rank: int, world_size: int, group: Any = None
) -> Tensor:
    """One tensor of all ranks' chunks back to back: ``[world_size * chunk_shape[0], ...]``, zero-filled."""
    shape = (world_size * chunk_shape[0], *chunk_shape[1:])
    return torch.zeros(shape, dtype=dtype, device=device_of(group))


def create_nvl_single_owner_tensor(
    shape: Sequence[int], dtype: torch.dtype, owner: int, local_rank: int, world_size: int, group: Any = None
) -> Tensor:
    """One rank's memory; here each rank has its own."""
    return torch.zeros(tuple(shape), dtype=dtype, device=device_of(group))
