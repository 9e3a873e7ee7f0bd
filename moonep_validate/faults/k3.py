"""Faults around the routed experts: scaling factor, shared expert, reduction, bias, scores, activation, norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from moonep_validate.data.k3 import NORM_EPS, SCALING_FACTOR, SITU_BETA, SITU_LINEAR_BETA
from moonep_validate.faults import Next, fault


def _logits(hidden: Tensor, gate: Tensor) -> Tensor:
    return hidden.float() @ gate.float().T


def _weights(scores: Tensor, ids: Tensor) -> Tensor:
    """Scores of the chosen experts, over their sum, times the factor: ``[S, K]``."""
    mine = scores.gather(1, ids.long())
    return mine / mine.sum(dim=1, keepdim=True) * SCALING_FACTOR


def _routed(scores: Tensor, biased: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """A router that chooses by ``biased`` and weighs by ``scores``, both ``[S, E]``."""
    ids = biased.topk(top_k, dim=1).indices.int()
    return ids, _weights(scores, ids)


# Scaling factor.


@fault("factor-applied-twice", on="model.router", stage="router", bugs="B01 B02 K01")
def _(call: Next, *args: Any) -> Any:
    """One rank's router applies the scaling factor twice."""
    ids, weights = call(*args)
    return ids, weights * SCALING_FACTOR


@fault("factor-never-applied", on="model.router", stage="router", bugs="B03 K01")
def _(call: Next, *args: Any) -> Any:
    """One rank's router leaves the scaling factor out."""
    return call(*args, 1.0)


@fault("factor-on-first-route", on="model.router", stage="router", bugs="B02 K01")
def _(call: Next, *args: Any) -> Any:
    """One rank's router scales the first route of each token only."""
    ids, weights = call(*args)
    weights[:, 1:] /= SCALING_FACTOR
    return ids, weights


@fault("factor-on-sum", on="buffer.combine", stage="combine", bugs="B01 B02 K01")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """One rank scales the combined rows once more, which a norm behind it all but hides."""
    result = call(*args, **kwargs)
    result[0].mul_(SCALING_FACTOR)
    return result


# Router: bias, scores, choice.


@fault("bias-rounded-to-bf16", on="model.router", stage="router", bugs="B12 K04")
def _(call: Next, hidden: Tensor, gate: Tensor, bias: Tensor, *args: Any) -> Any:
    """One rank keeps its correction bias in BF16."""
    return call(hidden, gate, bias.bfloat16().float(), *args)


@fault("bias-added-in-bf16", on="model.router", stage="router", bugs="B13 K04")
def _(call: Next, hidden: Tensor, gate: Tensor, bias: Tensor, top_k: int) -> Any:
    """One rank adds scores and bias in BF16."""
    scores = torch.sigmoid(_logits(hidden, gate))
    return _routed(scores, (scores + bias).bfloat16(), top_k)


@fault("bias-misread", on="model.router", stage="router", bugs="B15 K04")
def _(call: Next, hidden: Tensor, gate: Tensor, bias: Tensor, *args: Any) -> Any:
    """One rank reads BF16 memory of the bias as float32."""
    bias = torch.cat([bias, bias]).bfloat16().view(torch.float32)
    return call(hidden, gate, bias, *args)


@fault("bias-ignored", on="model.router", stage="router", bugs="K04")
def _(call: Next, hidden: Tensor, gate: Tensor, bias: Tensor, *args: Any) -> Any:
    """One rank chooses by the scores alone."""
    return call(hidden, gate, torch.zeros_like(bias), *args)


@fault("bias-in-weights", on="model.router", stage="router", bugs="B14 K04")
def _(call: Next, hidden: Tensor, gate: Tensor, bias: Tensor, *args: Any) -> Any:
    """One rank takes the route weights from the biased scores."""
    ids, weights = call(hidden, gate, bias, *args)
    weights = _weights(torch.sigmoid(_logits(hidden, gate)) + bias, ids)
    return ids, weights


