"""What does a build of DeepGEMM do where its contract says nothing? Rows of no group, tails, ids inside a tile.

The answers differ between builds and between kernels of one build, so they are recorded, not promised; the checks
never rely on them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from moonep_validate.formats import fp8
from moonep_validate.subjects.experts.deepgemm import ENTRIES, Library
from moonep_validate.trace.provenance import provenance

#: Two blocks of scales, so that one that is read from the other block shows.
_WIDTH = 2 * fp8.BLOCK
#: What the output holds before: none of the values that a kernel could compute there.
_BEFORE = 7.0


def behaviour(library: Library, kind: str, device: str) -> dict[str, Any]:
    """Five tiles: group 1, half of group 1 and half of no group, no group, ids that change inside, no group.

    Args:
        library: the build.
        kind: ``bf16`` or ``fp8``.
        device: where it runs.

    Returns:
        What was imported, the alignment, and for ``tile_of_no_group``, ``rest_of_a_tile`` and ``last_tile`` what
        the rows of id -1 hold: ``unwritten``, ``zeros``, ``x @ W0``, ``x @ W1`` or ``other``; for
        ``id_inside_a_tile`` whose weights the second half of a tile got: ``own``, ``first row's`` or ``other``.
        A call that raises is described under ``raised``.
    """
    rows = library.alignment()
    tiles = torch.tensor([[1, 1], [1, -1], [-1, -1], [1, 2], [-1, -1]], dtype=torch.int32, device=device)
    ids = tiles.repeat_interleave(rows // 2, dim=1).flatten()
    x = torch.ones(len(ids), _WIDTH, dtype=torch.bfloat16, device=device)
    factors = torch.tensor([2.0, 4.0, 8.0], dtype=torch.bfloat16, device=device)
    weight = torch.ones(3, _WIDTH, _WIDTH, dtype=torch.bfloat16, device=device) * factors[:, None, None]
    out = torch.full((len(ids), _WIDTH), _BEFORE, dtype=torch.bfloat16, device=device)
    given = (fp8.quantise_rows(x), fp8.quantise_weight(weight)) if kind == "fp8" else (x, weight)
    found: dict[str, Any] = {"library": asdict(provenance(library.module)), "kernel": ENTRIES[kind]}
    found |= {"alignment": rows, "device": torch.cuda.get_device_name() if device == "cuda" else device}
    try:
        getattr(library.module, ENTRIES[kind])(*given, out, ids)
        halves = out.float().cpu().unflatten(0, (5, 2, -1))
    except Exception as error:  # the answer is what it raised
        return {**found, "raised": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    second = _said(halves[3, 1], {"own": 8.0, "first row's": 4.0})
    return {
        **found,
        "tile_of_no_group": _content(halves[2]),
        "rest_of_a_tile": _content(halves[1, 1]),
        "last_tile": _content(halves[4]),
        "id_inside_a_tile": second,
    }


def _content(rows: Tensor) -> str:
    return _said(rows, {"zeros": 0.0, "x @ W0": 2.0, "x @ W1": 4.0}, unwritten=_BEFORE)


def _said(rows: Tensor, factors: dict[str, float], unwritten: float | None = None) -> str:
    """The name of the one value that all elements have; a factor counts ``_WIDTH`` times."""
    if unwritten is not None and bool((rows == unwritten).all()):
        return "unwritten"
    names = [name for name, factor in factors.items() if bool((rows == factor * _WIDTH).all())]
    return names[0] if names else "other"
