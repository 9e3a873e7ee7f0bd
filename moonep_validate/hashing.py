"""Where does random-looking data come from? From an integer hash of a name and indices, never from a stream.

The same value comes out on every device, in every process and in any order of evaluation, so data is
regenerated instead of stored, and a token keeps its values when the case around it shrinks. The mixer is the
finaliser of SplitMix64 (Steele, Lea, Flood 2014) in 64-bit wrap-around arithmetic.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_WORD = 2**64 - 1
#: SplitMix64's own constants: the step is 2**64 over the golden ratio, so that indices in a row land far apart.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def hashed(name: str, seed: int, *indices: Tensor | int) -> Tensor:
    """Hash (name, seed, indices) to int64 values.

    Args:
        name: which data this is; different names give unrelated values.
        seed: the case's seed.
        indices: integers or int64 tensors that broadcast together; the result is on the device of the tensors.

    Returns:
        int64, of the broadcast shape of ``indices``, uniform over all 64 bits.
    """
    state = int.from_bytes(hashlib.sha256(f"{name}/{seed}".encode()).digest()[:8], "little")
    first = next((place for place, index in enumerate(indices) if isinstance(index, Tensor)), len(indices))
    # One more than each index, here and below: 0 times the step would leave the state as it was.
    for number in indices[:first]:  # leading numbers cost no tensor operation
        state = _mix_int((state + (int(number) + 1) * _GOLDEN) & _WORD)
    device = next((index.device for index in indices if isinstance(index, Tensor)), None)
    result = torch.tensor(state - (state >> 63 << 64), device=device)
    for index in indices[first:]:
        result = _mix(result + (torch.as_tensor(index, device=device) + 1) * (_GOLDEN - 2**64))
    return result


def unit(bits: Tensor) -> Tensor:
    """Map hashes to float64 in the open interval (0, 1), shape kept."""
    # 52 bits and a half are exact in float64's 53, and never 0 or 1, of which logarithms are taken.
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def normal(bits: Tensor) -> Tensor:
    """Map hashes to float32 with mean 0 and variance 1 (sum of four uniform 16-bit fields), shape kept.

    Only integer sums and one float32 multiplication are used, so the result is the same on every device.
    """
    total = torch.stack([_shift_right(bits, 16 * field) & 0xFFFF for field in range(4)]).sum(dim=0)
    scaled: Tensor = (total - 2 * 0xFFFF).float() * (3.0**0.5 / 0x10000)
    return scaled


def below(bits: Tensor, limit: int) -> Tensor:
    """Map hashes to integers in ``[0, limit)``, shape kept."""
    return _shift_right(bits, 1) % limit


def _mix_int(x: int) -> int:
    x = (x ^ x >> 30) * _MIX_1 & _WORD
    x = (x ^ x >> 27) * _MIX_2 & _WORD
    return x ^ x >> 31


def _mix(x: Tensor) -> Tensor:
    """The same on int64 tensors, whose arithmetic wraps around."""
    x = (x ^ _shift_right(x, 30)) * (_MIX_1 - 2**64)
    x = (x ^ _shift_right(x, 27)) * (_MIX_2 - 2**64)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift; int64 shifts of torch are arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1) if bits else x
