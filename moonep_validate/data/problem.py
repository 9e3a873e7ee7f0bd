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
``ulp``
    Tokens and injected rows of one binade with random mantissas, so that every rounding point shows.
``cancel``
    Injected rows of +-2**30 and 1, so that the order of a sum shows; needs three or more rows of a token.
``scales``
    Weights and tokens of magnitudes over all of BF16's range, whose products stay near 1 (data/scales.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.cases.layout import Layout
from moonep_validate.data import routing, scales
from moonep_validate.formats.stored import FORMATS
from moonep_validate.formats.weight_format import PROJECTIONS as PROJECTIONS
from moonep_validate.formats.weight_format import SCALE, WeightFormat, matrices
from moonep_validate.hashing import below, hashed, normal, unit

CPU = torch.device("cpu")
#: Weights that are made expert by expert: name -> (shape of one expert, expert -> tensor).
EachExpert = Mapping[str, tuple[tuple[int, ...], Callable[[int], Tensor]]]
#: ``ints``: every term of a token's sum is a multiple of 16, and BF16 holds the multiples of 16 up to 256 * 16.
_UNIT, _UNITS = 16, 256

#: Model -> projection -> exact factor. In k3, SiTU's caps show (|g| above 2 and |u| above 25 are usual), and a
#: token's sum has a mean square near the norm's eps, so that a wrong eps or a wrong factor shows behind the norm.
_FACTORS: dict[str, dict[str, float]] = {"moe": {}, "k3": {"gate": 2.0, "up": 16.0, "down": 2.0**-12}}


@dataclass(frozen=True)
class Batch:
    """What one rank gives to one forward pass.

    Attributes:
        hidden: ``[S, H]`` bf16; padding tokens are zero.
        topk_ids: ``[S, K]`` int32.
        topk_weights: ``[S, K]`` float32; zero for padding tokens.
        tokens: how many of the S are real; the padding tokens come after them.
    """

    hidden: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    tokens: int


def batch(case: Case, rank: int, tokens: int | None = None, device: torch.device = CPU) -> Batch:
    """The tokens of one rank; as many as the case says, unless ``tokens`` says otherwise.

    Args:
        case, rank: whose.
        tokens: how many are real.
        device: where the tokens are made and live; they are the same on every device.
    """
    real = case.token_count(rank) if tokens is None else tokens
    ids = routing.topk_ids(case, rank).to(device)
    with device:
        hidden = _HIDDEN[case.fill.name](_token_hash("hidden", case, rank, case.H))
        weights = _ROUTE_WEIGHTS[case.fill.name](case, rank)
    hidden[real:] = 0
    weights[real:] = 0
    return Batch(hidden.to(torch.bfloat16), ids, weights, real)


