"""DeepGEMM's contract for grouped products, on the CPU: one group id per tile of rows, read from its first row.

A row of id -1 gets zeros where its tile starts with one (as FP8 on SM90), or what expert 0 would give (as BF16 on
SM90). Below are experts functions on top of it: the adapter of this project, and careless ones.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moonep_validate.formats import fp8
from moonep_validate.reference.experts import swiglu
from moonep_validate.subjects.experts import deepgemm
from moonep_validate.subjects.experts.implementation import Activation
from moonep_validate.subjects.experts.permute import Tiles, row_groups, tile

__version__ = "0.0-fake"
__moonep_origin__ = "stand-in"

#: Global to the process, as in the library.
state = {"alignment": 32, "behind": 0}


def get_m_alignment_for_contiguous_layout() -> int:
    return state["alignment"]


def m_grouped_bf16_gemm_nt_contiguous(a: Tensor, b: Tensor, d: Tensor, m_indices: Tensor) -> None:
    _by_tile(a, b, d, m_indices, zeros=False)


def m_grouped_fp8_gemm_nt_contiguous(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, m_indices: Tensor
) -> None:
    assert a[0].dtype == b[0].dtype == torch.float8_e4m3fn
    assert bool((torch.frexp(torch.cat([a[1].flatten(), b[1].flatten()])).mantissa == 0.5).all()), "UE8M0"
    x = a[0].float() * a[1].repeat_interleave(128, dim=1)
    scale = b[1].repeat_interleave(128, dim=1).repeat_interleave(128, dim=2)
    _by_tile(x, b[0].float() * scale, d, m_indices, zeros=True)


def _by_tile(a: Tensor, b: Tensor, d: Tensor, ids: Tensor, zeros: bool) -> None:
    rows = state["alignment"]
    assert len(a) == len(ids) == len(d)
    assert len(ids) % rows == 0, "whole tiles only"
    first = ids[::rows].long()
    x = a.float().unflatten(0, (-1, rows))
    out = torch.bmm(x, b.float()[first.clamp(min=0)].transpose(1, 2))
    if zeros:
        out[first < 0] = 0
    d.copy_(out.flatten(0, 1))
    if state["behind"]:  # a kernel that writes rows behind its output
        torch.as_strided(d, (len(d) + state["behind"], d.shape[1]), d.stride())[len(d) :] = 3


def library() -> deepgemm.Library:
    return deepgemm.Library(sys.modules[__name__])


def bf16(
    rows: Tensor, weights: Tensor, ends: Tensor, matrices: Sequence[Tensor], activation: Activation
) -> Tensor:
    return deepgemm.compute(library(), "bf16", rows, weights, ends, matrices, activation)


def blocks(
    rows: Tensor, weights: Tensor, ends: Tensor, matrices: Sequence[Tensor], activation: Activation
) -> Tensor:
    return deepgemm.compute(library(), "fp8", rows, weights, ends, matrices, activation)


def undeclared(
    rows: Tensor, weights: Tensor, ends: Tensor, matrices: Sequence[Tensor], activation: Activation
) -> Tensor:
    """FP8 that says nothing of its rounding."""
    return deepgemm.compute(library(), "fp8", rows, weights, ends, matrices, activation)


def careless(rows: Tensor, weights: Tensor, ends: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Ids per row, whatever the alignment."""
    size = len(rows) // state["alignment"] * state["alignment"]
    tiles = Tiles(row_groups(ends, size), None, len(rows))
    return deepgemm.layer(library(), "bf16", tiles, rows, weights, list(matrices), swiglu)


def strict(rows: Tensor, weights: Tensor, ends: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Moves no row, and says where that would be wrong."""
    tiles = tile(ends, len(rows), state["alignment"], repack=False)
    return deepgemm.layer(library(), "bf16", tiles, rows, weights, list(matrices), swiglu)


def early(rows: Tensor, weights: Tensor, ends: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """The route weight before the down projection, as vLLM's experts apply it."""
    tiles = tile(ends, len(rows), state["alignment"])
    gate, up, down = matrices
    x, factor = tiles.gather(rows), tiles.gather(weights)[:, None]

    def product(a: Tensor, b: Tensor) -> Tensor:
        return library().product("bf16", a, b, tiles.ids)

    inner = swiglu(product(x, gate).float(), product(x, up).float()) * factor
    return tiles.scatter(product(inner.bfloat16(), down))


def said(function: Any, **about: Any) -> None:
    for name, value in about.items():
        setattr(function, name, value)


said(bf16, takes_activation=True, activations=("silu", "situ"))
said(blocks, takes_activation=True, activations=("silu", "situ"), rounds=("fp8_inputs", "fp8_weights"))
said(undeclared, takes_activation=True)
said(early, rounds=("weighted_activation",))
assert fp8.BLOCK == 128
