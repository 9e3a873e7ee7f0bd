"""Which data? All tensors of a case, regenerated from hashes, in the fill that makes faults show.

``ints``
    Every sum is exact in any order, grouping and rounding to BF16, so the layer is judged bit for bit. With
    x[:, 0] = 1 and other columns in {-1, 0, 1}, a gate row of 96 in column 0 and +-32 in one other column
    gives g in {64, 96, 128}, where silu(g) = g also in float64. An up row is +-1 in one column, a down row
    has min(8, 32 // K) entries of +-1, route weights are 1 or 1/2: each term of a token's sum is a multiple
    of 16, and the sum of their magnitudes is at most 256 * 16, so every partial sum fits BF16's 8 bits.
    About 15% of the gate rows are zero, so that zero is seen as well. All weights are E2M1 * 2**k.
``real``
    Normal-like values, scaled so that activations stay near 1; judged by bounds (oracle/bounds.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from moonep_validate import routing
from moonep_validate.case import Case
from moonep_validate.hashing import below, hashed, normal, unit

PROJECTIONS = ("gate", "up", "down")
_UNIT, _UNITS = 16, 256


@dataclass(frozen=True)
class Batch:
    """What one rank gives to one forward pass.

    Attributes:
        hidden: ``[S, H]`` bf16; padding tokens are zero.
        topk_ids: ``[S, K]`` int32.
        topk_weights: ``[S, K]`` float32; zero for padding tokens.
    """

    hidden: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


def batch(case: Case, rank: int) -> Batch:
    """The tokens of one rank."""
    real = case.token_count(rank)
    hidden = _HIDDEN[case.fill.name](case, rank)
    weights = _ROUTE_WEIGHTS[case.fill.name](case, rank)
    hidden[real:] = 0
    weights[real:] = 0
    return Batch(hidden.to(torch.bfloat16), routing.topk_ids(case, rank), weights)


def expert_weights(case: Case, rank: int, layer: int = 0) -> dict[str, Tensor]:
    """Weights of the experts that ``rank`` owns: fresh bf16 tensors.

    Returns:
        ``gate`` and ``up`` of ``[E/R, I, H]``, ``down`` of ``[E/R, H, I]``.
    """
    entries = min(8, 32 // case.K) if case.fill.name == "ints" else 0
    args = (case.fill.name, case.seed, layer, case.experts_per_rank, case.H, case.I, entries)
    return {name: tensor.clone() for name, tensor in _expert_weights(rank, *args).items()}


@lru_cache(maxsize=64)
def _expert_weights(
    rank: int,
    fill: str,
    seed: int,
    layer: int,
    per_rank: int,
    H: int,
    I: int,
    entries: int,
) -> dict[str, Tensor]:
    expert = torch.arange(per_rank)[:, None] + rank * per_rank
    if fill == "ints":
        weights = _ints_weights(expert, seed, layer, H, I, entries)
        total = weights["down"].abs().long().sum(-1).max().item() * 128 * (32 // entries if entries > 1 else 32)
        assert total <= _UNIT * _UNITS, f"ints fill: sums reach {total}, BF16 holds them exactly up to 4096"
        return weights
    shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    return {
        name: (normal(_element_hash(name, seed, layer, expert, *shape)) * shape[1] ** -0.5).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def _element_hash(name: str, seed: int, layer: int, expert: Tensor, rows: int, columns: int) -> Tensor:
    return hashed(name, seed, layer, expert[..., None], torch.arange(rows)[:, None], torch.arange(columns))


def _ints_weights(expert: Tensor, seed: int, layer: int, H: int, I: int, entries: int) -> dict[str, Tensor]:
    """See the module docstring; ``expert`` is ``[experts, 1]``."""
    row = torch.arange(I)

    def bits(name: str, *index: Tensor) -> Tensor:
        return hashed(name, seed, layer, expert, *index)

    gate, up = torch.zeros(len(expert), I, H), torch.zeros(len(expert), I, H)
    gate[..., 0] = 96.0
    gate.scatter_(
        2,
        (1 + below(bits("gate/column", row), H - 1))[..., None],
        32.0 * _sign(bits("gate/sign", row))[..., None],
    )
    gate[below(bits("gate/zero", row), 100) < 15] = 0.0
    up.scatter_(2, below(bits("up/column", row), H)[..., None], _sign(bits("up/sign", row))[..., None])
    down = torch.zeros(len(expert), H, I)
    out_row, entry = torch.arange(H)[:, None], torch.arange(entries)
    index = (expert[..., None], out_row, entry)
    down.scatter_(
        2,
        below(hashed("down/column", seed, layer, *index), I),
        _sign(hashed("down/sign", seed, layer, *index)),
    )
    return {"gate": gate.bfloat16(), "up": up.bfloat16(), "down": down.bfloat16()}


def _sign(bits: Tensor) -> Tensor:
    return below(bits, 2).float() * 2 - 1


def _token_hash(name: str, case: Case, rank: int, columns: int) -> Tensor:
    return hashed(name, case.seed, rank, torch.arange(case.S)[:, None], torch.arange(columns))


def _ints_hidden(case: Case, rank: int) -> Tensor:
    hidden = below(_token_hash("hidden", case, rank, case.H), 3).float() - 1
    hidden[:, 0] = 1.0
    return hidden


def _real_hidden(case: Case, rank: int) -> Tensor:
    return normal(_token_hash("hidden", case, rank, case.H))


def _ints_route_weights(case: Case, rank: int) -> Tensor:
    return below(_token_hash("route", case, rank, case.K), 2).float() / 2 + 0.5


def _real_route_weights(case: Case, rank: int) -> Tensor:
    weights = unit(_token_hash("route", case, rank, case.K)).float()
    return weights / weights.sum(dim=1, keepdim=True)


_HIDDEN = {"ints": _ints_hidden, "real": _real_hidden}
_ROUTE_WEIGHTS = {"ints": _ints_route_weights, "real": _real_route_weights}