def expert_weights(case: Case, rank: int, layer: int = 0, device: torch.device = CPU) -> dict[str, Tensor]:
    """Weights of the experts that ``rank`` owns: fresh bf16 tensors, made on a device, the same on each.

    Returns:
        ``gate`` and ``up`` of ``[E/R, I, H]``, ``down`` of ``[E/R, H, I]``.
    """
    entries = min(8, 32 // case.K) if case.fill.name == "ints" else 0
    args = (case.fill.name, case.seed, layer, case.experts_per_rank, case.H, case.I, entries)
    factors = _FACTORS[case.model.name]
    with device:
        weights = _expert_weights(rank, *args, device)
    return {name: tensor * factors.get(name, 1) for name, tensor in weights.items()}


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
    device: torch.device,  # where the caller makes tensors: part of the cache's key only
) -> dict[str, Tensor]:
    expert = torch.arange(per_rank)[:, None] + rank * per_rank
    if fill == "ints":
        weights = _ints_weights(expert, seed, layer, H, I, entries)
        # The largest row of down, times the largest g, times as many experts as a token may have: none may round.
        total = weights["down"].abs().long().sum(-1).max().item() * 128 * (32 // entries if entries > 1 else 32)
        assert total <= _UNIT * _UNITS, f"ints fill: sums reach {total}, BF16 holds them exactly up to 4096"
        return weights
    if fill == "scales":
        return scales.weights(expert, seed, layer, H, I)
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
    column = below(hashed("down/column", seed, layer, *index), I)
    sign = _sign(hashed("down/sign", seed, layer, *index))
    for place in range(entries):  # one column may be hit twice: the last one counts, on every device
        down.scatter_(2, column[..., place : place + 1], sign[..., place : place + 1])
    return {"gate": gate.bfloat16(), "up": up.bfloat16(), "down": down.bfloat16()}


def _sign(bits: Tensor) -> Tensor:
    return below(bits, 2).float() * 2 - 1


def _token_hash(name: str, case: Case, rank: int, columns: int) -> Tensor:
    return hashed(name, case.seed, rank, torch.arange(case.S)[:, None], torch.arange(columns))


def _ints_hidden(noise: Tensor) -> Tensor:
    hidden = below(noise, 3).float() - 1
    hidden[:, 0] = 1.0  # the gate's 96 meets it, so that g is large enough for silu(g) = g
    return hidden


def _scaled_hidden(noise: Tensor) -> Tensor:
    return scales.hidden(normal(noise))


def _ints_route_weights(case: Case, rank: int) -> Tensor:
    return below(_token_hash("route", case, rank, case.K), 2).float() / 2 + 0.5


def _real_route_weights(case: Case, rank: int) -> Tensor:
    weights = unit(_token_hash("route", case, rank, case.K)).float()
    return weights / weights.sum(dim=1, keepdim=True)


def shifted(case: Case, rank: int, by: int = 1) -> Batch:
    """Other tokens with another routing: ids, and hidden columns but the first, are ``by`` places further.

    Route weights are those of the real token ``by`` places before, with the routes in reverse order.
    """
    tokens = batch(case, rank)
    ids = ((tokens.topk_ids + by) % case.E).to(torch.int32)
    hidden = torch.cat([tokens.hidden[:, :1], tokens.hidden[:, 1:].roll(by, dims=1)], dim=1)  # see ``ints``
    weights = tokens.topk_weights.flip(1)
    weights[: tokens.tokens] = weights[: tokens.tokens].roll(by, 0)
    return Batch(hidden, ids, weights, tokens.tokens)


def odd_ids(case: Case, rank: int) -> Batch:
    """The case's tokens with invalid routes (-1, as engines mark skipped ones) and repeated experts among them.

    Of each four tokens, one has an invalid first route, one an invalid last route, one only invalid routes, and
    one takes its first expert for every route.
    """
    tokens = batch(case, rank)
    kind = (torch.arange(case.S) + rank) % 4
    ids = tokens.topk_ids.clone()
    ids[kind == 0, 0] = -1
    ids[kind == 1, -1] = -1
    ids[kind == 2] = -1
    ids[kind == 3] = ids[kind == 3, :1]
    return replace(tokens, topk_ids=ids)


def random_bits(case: Case, rank: int) -> Batch:
    """Tokens and route weights of random bit patterns: NaN payloads, infinities, -0.0 and denormals among them."""
    tokens = batch(case, rank)
    # -0.0, a quiet NaN and two signalling ones with payloads, both infinities, the smallest denormal.
    odd = torch.tensor([-0x8000, 0x7FC1, 0x7F81, -0x7F, 0x7F80, -0x80, 1], dtype=torch.int16)
    noise = _token_hash("bits", case, rank, case.H)
    hidden = torch.where(below(noise, 4) == 0, odd[below(noise >> 8, len(odd))], noise.to(torch.int16))
    weights = _token_hash("weight bits", case, rank, case.K).to(torch.int32)
    return Batch(hidden.view(torch.bfloat16), tokens.topk_ids, weights.view(torch.float32), tokens.tokens)


def compute_rows(case: Case, rank: int, step: int, count: int) -> tuple[Tensor, Tensor]:
    """Rows for experts that are tried alone, in the values of the fill.

    Args:
        case: its fill, seed and H.
        rank: whose.
        step: number of the step; each has rows of its own.
        count: how many.

    Returns:
        bf16 ``[count, H]`` and route weights float32 ``[count]``.
    """
    place = torch.arange(count)[:, None]
    rows = _HIDDEN[case.fill.name](hashed(f"compute {step}", case.seed, rank, place, torch.arange(case.H)))
    noise = hashed(f"compute route {step}", case.seed, rank, torch.arange(count))
    exact = case.fill.name == "ints"
    return rows.to(torch.bfloat16), below(noise, 2).float() / 2 + 0.5 if exact else unit(noise).float()


def injected_rows(case: Case, rank: int, num_rows: int) -> Tensor:
    """Rows for a stage that is tried alone: bf16 ``[num_rows, H]``, in the values of the fill."""
    noise = hashed("injected", case.seed, rank, torch.arange(num_rows)[:, None], torch.arange(case.H))
    return _INJECTED[case.fill.name](noise).to(torch.bfloat16)


def projection_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Shape of one expert's matrices."""
    return dict(matrices(case.H, case.I))


def format_of(case: Case) -> WeightFormat:
    """The format that a case stores its weights in."""
    return FORMATS[case.format.name]


def stored(case: Case, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights in the case's format, by name.

    Args:
        case: whose format and fill.
        weights: projection -> bf16 ``[experts, rows, columns]``.

    Raises:
        CaseError: if the fill promises exact sums and the format cannot hold a weight exactly.
    """
    form = format_of(case)
    whole = form.store(weights)
    if case.fill.name == "ints":
        values = form.values([whole[name] for name in form.names], torch.bfloat16)
        for name, got in zip(PROJECTIONS, values, strict=True):
            if not torch.equal(got, weights[name]):
                raise CaseError(
                    f"{case}: {form.name} does not hold a {name} weight of fill:ints exactly; use fill:real"
                )
    return whole


def packed_weights(case: Case) -> EachExpert:
    """uint8 weights and scales of random bytes.

    Two 4-bit values a byte and one scale byte per 32 values, at sizes that hardware accepts: at least 128 bytes
    a row and 16384 scale bytes an expert.
    """
    rows, columns = max(case.I, 128), max(case.H // 2, 128)
    shapes = dict.fromkeys(PROJECTIONS, (rows, columns)) | {f"{name}{SCALE}": (128, 128) for name in PROJECTIONS}
    return {name: (shape, partial(_packed, name, case.seed, shape)) for name, shape in shapes.items()}


def _packed(name: str, seed: int, shape: tuple[int, int], expert: int) -> Tensor:
    noise = hashed(f"packed {name}", seed, expert, torch.arange(shape[0])[:, None], torch.arange(shape[1]))
    return below(noise, 256).to(torch.uint8)


def gradients(case: Case, rank: int, name: str, ones: bool) -> tuple[Tensor, Tensor]:
    """float32 gradients of the owned experts ``[E/R, ...]`` and of this rank's slots ``[slots, ...]``.

    Values of +-2**30, and of 1 to 2 with all 24 bits in use, so that the order of the sum and a narrower dtype on
    the way show; or all ones, to count.
    """
    layout = Layout.of(case)
    shape = projection_shapes(case)[name]
    sizes = layout.experts_per_rank, layout.num_slots
    if ones:
        return torch.ones(sizes[0], *shape), torch.ones(sizes[1], *shape)
    rows, columns = torch.arange(shape[0])[:, None], torch.arange(shape[1])
    local, slots = (
        _fractions(f"{kind} {name}", case.seed, rank, torch.arange(size)[:, None, None], rows, columns)
        for kind, size in zip(("local", "slot"), sizes, strict=True)
    )
    return local, slots


def _fractions(of: str, seed: int, *index: int | Tensor) -> Tensor:
    large, fraction = _cancel(hashed(f"grad {of}", seed, *index)), hashed(f"grad fraction of {of}", seed, *index)
    return torch.where(large.abs() > 3, large, 1 + below(fraction, 2**23).float() / 2**23)


def _cancel(noise: Tensor) -> Tensor:
    # Float32 has 24 bits: beside 2**30 a 1 or a 3 is lost; it stays where the large ones have cancelled before.
    return torch.tensor([2.0**30, -(2.0**30), 1.0, 3.0])[below(noise, 4)]


def _binade(noise: Tensor) -> Tensor:
    return (1 + below(noise, 128).float() / 128) * _sign(noise >> 16)


_HIDDEN = {
    "ints": _ints_hidden,
    "real": normal,
    "ulp": _binade,
    "cancel": normal,
    "scales": _scaled_hidden,
}
_ROUTE_WEIGHTS = {
    "ints": _ints_route_weights,
    "real": _real_route_weights,
    "ulp": _real_route_weights,
    "cancel": _real_route_weights,
    "scales": _real_route_weights,
}
_INJECTED: dict[str, Callable[[Tensor], Tensor]] = {
    "ints": lambda noise: below(noise, 17).float() - 8,
    "real": normal,
    "ulp": _binade,
    "cancel": _cancel,
    "scales": normal,
}
