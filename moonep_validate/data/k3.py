"""Which data does the model ``k3`` get? Weights around the routed experts, and tokens that its router sends on.

The routing word of a case still chooses the expert ids: a token carries, in one column per expert, the logit
that makes the correct router choose exactly these ids, in the order of k. Widths: H is the latent width, that
of a dispatched row; the model width is H plus one column per expert, at least 2 * H; the shared expert has 2 * I.

The correction bias is 7 plus or minus 0.15 (the range of released checkpoints, where BF16 has steps of 1/32),
so that a bias which is left out, rounded or added to the weights shows. The biased scores of a token's experts
are 0.006 apart, and many that lose are as near, while a float32 router errs by less than 0.0001. A gate row
also has four small entries, so that logits need more bits than BF16 has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.data.problem import Batch
from moonep_validate.hashing import below, hashed, normal, unit

#: Kimi-K3's numbers, but for the scaling factor: its 1.0 would hide a factor that is applied twice.
SCALING_FACTOR = 2.5
NORM_EPS = 1e-5  # the data's mean squares are near it (problem.py), so that another eps shows
SITU_BETA = 4.0
SITU_LINEAR_BETA = 25.0

#: Half the spacing: rounding the logits to BF16 moves the scores, and the order must still be clear.
MARGIN = 0.003
_SPACING, _LAST_CHOSEN, _BIAS, _BIAS_SPREAD = 0.006, 0.6, 7.0, 0.15
#: Few and small: the sum of their products is exact, and beside a logit needs more bits than BF16 has.
_SMALL_ENTRIES, _SMALL = 4, 2.0**-5


@dataclass(frozen=True)
class ModelWeights:
    """What is around the routed experts of one layer; the same on every rank, and shared, so not to be changed.

    Attributes:
        gate: ``[E, M]`` bf16, M the model width.
        bias: ``[E]`` float32, for the choice of experts only.
        latent: ``[H, M]`` bf16, the down-projection.
        norm: ``[H]`` bf16.
        up: ``[M, H]`` bf16, the up-projection.
        shared: the shared expert's gate and up ``[2 * I, M]``, down ``[M, 2 * I]``, bf16.
    """

    gate: Tensor
    bias: Tensor
    latent: Tensor
    norm: Tensor
    up: Tensor
    shared: tuple[Tensor, Tensor, Tensor]

    def to(self, device: torch.device) -> ModelWeights:
        """The same on a device."""
        gate, up, down = (tensor.to(device) for tensor in self.shared)
        named = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **named, shared=(gate, up, down))


def model_width(case: Case) -> int:
    """Columns of a token of the model: H and one per expert, at least 2 * H, a multiple of 8."""
    return case.H + max(case.H, -(-case.E // 8) * 8)


def model_weights(case: Case, layer: int = 0) -> ModelWeights:
    """The weights of one layer, on the CPU."""
    return _model_weights(case.seed, layer, case.E, case.H, case.I, model_width(case))


@lru_cache(maxsize=16)
def _model_weights(seed: int, layer: int, E: int, H: int, I: int, M: int) -> ModelWeights:
    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> Tensor:
        noise = hashed(f"k3 {name}", seed, layer, torch.arange(rows)[:, None], torch.arange(columns))
        values: Tensor = (normal(noise) * columns**-0.5).bfloat16() * scale
        return values

    expert = torch.arange(E)
    bias = _BIAS + _BIAS_SPREAD * (2 * unit(hashed("k3 bias", seed, layer, expert)) - 1)
    shared = (
        matrix("shared gate", 2 * I, M, 2.0),
        matrix("shared up", 2 * I, M, 16.0),
        matrix("shared down", M, 2 * I, 1 / 16),
    )
    norm = (1 + normal(hashed("k3 norm", seed, layer, torch.arange(H))) / 4).bfloat16()
    return ModelWeights(
        gate=_gate(seed, layer, E, H, M),
        bias=bias.float(),
        latent=matrix("latent", H, M),
        norm=norm,
        up=matrix("up", M, H),
        shared=shared,
    )


def _gate(seed: int, layer: int, E: int, H: int, M: int) -> Tensor:
    """Row e reads column H + e, and a few of the first H columns by a little."""
    gate = torch.zeros(E, M)
    index = hashed("k3 gate", seed, layer, torch.arange(E)[:, None], torch.arange(_SMALL_ENTRIES))
    gate.scatter_(1, below(index, H), _SMALL * (2.0 * below(index >> 32, 2) - 1))
    gate[torch.arange(E), H + torch.arange(E)] = 1.0
    return gate.bfloat16()


def model_hidden(case: Case, rank: int, batch: Batch, layer: int = 0) -> Tensor:
    """Tokens of the model width whose right routing is that of a batch: bf16 ``[S, M]``.

    Args:
        case: the case.
        rank: whose tokens.
        batch: its ``hidden`` gives the first H columns, its ``topk_ids`` the routing, distinct in each token.
        layer: whose router.
    """
    weights, wanted = model_weights(case, layer), batch.topk_ids.long()
    token, column = torch.arange(case.S)[:, None], torch.arange(model_width(case) - case.H)
    rest = normal(hashed("k3 rest", case.seed, rank, token, column)).bfloat16()
    score = _biased_scores(case, rank, layer, wanted) - weights.bias.double()
    small = batch.hidden.double() @ weights.gate[:, : case.H].double().T  # exact: four products of few bits
    rest[:, : case.E] = (torch.logit(score) - small).bfloat16()
    hidden = torch.cat([batch.hidden, rest], dim=1)
    _assert_margins(hidden, weights, wanted)
    return hidden


def _biased_scores(case: Case, rank: int, layer: int, wanted: Tensor) -> Tensor:
    """Score plus bias that each expert shall get: float64 ``[S, E]``."""
    noise = hashed("k3 scores", case.seed, layer, rank, torch.arange(case.S)[:, None], torch.arange(case.E))
    scores = _LAST_CHOSEN - _SPACING - 0.35 * unit(noise) ** 2
    chosen = _LAST_CHOSEN + _SPACING * torch.arange(case.K - 1, -1, -1, dtype=torch.float64)
    return _BIAS + scores.scatter(1, wanted, chosen.expand(case.S, -1))


def _assert_margins(hidden: Tensor, weights: ModelWeights, wanted: Tensor) -> None:
    """The exact router chooses the wanted ids in their order, and each score leads the next by ``MARGIN``."""
    top_k = wanted.shape[1]
    biased = torch.sigmoid(hidden.double() @ weights.gate.double().T) + weights.bias.double()
    best = biased.topk(min(top_k + 1, biased.shape[1]), dim=1)
    assert torch.equal(best.indices[:, :top_k], wanted), (
        "the router of these data does not choose the routing's ids"
    )
    margin = -best.values.diff(dim=1)
    assert not margin.numel() or float(margin.min()) > MARGIN, f"choice margin {float(margin.min()):g}"
