"""Which numbers do MXFP4 bytes stand for? Decode (one right answer) and encode (several legal ones).

OCP Microscaling Formats (MX) v1.0: 32 E2M1 elements along the last axis share one E8M0 scale byte. Two elements
sit in a byte, the even one in the low nibble. Decoding is exact and has one answer (docs/formats.md, Y1), so it is
compared bit for bit; the scale rule of an encoder is only recommended, so encoders are held to bounds (Y9).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from moonep_validate.formats import FormatError

#: Elements that share a scale.
BLOCK = 32
#: Exponent bias of the scale byte: value ``2**(byte - 127)``.
BIAS = 127
#: The scale byte that makes its block NaN.
NAN_SCALE = 0xFF
#: The element of each code; bit 3 is the sign, so code 8 is -0.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: Largest element.
MAX = 6.0

Rule = Literal["floor", "rceil", "ceil", "even"]
RULES: tuple[Rule, ...] = get_args(Rule)

#: Largest magnitude of a block in units of its scale, by rule: from a little over the first (or it) to the second.
REACH: dict[Rule, tuple[float, float]] = {"floor": (4, 8), "rceil": (3, 6), "ceil": (2, 4), "even": (3.5, 7)}

# dtype -> integer of its width, mantissa bits, bias; those that hold every product in range exactly.
_LAYOUT = {
    torch.float32: (torch.int32, 23, 127),
    torch.bfloat16: (torch.int16, 7, 127),
    torch.float64: (torch.int64, 52, 1023),
}
# Where rounding to the next code starts; a midpoint itself goes to the even code (round to nearest, ties to even).
_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of packed codes and scale bytes; bit-equal in every correct decoder.

    Args:
        packed: uint8 (or int8) ``[..., K/2]``, two codes a byte, the even element in the low nibble.
        scale: uint8 or float8_e8m0fnu ``[..., K/32]``; byte b is ``2**(b - 127)``, 0xFF is NaN.
        dtype: float32, bfloat16 or float64.

    Returns:
        ``[..., K]`` of ``dtype``. Exact while in range: 4 and 6 times ``2**127`` are infinite in float32.

    Raises:
        FormatError: for a dtype or shapes that do not go together.
    """
    packed, scale = as_bytes(packed), as_bytes(scale)
    _check_shapes(packed, scale)
    if dtype not in _LAYOUT:
        raise FormatError(f"MXFP4 does not decode exactly to {dtype}; use float32, bfloat16 or float64")
    shape = (*scale.shape, BLOCK)
    values = _pairs(dtype, packed.device).index_select(0, packed.reshape(-1).int()).view(dtype).view(shape)
    values.mul_(scale_values(scale, dtype).unsqueeze(-1))
    return values.view(*packed.shape[:-1], packed.shape[-1] * 2)


def encode(values: Tensor, rule: Rule = "floor") -> tuple[Tensor, Tensor]:
    """Quantise to the nearest codes under a scale rule; ties to the even code, beyond 6 to 6.

    Args:
        values: float ``[..., K]``, K a multiple of 32, finite.
        rule: from the largest magnitude a of a block, the exponent is ``floor(log2 a) - 2`` ("floor", the
            recommendation of OCP MX v1.0), ``ceil(log2(a / 6))`` ("rceil"), ``ceil(log2 a) - 2`` ("ceil"), or that
            of "floor" after rounding a to two significant bits ("even").

    Returns:
        ``(packed uint8 [..., K/2], scale uint8 [..., K/32])``; the scale of a zero block is byte 0.

    Raises:
        FormatError: for a K that is no multiple of 32, an unknown rule, or NaN and infinity, which E2M1 lacks.
    """
    if values.ndim == 0 or values.shape[-1] % BLOCK:
        raise FormatError(f"shape {tuple(values.shape)}: the last axis must be a multiple of {BLOCK}")
    if rule not in RULES:
        raise FormatError(f"scale rule {rule!r} is not known; known: {', '.join(RULES)}")
    if not bool(values.isfinite().all()):
        raise FormatError(f"{int((~values.isfinite()).sum())} values are NaN or infinite; E2M1 has neither")
    blocks = values.double().unflatten(-1, (-1, BLOCK))
    scale = _scale_byte(blocks.abs().amax(-1), rule)
    codes = encode_elements(blocks / scale_values(scale, torch.float64).unsqueeze(-1))
    return pack(codes.flatten(-2)), scale


def encode_elements(values: Tensor) -> Tensor:
    """E2M1 codes, uint8 of the same shape, of already scaled finite float64 values."""
    edges = torch.tensor([mid for mid, _ in _MIDPOINTS], dtype=torch.float64, device=values.device)
    up = torch.tensor([up for _, up in _MIDPOINTS], device=values.device)
    edges = torch.where(up, edges, torch.nextafter(edges, torch.full_like(edges, MAX)))
    magnitude = torch.bucketize(values.abs().contiguous(), edges, right=True)
    return (magnitude + 8 * torch.signbit(values)).to(torch.uint8)


