"""The experts on DeepGEMM, whichever build the environment has; what it can do is tried, never assumed.

``m_grouped_bf16_gemm_nt_contiguous`` and ``m_grouped_fp8_gemm_nt_contiguous`` of ``deep_gemm`` (upstream's, or
``sgl-deep-gemm``, which installs the same module) or of the build that vLLM brings. Group ids and alignment: see
permute.py. What a build does with rows of no group: behaviour.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.formats import fp8
from moonep_validate.subjects.experts.implementation import Activation, Experts, Unavailable
from moonep_validate.subjects.experts.permute import Tiles, tile
from moonep_validate.subjects.vouch import part_of

MODULES = ("deep_gemm", "sgl_deep_gemm", "vllm.third_party.deep_gemm")
ENTRIES = {"bf16": "m_grouped_bf16_gemm_nt_contiguous", "fp8": "m_grouped_fp8_gemm_nt_contiguous"}
_ALIGNMENTS = ("get_m_alignment_for_contiguous_layout", "get_mk_alignment_for_contiguous_layout")
_FP8_ROUNDS = ("fp8_inputs", "fp8_weights")
#: What the rows behind an output hold, so that a write behind its end shows.
_GUARD = -1.75
_BLACKWELL = 10


class GuardError(RuntimeError):
    """A kernel wrote behind the end of its output."""


@dataclass(frozen=True)
class Library:
    """One build of DeepGEMM.

    Attributes:
        module: the imported module.
        guarded: whether outputs have guard rows behind them, which are looked at after each product; it waits
            for the device.
    """

    module: ModuleType
    guarded: bool = True

    def alignment(self) -> int:
        """Rows of a tile, as the library says now: it can be set, for the whole process.

        Raises:
            Unavailable: if the library does not say.
        """
        for name in _ALIGNMENTS:
            if callable(getter := getattr(self.module, name, None)):
                return int(getter())
        raise Unavailable(f"{self.module.__name__} does not say its alignment: no {' nor '.join(_ALIGNMENTS)}")

    def product(self, kind: str, x: Any, weight: Any, ids: Tensor) -> Tensor:
        """One grouped product, BF16 ``[M, N]``.

        Args:
            kind: ``bf16`` or ``fp8``.
            x: ``[M, K]`` bf16, or E4M3 and scales of ``fp8.quantise_rows``.
            weight: ``[G, N, K]`` bf16, or E4M3 and scales of ``fp8.quantise_weight``.
            ids: int32 ``[M]``, group of each row, see permute.py.

        Raises:
            GuardError: if the kernel wrote behind its output.
        """
        if kind == "fp8":
            x = (x[0], self._scales(x[1]))
        rows, width = len(ids), (weight if kind == "bf16" else weight[0]).shape[1]
        guards = self.alignment() if self.guarded else 0
        whole = torch.full((rows + guards, width), _GUARD, dtype=torch.bfloat16, device=ids.device)
        getattr(self.module, ENTRIES[kind])(x, weight, whole[:rows], ids)
        if self.guarded and bool((touched := (whole[rows:] != _GUARD).any(dim=1)).any()):
            row = int(touched.nonzero()[0])
            raise GuardError(f"{ENTRIES[kind]} wrote row {rows + row} of an output of {rows} rows")
        return whole[:rows]

    def _scales(self, scales: Tensor) -> Tensor:
        """Row scales as the build takes them: early ones want them transposed and aligned, later ones do it."""
        align = getattr(self.module, "get_col_major_tma_aligned_tensor", None)
        if align is None or hasattr(self.module, "transform_sf_into_required_layout"):
            return scales
        aligned: Tensor = align(scales)
        return aligned


def compute(
    library: Library,
    kind: str,
    rows: Tensor,
    row_weights: Tensor,
    cu_seqlens: Tensor,
    weights: Sequence[Tensor],
    activation: Activation,
) -> Tensor:
    """See ``Compute``; the weights are quantised here if the kind is ``fp8``."""
    tiles = tile(cu_seqlens, len(rows), library.alignment())
    if kind == "fp8":
        weights = [fp8.quantise_weight(weight) for weight in weights]  # type: ignore[misc]
    return layer(library, kind, tiles, rows, row_weights, weights, activation)


def layer(
    library: Library,
    kind: str,
    tiles: Tiles,
    rows: Tensor,
    row_weights: Tensor,
    weights: Sequence[Any],
    activation: Activation,
) -> Tensor:
    """The experts on rows that are laid out, with weights as the kind takes them: ``[NvS, H]`` bf16."""
    gate, up, down = weights

    def product(x: Tensor, weight: Any) -> Tensor:
        return library.product(kind, fp8.quantise_rows(x) if kind == "fp8" else x, weight, tiles.ids)

    x = tiles.gather(rows)
    inner = activation(product(x, gate).float(), product(x, up).float()).to(rows.dtype)
    weighted = product(inner, down) * tiles.gather(row_weights)[:, None]
    return tiles.scatter(weighted.to(rows.dtype))


def bf16(device: str) -> Experts:
    """BF16; rounds as the reference does."""
    return of_library(find("bf16", device), "bf16", device)


def fp8_blocks(device: str) -> Experts:
    """FP8 E4M3: rows under a scale per 128 columns, weights per block of 128 x 128."""
    return of_library(find("fp8", device), "fp8", device)


def fp8_fp4(device: str) -> Experts:
    """FP8 rows with FP4 weights; only Blackwell has it.

    Raises:
        Unavailable: always; this project has had no such device to write and try the part on.
    """
    _need_gpu(device)
    major, minor = torch.cuda.get_device_capability()
    if major < _BLACKWELL:
        raise Unavailable(f"DeepGEMM's FP8 x FP4 needs SM100 (Blackwell); this device is SM{major}{minor}")
    raise Unavailable("the FP8 x FP4 part is not written: there has been no Blackwell device to try it on")


def of_library(library: Library, kind: str, device: str) -> Experts:
    """The part on a given library."""
    rounds = _FP8_ROUNDS if kind == "fp8" else ()
    made = (getattr(library.module, ENTRIES[kind], None),)
    part = part_of(library.module, *made, rounds=rounds)
    return Experts(partial(compute, library, kind), part, device)


def find(kind: str, device: str) -> Library:
    """The first build that can be imported and gets a small product right.

    Raises:
        Unavailable: with what each candidate said.
    """
    _need_gpu(device)
    said = []
    for name in MODULES:
        try:
            library = Library(importlib.import_module(name))
            attempt(library, kind, device)
        except Exception as error:  # a build for another torch may raise anything
            said.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        else:
            return library
    raise Unavailable(f"no build of DeepGEMM runs {ENTRIES[kind]} here; {'; '.join(said)}")


def attempt(library: Library, kind: str, device: str) -> None:
    """Three tiles, one of a middle group that is empty left out; wrong values are as bad as an exception.

    Raises:
        Unavailable: if the values are wrong; else whatever the library raises.
    """
    tile_rows, width = library.alignment(), 2 * fp8.BLOCK
    ids = torch.tensor([0, 2, 2], dtype=torch.int32, device=device).repeat_interleave(tile_rows)
    x = torch.ones(len(ids), width, dtype=torch.bfloat16, device=device)
    weight = torch.ones(3, width, width, dtype=torch.bfloat16, device=device)
    weight *= torch.tensor([1.0, 64.0, 2.0], device=device, dtype=torch.bfloat16)[:, None, None]
    given = (fp8.quantise_rows(x), fp8.quantise_weight(weight)) if kind == "fp8" else (x, weight)
    found = library.product(kind, given[0], given[1], ids).float()
    want = torch.where(ids == 0, 1.0, 2.0)[:, None] * width
    if not bool((found == want).all()):
        raise Unavailable(f"{ENTRIES[kind]} is wrong on a product of ones: {found[0, 0]:g}, {found[-1, 0]:g}")


def _need_gpu(device: str) -> None:
    if device != "cuda" or not torch.cuda.is_available():
        raise Unavailable(f"DeepGEMM needs a GPU: the device asked for is {device}, {_gpus()}")


def _gpus() -> str:
    count = torch.cuda.device_count()
    return f"torch {torch.__version__} sees {count} GPU{'s' * (count != 1)}"


def refuses_rows(case: Case) -> str | None:
    """Why a case does not fit BF16, or None."""
    if case.H % 64 or case.I % 64:
        return f"H={case.H}, I={case.I}: DeepGEMM's BF16 products are tried here on multiples of 64 only"
    return None


def refuses_blocks(case: Case) -> str | None:
    """Why a case does not fit FP8, or None."""
    if case.H % fp8.BLOCK or case.I % fp8.BLOCK:
        return f"H={case.H}, I={case.I}: FP8 blocks are {fp8.BLOCK} x {fp8.BLOCK}, so both must be multiples of it"
    return None