@fault("weights-not-renormalised", on="model.router", stage="router", bugs="K05")
def _(call: Next, hidden: Tensor, gate: Tensor, *args: Any) -> Any:
    """One rank does not divide by the sum of the chosen scores."""
    ids, weights = call(hidden, gate, *args)
    weights = torch.sigmoid(_logits(hidden, gate)).gather(1, ids.long()) * SCALING_FACTOR
    return ids, weights


@fault("weights-over-all-experts", on="model.router", stage="router", bugs="K05")
def _(call: Next, hidden: Tensor, gate: Tensor, *args: Any) -> Any:
    """One rank divides by the sum of all scores, the chosen and the others."""
    ids, weights = call(hidden, gate, *args)
    scores = torch.sigmoid(_logits(hidden, gate))
    weights = scores.gather(1, ids.long()) / scores.sum(dim=1, keepdim=True) * SCALING_FACTOR
    return ids, weights


@fault("softmax-for-sigmoid", on="model.router", stage="router", bugs="K05")
def _(call: Next, hidden: Tensor, gate: Tensor, bias: Tensor, top_k: int) -> Any:
    """One rank scores with a softmax."""
    scores = torch.softmax(_logits(hidden, gate), dim=1)
    return _routed(scores, scores + bias, top_k)


@fault("router-in-bf16", on="model.router", stage="router", bugs="K05")
def _(call: Next, hidden: Tensor, gate: Tensor, bias: Tensor, top_k: int) -> Any:
    """One rank rounds its logits to BF16."""
    scores = torch.sigmoid(_logits(hidden, gate).bfloat16().float())
    return _routed(scores, scores + bias, top_k)