def encoding_faults(values: Tensor, packed: Tensor, scale: Tensor, rule: Rule | None = None) -> list[str]:
    """What is wrong with somebody's encoding (docs/formats.md, Y9); any legal encoder passes.

    Args:
        values: what was encoded, float ``[..., K]``, finite.
        packed, scale: the bytes, see ``decode``.
        rule: the scale rule that the encoder promises; None allows for all of them.

    Returns:
        One line for scales out of reach, one for values further off than half a step and than clipping explains.
    """
    decoded, unit = decode(packed, scale, torch.float64), scale_values(scale, torch.float64)
    size = values.double().unflatten(-1, (-1, BLOCK)).abs() / unit.unsqueeze(-1)
    error = (decoded - values.double()).unflatten(-1, (-1, BLOCK)).abs() / unit.unsqueeze(-1)
    low, high = REACH[rule] if rule else (2.0, 8.0)
    largest = size.amax(-1)
    unfit = ((largest > high) | (largest < low)) & (largest > 0) & (as_bytes(scale) > 0)
    half_step = torch.where(size < 2, 0.25, torch.where(size < 4, 0.5, 1.0))
    far = ~(error <= torch.maximum(half_step, size - MAX))
    lines = []
    if bool(unfit.any()):
        place = tuple(int(i) for i in unfit.nonzero()[0])
        lines.append(
            f"{int(unfit.sum())} of {unfit.numel()} scales do not fit their block: at block {list(place)} the "
            f"largest value is {float(largest[place]):.3g} units, expected {low:g} to {high:g}"
        )
    if bool(far.any()):
        lines.append(f"{int(far.sum())} of {far.numel()} values are further off than half a step")
    return lines


def pack(codes: Tensor) -> Tensor:
    """Codes uint8 ``[..., K]`` to bytes ``[..., K/2]``, the even element in the low nibble."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Bytes ``[..., K/2]`` to codes uint8 ``[..., K]``; the inverse of ``pack``."""
    packed = as_bytes(packed)
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def scale_values(scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``2**(byte - 127)`` of each byte, NaN for 0xFF, exact: built from bits, of the shape of ``scale``."""
    table = _powers(dtype, scale.device)
    return table.index_select(0, as_bytes(scale).reshape(-1).int()).view(scale.shape)


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as uint8: int8, float8_e8m0fnu and packed float4 are spellings of bytes.

    Raises:
        FormatError: for an element of more than one byte, which must not be cast silently.
    """
    if tensor.dtype == torch.uint8:
        return tensor
    if tensor.element_size() != 1 or tensor.dtype == torch.bool:
        raise FormatError(f"{tensor.dtype} is not a byte format; codes and scales are uint8 or float8_e8m0fnu")
    return tensor.view(torch.uint8)


def refuse_nan_scales(name: str, scale: Tensor) -> None:
    """Refuse the scale byte 0xFF at load: decoders disagree on it, from NaN to 1.7e38 (docs/formats.md, Y7).

    Raises:
        FormatError: naming the tensor, how many bytes, and the first position; and for scales that are no bytes.
    """
    if scale.element_size() != 1:
        raise FormatError(f"{name} is {scale.dtype}: scales are bytes; a float scale would be rounded")
    bad = as_bytes(scale) == NAN_SCALE
    if count := int(bad.sum()):
        place = ", ".join(str(int(i)) for i in bad.nonzero()[0])
        raise FormatError(
            f"{name}[{place}] is scale byte 0xFF (NaN), {count} of {bad.numel()} bytes are; "
            "the block has no values: the checkpoint is damaged or was written by a faulty encoder"
        )


def _check_shapes(packed: Tensor, scale: Tensor) -> None:
    want = (*packed.shape[:-1], packed.shape[-1] * 2 // BLOCK) if packed.ndim else ()
    if packed.ndim == 0 or packed.shape[-1] % (BLOCK // 2) or tuple(scale.shape) != want:
        raise FormatError(
            f"codes {tuple(packed.shape)} with scales {tuple(scale.shape)}: the last axes must be K/2 and "
            f"K/{BLOCK}, the others equal"
        )


@lru_cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[256, 2]``: the two elements of each byte, low nibble first."""
    byte = torch.arange(256)
    values = torch.tensor(VALUES, dtype=dtype)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1).to(device)


@lru_cache
def _powers(dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[256]``: the scale of each byte, by writing its exponent field; byte 0 is subnormal but in float64."""
    integer, mantissa, bias = _LAYOUT[dtype]
    exponent = torch.arange(256) - BIAS + bias
    bits = exponent << mantissa
    bits[0] = bits[0] or 1 << (mantissa - 1)
    powers = bits.to(integer).view(dtype)
    powers[NAN_SCALE] = float("nan")
    return powers.to(device)


def _scale_byte(amax: Tensor, rule: Rule) -> Tensor:
    """The scale byte of each block from its largest magnitude, float64."""
    fraction, exponent = torch.frexp(amax / MAX if rule == "rceil" else amax)  # fraction in [0.5, 1)
    if rule in ("rceil", "ceil"):
        power = exponent - (fraction == 0.5).int()
    else:
        power = exponent - 1 + ((fraction >= 0.875).int() if rule == "even" else 0)
    shift = 0 if rule == "rceil" else 2
    byte = torch.where(amax > 0, power - shift + BIAS, torch.zeros_like(power))
    return byte.clamp(0, NAN_SCALE - 1).to(torch.uint8)
