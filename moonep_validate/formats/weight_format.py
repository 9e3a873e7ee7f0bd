"""How are the weights of a case stored? A format as one value, which whoever handles stored weights asks.

A matrix ``[rows, columns]`` is stored as codes and, in some formats, as scales: tensors of two axes, each element
of which stands for a rectangle of the matrix. MoonEP moves them as they are, under the names ``gate``, ``up``,
``down`` and ``gate_scale``, ``up_scale``, ``down_scale``. A format is imported without torch, as cases are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PROJECTIONS = ("gate", "up", "down")
SCALE = "_scale"
_SIZES = {"bfloat16": 2, "uint8": 1, "float32": 4}
#: What a MoonEP build asks of rows and columns of weights, and of an expert's scales in bytes (docs/contract.md).
_TILE, _SCALE_BYTES = 128, 16384


@dataclass(frozen=True)
class Piece:
    """One of the two tensors that a matrix is stored as.

    Attributes:
        dtype: the name of a torch dtype.
        rows, columns: of the matrix, for which one element stands.
        nan: of an integer dtype, the number that decodes to NaN; None if there is none.
    """

    dtype: str
    rows: int = 1
    columns: int = 1
    nan: int | None = None

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Its shape for a matrix ``[rows, columns]``."""
        return -(-rows // self.rows), -(-columns // self.columns)

    def nbytes(self, rows: int, columns: int) -> int:
        """Its bytes for a matrix ``[rows, columns]``."""
        first, second = self.shape(rows, columns)
        return first * second * _SIZES[self.dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True)
class WeightFormat:
    """A format of expert weights; one file of ``formats/stored`` makes each (docs/recipes.md).

    Attributes:
        name: the word of a case.
        summary: what it is, in one line.
        codes, scale: what a matrix is stored as; a format without scales has None.
        block: what H and I must be multiples of, so that every block is whole.
        encode: values ``[experts, rows, columns]`` -> codes and scales (codes alone where there are none).
        decode: codes, scales (or None) and a floating dtype -> values; exact in float64.
        negate: change the sign of every value of some codes, in place.
        refuse: raise FormatError for scales that may not be loaded; it gets the tensor's name for the message.
        misreadings: other codes that a decoder may see in the same bytes, by what it does.
    """

    name: str
    summary: str
    codes: Piece
    encode: Callable[[Tensor], tuple[Tensor, ...]]
    decode: Callable[[Tensor, Tensor | None, torch.dtype], Tensor]
    negate: Callable[[Tensor], object]
    scale: Piece | None = None
    block: int = 1
    refuse: Callable[[str, Tensor], None] = lambda name, scale: None
    misreadings: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The stored tensors of an expert; scales come after all weights."""
        scales = tuple(f"{name}{SCALE}" for name in PROJECTIONS) if self.scale else ()
        return (*PROJECTIONS, *scales)

    def piece(self, name: str) -> Piece:
        """What a stored tensor of that name is."""
        return self.scale if self.scale and name.endswith(SCALE) else self.codes

    def shapes(self, hidden: int, intermediate: int) -> dict[str, tuple[int, int]]:
        """Shape of one expert's stored tensors, by name."""
        sizes = matrices(hidden, intermediate)
        return {name: self.piece(name).shape(*sizes[name.removesuffix(SCALE)]) for name in self.names}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the stored tensors, by name."""
        return {name: self.piece(name).torch_dtype for name in self.names}

    def expert_bytes(self, hidden: int, intermediate: int) -> int:
        """Bytes of one expert, scales included."""
        sizes = matrices(hidden, intermediate)
        return sum(self.piece(name).nbytes(*sizes[name.removesuffix(SCALE)]) for name in self.names)

    def refusal(self, hidden: int, intermediate: int) -> str | None:
        """Why an expert of these sizes cannot be stored, or None."""
        for name, size in (("H", hidden), ("I", intermediate)):
            if size % self.block:
                larger = -(-size // self.block) * self.block
                return (
                    f"{name}={size}: {self.name} shares a scale among {self._block} values, so H and I must be "
                    f"multiples of {self.block}; the next larger {name} is {larger}"
                )
        return None

    @property
    def _block(self) -> str:
        rows, columns = (self.scale.rows, self.scale.columns) if self.scale else (1, 1)
        return f"{rows} x {columns}" if rows > 1 else str(columns)

    def unportable(self, hidden: int, intermediate: int) -> str | None:
        """The limit of a MoonEP build that experts of these sizes miss: of stored sizes, or of bytes of scales."""
        for name, (rows, columns) in matrices(hidden, intermediate).items():
            for size in self.codes.shape(rows, columns):
                if size % _TILE:
                    stored = "x".join(map(str, self.codes.shape(rows, columns)))
                    return f"{self.name} stores {name} as {stored}, and {size} is no multiple of {_TILE}"
            if self.scale and (nbytes := self.scale.nbytes(rows, columns)) % _SCALE_BYTES:
                return f"{self.name} has {nbytes} bytes of scales for {name}, no multiple of {_SCALE_BYTES}"
        return None

    def store(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights in this format, by name.

        Args:
            weights: projection -> bf16 ``[experts, rows, columns]``.
        """
        stored = {name: self.encode(weights[name]) for name in PROJECTIONS}
        whole = {name: pieces[0] for name, pieces in stored.items()}
        return whole | {f"{name}{SCALE}": pieces[1] for name, pieces in stored.items() if self.scale}

    def values(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """gate, up and down as numbers; those that are numbers already stay as they are.

        Args:
            tensors: in the order of ``names``; any leading axes.
            dtype: what stored ones are decoded to.
        """
        codes, scales = tensors[: len(PROJECTIONS)], tensors[len(PROJECTIONS) :]
        if codes[0].dtype.is_floating_point:
            return list(codes)
        return [self.decode(c, s, dtype) for c, s in zip_longest(codes, scales)]

    def refuse_scales(self, where: str, tensors: Mapping[str, Tensor]) -> None:
        """Refuse stored tensors that are about to be loaded, if their scales may not be.

        Raises:
            FormatError: naming ``where``, the first such tensor and the position.
        """
        for name, tensor in tensors.items():
            if name.endswith(SCALE):
                self.refuse(f"{where}: {name}", tensor)


def matrices(hidden: int, intermediate: int) -> dict[str, tuple[int, int]]:
    """Rows and columns of one expert's matrices, by projection."""
    return {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
