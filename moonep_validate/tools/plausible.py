"""Are the bytes of experts such as a trained model has? One pass over each tensor, in slices of a few MiB.

NaN scales, matrices that are zero or constant, experts with the same bytes (Y7, Y12), and scales that no trained
layer has (Y14). The limits of Y14 are ours: a weight of a trained model is far from them, and what an export does
wrong (values copied as bytes, exponents without their bias, another layer's scales) is mostly far beyond.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moonep_validate.formats import mxfp4
from moonep_validate.formats.kimi_k3 import PARTS, ROLES
from moonep_validate.tools.shards import Defect

#: Bytes of a tensor that are in memory at a time.
PIECE = 4 * 2**20
#: Scale bytes of a trained layer: magnitudes from 2**-32 on in all but a few blocks, below 2**13 in every one.
LOWEST, HIGHEST = 127 - 32, 127 + 10
#: Powers of two between the 1st and 99th percentile of a trained matrix's scales, and to those of its peers.
WIDEST, FAR = 24, 6
#: Largest byte of scales whose values, or exponents without the bias, were copied as bytes.
_COPIED = 8
#: Both codes of a byte without their signs: E2M1 has a zero of either sign.
_ZERO_CODES = 0x77


class Bytes(NamedTuple):
    """What is kept of a tensor's data.

    Attributes:
        digest: of all its bytes.
        counts: how often each byte occurs, 256 numbers.
        zero_blocks: of codes: blocks of 32 in which every code is a zero.
        nans: of scales: the place of the first 0xFF, and how many there are.
    """

    digest: bytes
    counts: tuple[int, ...]
    zero_blocks: int
    nans: tuple[list[int], int] | None

    @property
    def zero(self) -> bool:
        """Whether every code is a zero of either sign."""
        return not any(count for byte, count in enumerate(self.counts) if byte & _ZERO_CODES)

    @property
    def only(self) -> int | None:
        """The byte that all of them are, if there is one."""
        there = [byte for byte, count in enumerate(self.counts) if count]
        return there[0] if len(there) == 1 else None


#: ``w1.weight_scale`` and its like -> what is kept, of one expert; of a layer's experts.
Expert = Mapping[str, Bytes]
Experts = Mapping[tuple[int, int], Expert]


def read(data: Any, is_scale: bool) -> Bytes:
    """One pass over a tensor.

    Args:
        data: a slice of safetensors, ``[rows, columns]``.
        is_scale: scale bytes, else packed codes.
    """
    digest, counts = hashlib.blake2b(digest_size=16), torch.zeros(256, dtype=torch.int64)
    zero_blocks, first, row = 0, None, 0
    for piece in _pieces(data):
        bytes = mxfp4.as_bytes(piece.contiguous().view(torch.uint8))
        digest.update(bytes.numpy().data)
        counts += torch.bincount(bytes.flatten(), minlength=256)
        if not is_scale:
            zero_blocks += _zero_blocks(bytes)
        elif first is None and (nans := bytes == mxfp4.NAN_SCALE).any():
            place = nans.nonzero()[0].tolist()
            first = [place[0] + row, *place[1:]]
        row += len(piece)
    nan = None if first is None else (first, int(counts[mxfp4.NAN_SCALE]))
    return Bytes(digest.digest(), tuple(counts.tolist()), zero_blocks, nan)


def _pieces(data: Any) -> Iterator[Tensor]:
    shape = data.get_shape()
    if not shape or 0 in shape:
        return
    rows = max(1, PIECE // max(1, prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield data[start : start + rows]


def _zero_blocks(codes: Tensor) -> int:
    """Blocks of zeros in rows of packed codes; 0 where rows do not consist of blocks."""
    half = mxfp4.BLOCK // 2
    if codes.shape[-1] % half:
        return 0
    return int(((codes.reshape(-1, half) & _ZERO_CODES) == 0).all(-1).sum())


def implausible(seen: Experts) -> Iterator[Defect]:
    """What is wrong with the content of the experts of one root.

    Args:
        seen: by layer and expert; tensors of another shape or dtype than the config's left out.
    """
    for (layer, expert), tensors in seen.items():
        for matrix, role in ROLES.items():
            codes, scales = (tensors.get(f"{matrix}.{part}") for part in PARTS)
            where = f"layer {layer}, expert {expert}, {matrix} ({role})"
            if dull := _dull(codes, scales):
                yield Defect("Y12", where, dull)
            elif scales and (odd := _odd_scales(scales, codes.zero_blocks if codes else 0)):
                yield Defect("Y14", where, odd)
    yield from _apart(seen)
    yield from _twins(seen)


def _dull(codes: Bytes | None, scales: Bytes | None) -> str:
    """A matrix that is zero, or one value throughout."""
    if codes is None or scales is None:
        return ""
    if codes.zero:
        return "every value is zero"
    if codes.only is not None and scales.only is not None:
        return f"every code byte is {codes.only} and every scale byte {scales.only}"
    return ""


def _odd_scales(scales: Bytes, zero_blocks: int) -> str:
    """Scales that no trained matrix has. NaN is judged elsewhere; a block of zeros may have any scale."""
    counts = scales.counts[: mxfp4.NAN_SCALE]
    there = [byte for byte, count in enumerate(counts) if count]
    if not there:
        return ""
    copied = "; were values copied as bytes, or exponents without their bias of 127?"
    if there[-1] <= _COPIED:
        which = "every scale byte is 0" if there == [0] else f"scale bytes are {there[0]} to {there[-1]}"
        return which + copied
    if there[-1] > HIGHEST:
        many, power = sum(counts[HIGHEST + 1 :]), there[-1] - 127
        most = f"up to {there[-1]} (2**{power}); no trained weight is so large"
        return f"{many} scale bytes are above {HIGHEST}, {most}"
    if counts[0] > zero_blocks:
        return f"{counts[0]} scale bytes are 0 (2**-127), but only {zero_blocks} of its blocks are zero"
    small = sum(counts[:LOWEST]) - zero_blocks
    if small > sum(counts) // 100:
        return f"{small} of {sum(counts)} scale bytes are below {LOWEST} (2**{LOWEST - 127}), from {there[0]} on"
    low, _, high = _spread(scales)
    if high - low > WIDEST:
        return f"scale bytes from {low} to {high} are common; a trained matrix has at most {WIDEST} between these"
    return ""


def _spread(scales: Bytes) -> tuple[int, int, int]:
    """The 1st, 50th and 99th percentile of scale bytes, zeros aside: a block of zeros is stored so."""
    counts = torch.tensor(scales.counts[1 : mxfp4.NAN_SCALE])
    below = counts.cumsum(0)
    low, middle, high = (int((below <= below[-1] * share // 100).sum()) + 1 for share in (1, 50, 99))
    return low, middle, high


def _apart(seen: Experts) -> Iterator[Defect]:
    """Experts whose scales are far from those of the same matrix in the other experts of the layer."""
    groups: dict[tuple[int, str], dict[int, tuple[int, int, int]]] = defaultdict(dict)
    for (layer, expert), tensors in seen.items():
        for matrix in ROLES:
            codes, scales = (tensors.get(f"{matrix}.{part}") for part in PARTS)
            if scales and sum(scales.counts[1 : mxfp4.NAN_SCALE]) and not _dull(codes, scales):
                groups[layer, matrix][expert] = _spread(scales)
    for (layer, matrix), spreads in groups.items():
        peers = [int(median(values)) for values in zip(*spreads.values(), strict=True)]
        for expert, mine in spreads.items():
            if len(spreads) > 2 and max(abs(a - b) for a, b in zip(mine, peers, strict=True)) >= FAR:
                yield Defect(
                    "Y14",
                    f"layer {layer}, expert {expert}, {matrix} ({ROLES[matrix]})",
                    f"scale bytes are mostly {mine[0]} to {mine[2]}, half of them up to {mine[1]}; those of the "
                    f"layer's other experts are {peers[0]} to {peers[2]}, half of them up to {peers[1]}",
                )


def _twins(seen: Experts) -> Iterator[Defect]:
    """Experts with the same bytes, and a gate that is the up of its expert."""
    first: dict[tuple[bytes, ...], tuple[int, int]] = {}
    for (layer, expert), tensors in seen.items():
        where = f"layer {layer}, expert {expert}"
        if all(kept.zero for name, kept in tensors.items() if name.endswith(PARTS[0])):
            continue
        key = tuple(tensors[name].digest for name in sorted(tensors))
        if other := first.get(key):
            yield Defect("Y12", where, f"all its bytes are those of layer {other[0]}, expert {other[1]}")
        first.setdefault(key, (layer, expert))
        gate, up = (tensors.get(f"{matrix}.{PARTS[0]}") for matrix in ("w1", "w3"))
        if gate and up and gate.digest == up.digest and not gate.zero:
            yield Defect("Y12", where, "w1 (gate) and w3 (up) have the same code bytes")