@fault("router-sees-part", on="model.router", stage="router", bugs="K05")
def _(call: Next, hidden: Tensor, gate: Tensor, *args: Any) -> Any:
    """One rank's router reads as many columns as the latent token has, not the full token."""
    hidden = hidden.clone()
    hidden[:, hidden.shape[1] // 2 :] = 0
    return call(hidden, gate, *args)


@fault("one-expert-for-all-routes", on="model.router", stage="router", bugs="B34 K10")
def _(call: Next, *args: Any, token: int = 2) -> Any:
    """One token gets its first expert K times, as top-k of a NaN row gave."""
    ids, weights = call(*args)
    ids[token] = ids[token, 0].clone()
    return ids, weights


@fault("id-behind-last-expert", on="model.router", stage="router", bugs="B35 K10")
def _(call: Next, hidden: Tensor, gate: Tensor, *args: Any, token: int = 2) -> Any:
    """One route goes to expert E, which does not exist."""
    ids, weights = call(hidden, gate, *args)
    ids[token, -1] = len(gate)
    return ids, weights


@fault("ids-of-int64-misread", on="model.router", stage="router", bugs="K15")
def _(call: Next, *args: Any) -> Any:
    """One rank reads int64 memory of the ids as int32, so that every second id is zero."""
    ids, weights = call(*args)
    ids = ids.long().view(torch.int32)[:, : ids.shape[1]].contiguous()
    return ids, weights


# Projections and activation.


@fault("latent-rows-rolled", on="model.latent", stage="latent", bugs="K19")
def _(call: Next, hidden: Tensor, weight: Tensor) -> Any:
    """One rank's down-projection has its rows in another order."""
    return call(hidden, weight.roll(1, dims=0))


@fault("silu-for-situ", on="model.activation", stage="experts", bugs="K27")
def _(call: Next, g: Tensor, u: Tensor) -> Any:
    """One rank's experts use SiLU."""
    return silu(g) * u


@fault("clamp-for-tanh", on="model.activation", stage="experts", bugs="K27")
def _(call: Next, g: Tensor, u: Tensor) -> Any:
    """One rank's experts cap gate and up by a clamp."""
    gate = g.clamp(max=SITU_BETA) * torch.sigmoid(g)
    return gate * u.clamp(-SITU_LINEAR_BETA, SITU_LINEAR_BETA)


@fault("caps-exchanged", on="model.activation", stage="experts", bugs="K27")
def _(call: Next, g: Tensor, u: Tensor) -> Any:
    """One rank's experts exchange the two caps."""
    gate = SITU_LINEAR_BETA * torch.tanh(g / SITU_LINEAR_BETA) * torch.sigmoid(g)
    return gate * SITU_BETA * torch.tanh(u / SITU_BETA)


@fault("up-not-capped", on="model.activation", stage="experts", bugs="K27")
def _(call: Next, g: Tensor, u: Tensor) -> Any:
    """One rank's experts have a cap on the gate only."""
    return SITU_BETA * torch.tanh(g / SITU_BETA) * torch.sigmoid(g) * u


# Norm and reduction.


@fault("norm-before-sum", on="experts", stage="experts", bugs="K03")
def _(call: Next, *args: Any) -> Any:
    """One rank norms its rows before they are summed."""
    out = call(*args)
    return rms_norm(out.float(), out.shape[1:], eps=NORM_EPS).bfloat16()


@fault("norm-eps-too-small", on="model.norm", stage="norm", bugs="K03")
def _(call: Next, *args: Any) -> Any:
    """One rank's norm has a tenth of its eps."""
    return call(*args, NORM_EPS / 10)


@fault("norm-over-tokens", on="model.norm", stage="norm", bugs="K03")
def _(call: Next, routed: Tensor, weight: Tensor) -> Any:
    """One rank's norm runs over its tokens, not over the columns."""
    return call(routed.T, torch.ones(len(routed))).T * weight


@fault("norm-left-out", on="model.norm", stage="norm", bugs="K03")
def _(call: Next, routed: Tensor, weight: Tensor) -> Any:
    """One rank has no norm."""
    return routed


@fault("output-reduced-twice", on="model.output", stage="output", bugs="B08 K03")
def _(call: Next, *args: Any, times: int = 2) -> Any:
    """One rank's output is summed over equal copies, as by a second all-reduce."""
    up, out = call(*args)
    return up, out * times


@fault("routed-part-twice", on="model.output", stage="output", bugs="B09 K03")
def _(call: Next, *args: Any) -> Any:
    """One rank's routed part is added twice, behind the norm."""
    up, out = call(*args)
    return up * 2, out + up


# Shared expert.


@fault("shared-on-every-rank", on="model.output", stage="output", bugs="B04 B06 K02")
def _(call: Next, normed: Tensor, weight: Tensor, shared: Tensor, times: int = 4) -> Any:
    """One rank adds the shared expert once for each rank that has it."""
    return call(normed, weight, shared * times)


@fault("shared-left-out", on="model.output", stage="output", bugs="K02")
def _(call: Next, normed: Tensor, weight: Tensor, shared: Tensor) -> Any:
    """One rank has no shared expert."""
    return call(normed, weight, torch.zeros_like(shared))


@fault("shared-over-factor", on="model.shared", stage="shared", bugs="B05 K02")
def _(call: Next, *args: Any) -> Any:
    """One rank weighs the shared expert by one over the scaling factor."""
    return call(*args) / SCALING_FACTOR


@fault("shared-of-other-tokens", on="model.shared", stage="shared", bugs="B07 K02")
def _(call: Next, hidden: Tensor, weights: Any) -> Any:
    """One rank's shared expert sees the tokens in another order, as after a dispatch."""
    return call(hidden.roll(1, dims=0), weights)


@fault("shared-with-silu", on="model.shared", stage="shared", bugs="K27")
def _(call: Next, *args: Any) -> Any:
    """One rank's shared expert uses SiLU."""
    return call(*args, lambda g, u: silu(g) * u)
