"""The parts around the routed experts in BF16, as an engine has them: router, projections, norm, shared MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moonep_validate.data.k3 import NORM_EPS, SCALING_FACTOR, SITU_BETA, SITU_LINEAR_BETA
from moonep_validate.reference.experts import gated_mlp


def router_logits(hidden: Tensor, gate: Tensor) -> Tensor:
    """Logits in float32 from bf16 tokens ``[S, M]`` and gate rows ``[E, M]``: ``[S, E]``."""
    return hidden.float() @ gate.float().T


def choose(biased: Tensor, top_k: int) -> Tensor:
    """The ``top_k`` experts of largest biased score, best first: int32 ``[S, K]``."""
    return biased.topk(top_k, dim=1).indices.int()


def weigh(scores: Tensor, ids: Tensor, factor: float) -> Tensor:
    """Scores of the chosen experts, renormalised to sum to ``factor``: float32 ``[S, K]``."""
    mine = scores.gather(1, ids.long())
    return mine / (mine.sum(dim=1, keepdim=True) + 1e-20) * factor


def route(
    hidden: Tensor, gate: Tensor, bias: Tensor, top_k: int, factor: float = SCALING_FACTOR
) -> tuple[Tensor, Tensor]:
    """The router.

    Args:
        hidden: ``[S, M]`` bf16, the full tokens and not the latent ones.
        gate: ``[E, M]`` bf16.
        bias: ``[E]`` float32; it takes part in choosing only.
        top_k: K.
        factor: the scaling factor.

    Returns:
        Expert ids int32 and route weights float32, both ``[S, K]``.
    """
    scores = torch.sigmoid(router_logits(hidden, gate))
    ids = choose(scores + bias, top_k)
    return ids, weigh(scores, ids, factor)


def project(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``, rounded to BF16 once: ``[S, rows]``."""
    return (x.float() @ weight.float().T).bfloat16()


def situ(g: Tensor, u: Tensor) -> Tensor:
    """SiTU of gate and up, float32, shape kept; smooth caps, no clamp."""
    gate = SITU_BETA * torch.tanh(g / SITU_BETA) * torch.sigmoid(g)
    return gate * SITU_LINEAR_BETA * torch.tanh(u / SITU_LINEAR_BETA)


def shared_expert(
    hidden: Tensor, weights: Sequence[Tensor], activation: Callable[[Tensor, Tensor], Tensor] = situ
) -> Tensor:
    """The shared expert on the full tokens, neither weighted nor scaled: ``[S, M]`` bf16.

    Args:
        hidden: ``[S, M]`` bf16.
        weights: gate and up ``[2 * I, M]``, down ``[M, 2 * I]``, bf16.
        activation: of gate and up.
    """
    return gated_mlp(hidden.float(), weights, activation).bfloat16()


def rms_norm(routed: Tensor, weight: Tensor, eps: float = NORM_EPS) -> Tensor:
    """RMSNorm of the summed routed rows ``[S, H]`` bf16, float32 inside, rounded once."""
    x = routed.float()
    scale = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (x * scale * weight.float()).bfloat16()


def output(normed: Tensor, weight: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    """Up-projection, and its sum with the shared expert.

    Args:
        normed: ``[S, H]`` bf16.
        weight: ``[M, H]`` bf16.
        shared: ``[S, M]`` bf16.

    Returns:
        The projection and the sum, both ``[S, M]`` bf16.
    """
    up = project(normed, weight)
    return up, up + shared
