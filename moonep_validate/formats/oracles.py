"""Who else decodes MXFP4 here? Other people's decoders behind one signature, tried by calling them.

An oracle is whatever version the environment has: a name that cannot be imported, or that no longer takes the
call, says so with what it raised. Nothing is replaced by our own decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moonep_validate.formats import FormatError, mxfp4

#: packed uint8 ``[N, K/2]`` and scale uint8 ``[N, K/32]`` to values ``[N, K]``.
Decoder = Callable[[Tensor, Tensor], Tensor]


class Unavailable(FormatError):
    """This environment has no such decoder; the message says what was tried and what it raised."""


def all_pairs() -> tuple[Tensor, Tensor]:
    """All 256 scale bytes, each with all 16 codes in both nibbles: packed ``[256, 16]``, scale ``[256, 1]``."""
    code = torch.arange(16, dtype=torch.uint8)
    codes = torch.stack([code, 15 - code], dim=1).flatten().expand(256, -1)
    return mxfp4.pack(codes), torch.arange(256, dtype=torch.uint8)[:, None]


def oracle(name: str) -> tuple[Decoder, str]:
    """A decoder of the environment that answers, and its version.

    Args:
        name: one of ``ORACLES``.

    Raises:
        Unavailable: with the reason.
    """
    try:
        decoder, installed = ORACLES[name](), version(name)
        tried = decoder(torch.full((1, 16), 0x21, dtype=torch.uint8), torch.full((1, 1), 128, dtype=torch.uint8))
    except (ImportError, PackageNotFoundError) as error:
        raise Unavailable(f"{name} cannot be imported: {error}") from error
    except Exception as error:
        raise Unavailable(f"{name} does not take the call: {type(error).__name__}: {error}") from error
    if tried.shape != (1, 32):
        raise Unavailable(f"{name} {installed} returned shape {tuple(tried.shape)} for codes of 32 elements")
    return decoder, installed


def agreement(name: str) -> Tensor:
    """Which of the 256 x 32 pairs of ``all_pairs`` an oracle decodes as we do, bit for bit, NaN equal to NaN."""
    packed, scale = all_pairs()
    got = oracle(name)[0](packed, scale)
    want = mxfp4.decode(packed, scale, got.dtype)
    same = (got == want) & (got.signbit() == want.signbit())
    return same | (got.isnan() & want.isnan())


def _ml_dtypes() -> Decoder:
    ml_dtypes: Any = import_module("ml_dtypes")
    element, power = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu

    def decode(packed: Tensor, scale: Tensor) -> Tensor:
        bytes = packed.numpy()
        codes = np.stack([bytes & 15, bytes >> 4], axis=-1).reshape(*scale.shape, mxfp4.BLOCK)
        scales = scale.numpy().view(power).astype(np.float32)[..., None]
        with np.errstate(over="ignore", invalid="ignore"):
            values = codes.view(element).astype(np.float32) * scales
        return torch.from_numpy(values).flatten(-2)

    return decode


def _torchao() -> Decoder:
    to_dtype: Any = import_module("torchao.prototype.mx_formats.mx_tensor").to_dtype

    def decode(packed: Tensor, scale: Tensor) -> Tensor:
        powers = scale.view(torch.float8_e8m0fnu)
        values: Tensor = to_dtype(packed, powers, torch.float4_e2m1fn_x2, mxfp4.BLOCK, torch.float32)
        return values

    return decode


def _compressed_tensors() -> Decoder:
    compressors: Any = import_module("compressed_tensors.compressors.mxfp4.base")
    quantization: Any = import_module("compressed_tensors.quantization")
    weights = quantization.QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=mxfp4.BLOCK)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)

    def decode(packed: Tensor, scale: Tensor) -> Tensor:
        state = {"weight_packed": packed.clone(), "weight_scale": scale.clone()}
        values: Tensor = compressors.MXFP4PackedCompressor.decompress(state, scheme)["weight"]
        return values

    return decode


def _transformers() -> Decoder:
    """The decoder of gpt-oss checkpoints, which transposes."""
    convert: Any = import_module("transformers.integrations.mxfp4").convert_moe_packed_tensors

    def decode(packed: Tensor, scale: Tensor) -> Tensor:
        blocks = packed.unflatten(-1, (-1, mxfp4.BLOCK // 2))
        values: Tensor = convert(blocks[None], scale[None], dtype=torch.float32)
        return values[0].T

    return decode


#: Distribution name -> how to make its decoder.
ORACLES: dict[str, Callable[[], Decoder]] = {
    "ml-dtypes": _ml_dtypes,
    "torchao": _torchao,
    "compressed-tensors": _compressed_tensors,
    "transformers": _transformers,
}
