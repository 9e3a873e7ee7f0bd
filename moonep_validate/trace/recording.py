"""How much of a tensor does the recorder keep? One word says it, since a K3-sized row tap has 1.3 GB a rank.

====== ===================================================================================================
plan   integers and route weights; rows and expert weights lose all columns
digest and 128 bits per row and per expert: what is only moved is judged in full
columns and some columns of each row, and some rows of the experts with their weights: sums are judged too
full   everything
====== ===================================================================================================

Each amount keeps what the one before it keeps. A digest is two sums over the words of a row modulo 2**64, with
hashed odd coefficients: rows that differ in one word always differ in both, and a row of zero bits has digest 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from moonep_validate.cases.case import CaseError
from moonep_validate.hashing import below, hashed

AMOUNTS = ("plan", "digest", "columns", "full")
#: Columns that ``columns`` keeps, and rows of the experts that it samples, unless it says otherwise.
COLUMNS = 16
SAMPLED_ROWS = 8
#: Elements that a digest works on at a time, so that it needs little memory beside the tensor.
_CHUNK = 2**24
DIGEST = "_digest"


@dataclass(frozen=True)
class Recording:
    """How much is kept of each tensor.

    Attributes:
        amount: one of ``AMOUNTS``.
        columns: how many columns ``columns`` keeps.
    """

    amount: str = "full"
    columns: int = 0

    def __str__(self) -> str:
        return self.amount + (f":{self.columns}" if self.amount == "columns" and self.columns != COLUMNS else "")

    @classmethod
    @lru_cache(maxsize=16)
    def parse(cls, text: str) -> Recording:
        """Read ``plan``, ``digest``, ``columns``, ``columns:N`` or ``full``.

        Raises:
            CaseError: for anything else.
        """
        amount, colon, number = text.partition(":")
        if amount not in AMOUNTS or (colon and (amount != "columns" or not number.isdigit() or int(number) < 1)):
            raise CaseError(f"--record {text}: write one of {', '.join(AMOUNTS)}, or columns:N with N above 0")
        return cls(amount, int(number) if number else COLUMNS if amount == "columns" else 0)

    @property
    def full(self) -> bool:
        """Whether everything is kept."""
        return self.amount == "full"

    def reaches(self, amount: str) -> bool:
        """Whether what ``amount`` keeps is there."""
        return AMOUNTS.index(self.amount) >= AMOUNTS.index(amount)

    def of(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """What is kept of a tensor, by name; parts of it are views.

        Rows are two axes of BF16, expert weights three axes of anything but integers wider than a byte.
        """
        rows, weights = _rows_or_weights(tensor.dim(), tensor.element_size())
        if self.full or not (rows or weights):
            return {name: tensor}
        if self.amount == "plan":
            return {name: tensor[..., :0]}
        if self.amount == "digest" or weights:
            return {name: digest(tensor)}
        return {name: tensor[:, chosen_columns(tensor.shape[1], self.columns)], name + DIGEST: digest(tensor)}

    def forms(self, name: str, shape: tuple[int, ...], dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each tensor that ``of`` keeps of one with this shape and dtype."""
        rows, weights = _rows_or_weights(len(shape), getattr(torch, dtype).itemsize)
        if self.full or not (rows or weights):
            return {name: (shape, dtype)}
        if self.amount == "plan":
            return {name: ((*shape[:-1], 0), dtype)}
        hashes = (shape[0], *[1] * weights, 2), "int64"
        if self.amount == "digest" or weights:
            return {name: hashes}
        columns = len(chosen_columns(shape[1], self.columns))
        return {name: ((shape[0], columns), dtype), name + DIGEST: hashes}


def _rows_or_weights(axes: int, element_size: int) -> tuple[bool, bool]:
    """Whether a tensor holds rows, and whether it holds expert weights."""
    return axes == 2 and element_size == 2, axes == 3 and element_size < 4


@lru_cache(maxsize=64)
def _chosen(width: int, count: int) -> tuple[int, ...]:
    if count >= width:
        return tuple(range(width))
    noise = hashed("kept columns", width, torch.arange(width)).argsort()
    return tuple(sorted({0, width - 1, *noise[:count].tolist()}))


def chosen_columns(width: int, count: int) -> list[int]:
    """Which columns of rows of this width are kept: the first, the last, and ``count`` others."""
    return list(_chosen(width, count))


def sampled_rows(end: int, count: int = SAMPLED_ROWS) -> Tensor:
    """Which of the rows ``[0, end)`` of the experts are kept whole: int64, ascending."""
    if end <= count:
        return torch.arange(end)
    chosen: Tensor = below(hashed("sampled rows", end, torch.arange(count)), end).unique()
    return chosen


@lru_cache(maxsize=16)
def _coefficients(count: int, device: torch.device) -> Tensor:
    """Odd int64 coefficients, ``[count, 2]``."""
    # Odd numbers have an inverse modulo 2**64, so that a difference in one word cannot vanish in the product.
    return (hashed("digest", 0, torch.arange(count)[:, None], torch.arange(2)) | 1).to(device)


def digest(tensor: Tensor) -> Tensor:
    """128 bits per row: int64 ``[n, 2]`` of a tensor ``[n, columns]``, ``[n, 1, 2]`` of ``[n, rows, columns]``."""
    words = _words(tensor.reshape(len(tensor), -1))
    coefficients = _coefficients(words.shape[1], tensor.device)
    step = max(1, _CHUNK // max(words.shape[1], 1))
    parts = [
        torch.stack([(part.long() * coefficients[:, half]).sum(dim=1) for half in range(2)], dim=1)
        for part in words.split(step)
    ]
    sums = torch.cat(parts) if parts else words.new_zeros((0, 2), dtype=torch.int64)
    result: Tensor = sums[:, None] if tensor.dim() == 3 else sums
    return result


def is_digest(tensor: Tensor) -> bool:
    """Whether a tensor of rows or weights is their digest: nothing else of these is recorded as int64."""
    return tensor.dtype == torch.int64 and tensor.dim() > 1 and tensor.shape[-1] == 2


def _words(rows: Tensor) -> Tensor:
    """The bits of rows ``[n, columns]`` as the widest integers that fit."""
    rows = rows.contiguous()
    width = rows.shape[1] * rows.element_size()
    for size, dtype in ((8, torch.int64), (4, torch.int32), (2, torch.int16)):
        if width % size == 0 and rows.data_ptr() % size == 0 and rows.element_size() <= size:
            return rows.view(dtype)
    return rows.view(torch.uint8)
