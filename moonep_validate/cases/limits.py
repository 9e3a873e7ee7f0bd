"""Which cases can run? Each limit names the value, the limit and the fix (docs/contract.md, Limits)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moonep_validate.errors import CaseError
from moonep_validate.formats.stored import FORMATS
from moonep_validate.scenarios import SCENARIOS

if TYPE_CHECKING:
    from moonep_validate.cases.case import Case

#: MoonEP's: 5 bits for k, 7 for a rank and 24 for a row in upstream's encodings (docs/contract.md, Limits).
MAX_TOP_K = 32
MAX_RANKS = 128
MAX_ROWS = 2**24 - 1
#: Columns of one scale in the fill ``scales``, as in MXFP4.
_SCALED = 32
#: What nobody records: limits of this suite, so that a typo is said before it is allocated.
MAX_EXPERTS, MAX_WIDTH, MAX_ROUTES, MAX_BYTES = 2**16, 2**20, 2**27, 2**40


def check_geometry(generation: str, R: int, E: int, K: int, S: int, pad: int, slots: int | None) -> None:
    """Refuse what no MoonEP build accepts (docs/contract.md, Limits).

    Raises:
        CaseError: naming the value, the limit and the fix.
    """
    _require(generation in ("A", "B"), f"generation {generation!r} is not A or B")
    _require(1 <= R <= MAX_RANKS, f"R={R} ranks: must be 1 to {MAX_RANKS}")
    _require(1 <= E <= MAX_EXPERTS, f"E={E} experts: must be 1 to {MAX_EXPERTS}")
    _require(
        E % R == 0,
        f"E={E} is not divisible by R={R}: each rank owns E/R experts; the next larger E is {-(-E // R) * R}",
    )
    _require(1 <= K <= MAX_TOP_K, f"K={K} experts per token: must be 1 to {MAX_TOP_K} (MoonEP's encoding limit)")
    _require(S >= 1, f"S={S} tokens per rank: must be at least 1")
    _require(pad >= 1, f"pad={pad} (token padding): must be at least 1; 1 means no padding")
    _require(
        slots is None or generation == "A", f"slots={slots}: only generation A takes a slot count, B uses E/R"
    )
    _require(slots is None or slots >= 1, f"slots={slots}: must be at least 1, or left out for E/R={E // R}")
    _require(slots is None or slots <= MAX_EXPERTS, f"slots={slots}: must be at most {MAX_EXPERTS}")
    rows = buffer_rows(generation, R, E, K, S, pad)
    _require(rows <= MAX_ROWS, f"NvS is {rows} rows a rank, limit {MAX_ROWS}: lower S, K or pad")


def buffer_rows(generation: str, R: int, E: int, K: int, S: int, pad: int) -> int:
    """``NvS``, the rows of a rank's buffer: worst padding included, in B a multiple of ``pad``."""
    rows = S * K + (pad - 1) * 2 * (E // R)
    return rows if generation == "A" else -(-rows // pad) * pad


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CaseError(message)


def check_case(case: Case) -> None:
    """The limits that need the whole case: data sizes, token counts, routing arguments."""
    _require(case.H >= 8 and case.H % 8 == 0, f"H={case.H}: must be a multiple of 8 (16-byte rows), at least 8")
    _require(case.I >= 1, f"I={case.I}: must be at least 1")
    for name, width in (("H", case.H), ("I", case.I)):
        _require(width <= MAX_WIDTH, f"{name}={width}: must be at most {MAX_WIDTH}")
    _check_memory(case)
    if case.tokens is not None:
        _require(
            len(case.tokens) == case.R,
            f"tokens has {len(case.tokens)} values for R={case.R} ranks: give one a rank",
        )
        for rank, count in enumerate(case.tokens):
            _require(
                0 <= count <= case.S,
                f"tokens: rank {rank} has {count}, a rank dispatches 0 to S={case.S}; raise S or lower the count",
            )
    _check_scenario(case)
    _check_format(case)
    if case.fill.name == "scales":
        _check_scales(case)
    _check_routing_argument(case)
    _check_routing_geometry(case)
    if case.model.name == "k3":
        _check_model(case)


def _check_memory(case: Case) -> None:
    """What all ranks together would allocate, before anything is."""
    routes = case.R * case.S * case.K
    _require(routes <= MAX_ROUTES, f"R*S*K is {routes} routes, limit {MAX_ROUTES}: lower R, S or K")
    rows = case.R * buffer_rows(case.generation, case.R, case.E, case.K, case.S, case.pad)
    for what, size, fix in (
        ("the rows of all ranks", 2 * rows * case.H, "H, S, K or pad"),
        ("the weights of all experts", 6 * case.E * case.H * case.I, "E, H or I"),
    ):
        _require(size <= MAX_BYTES, f"{what} would have {size} bytes, limit {MAX_BYTES}: lower {fix}")


def _check_scenario(case: Case) -> None:
    """What the scenario declares that it needs."""
    name, declared = case.scenario.name, SCENARIOS[case.scenario.name]
    injecting = [other for other, one in SCENARIOS.items() if one.injects]
    _require(
        case.fill.name != "cancel" or declared.injects,
        f"fill:cancel is for injected rows and needs the scenario {' or '.join(injecting)}",
    )
    if "gradients" in declared.needs:
        slots = f"training needs E/R={case.experts_per_rank} slots; leave slots out"
        _require(case.slots is None, f"{name} with slots{case.slots}: {slots}")
        packed = f"packed weights have no gradients; leave {case.format} out"
        _require(FORMATS[case.format.name].scale is None, f"{name} with {case.format}: {packed}")
    for reason in (limit(case) for limit in declared.limits):
        _require(reason is None, f"{name} {reason}")
    model = case.model.name
    able = [other for other, one in SCENARIOS.items() if model in one.models]
    _require(
        model in declared.models,
        f"scenario {case.scenario}: model {model} runs {', '.join(able)}; use one of these, or model moe",
    )


def _check_format(case: Case) -> None:
    """What the format of the weights needs."""
    refusal = FORMATS[case.format.name].refusal(case.H, case.I)
    _require(refusal is None, str(refusal))


def _check_scales(case: Case) -> None:
    """What the fill ``scales`` needs: whole blocks, and tokens whose columns stay where they are."""
    for name, size in (("H", case.H), ("I", case.I)):
        larger = -(-size // _SCALED) * _SCALED
        _require(
            size % _SCALED == 0,
            f"{name}={size}: fill:scales gives each {_SCALED} columns a scale; the next larger {name} is {larger}",
        )
    able = ("base", "two_poisons", "marked_slots", "grouped")
    _require(
        case.scenario.name in able,
        f"scenario {case.scenario}: fill:scales runs {', '.join(able)}, in which a token's columns keep their "
        "places; use one of these, or fill:real",
    )


def _check_model(case: Case) -> None:
    """What the model ``k3`` can run: its router chooses K distinct experts for each of S tokens."""
    _require(case.fill.name == "real", f"fill:{case.fill}: model k3 needs fill:real; its sums are never exact")
    _require(case.tokens is None, "tokens: model k3 has S real tokens on every rank; leave tokens out")
    name, per_rank = case.routing.name, case.experts_per_rank
    _require(
        name not in ("repeated", "ties", "chain", "overflow"),
        f"routing {name}: model k3 needs K distinct experts a token, as a router chooses them; "
        "use another routing, e.g. uniform or zipf:1.0",
    )
    fewer = {"hot": case.E - 1, "hot_rank": per_rank, "all_local": per_rank, "all_remote": case.E - per_rank}
    among = fewer.get(name, case.E)
    among -= int(case.routing.args[0]) if name == "empty_experts" else 0
    _require(
        among >= case.K, f"K={case.K}: model k3 chooses K distinct experts of {among} ({name}); lower K or raise E"
    )
    if name == "table":
        _check_distinct(case.routing.args, case.K)


def _check_distinct(ids: Sequence[str], top_k: int) -> None:
    """Each token of a table has K distinct experts."""
    for first in range(0, len(ids), top_k):
        token = ids[first : first + top_k]
        _require(
            len(set(token)) == top_k,
            f"table: token {first // top_k} has ids {', '.join(token)}; model k3 needs K={top_k} distinct ones",
        )


def _check_routing_argument(case: Case) -> None:
    """The limits of the arguments of a routing."""
    name, args = case.routing.name, case.routing.args
    if name in ("zipf", "lognormal"):
        what = "exponent" if name == "zipf" else "sigma"
        _require(0 <= float(args[0]) <= 100, f"{name} {what} {args[0]}: must be 0 to 100")
    if name == "maxvio":
        limit = case.E * -(-case.K // case.E) / case.K - 1
        _require(
            0 <= float(args[0]) <= limit,
            f"maxvio {args[0]}: must be 0 to {limit:g}, where every token takes the same of E={case.E} experts; "
            "lower it or raise E/K",
        )
    if name == "hot":
        _check_ids([int(args[0])], case.E, "hot")
    if name == "hot_rank":
        _require(0 <= int(args[0]) < case.R, f"hot_rank: rank {args[0]} is outside 0..{case.R - 1}; raise R")
    if name == "empty_experts":
        _require(
            1 <= int(args[0]) < case.E,
            f"empty_experts: {args[0]} experts, must be 1 to E-1={case.E - 1}, so that one expert is left",
        )
    if name == "sampled":
        _require(min(map(int, args)) >= 0, f"sampled: layer {args[0]} and call {args[1]} count from 0")
    if name == "table":
        need = case.R * case.S * case.K
        _require(
            len(args) == need,
            f"table has {len(args)} ids, R*S*K = {case.R}*{case.S}*{case.K} = {need} are needed",
        )
        _check_ids([int(arg) for arg in args], case.E, "table")


def _check_routing_geometry(case: Case) -> None:
    """The sizes without which a routing cannot be what its name says."""
    name = case.routing.name
    if name == "all_remote":
        _require(case.R >= 2, "all_remote needs R >= 2: with one rank every expert is local")
    if name == "chain":
        _require(case.R >= 3, f"chain needs R >= 3, not R={case.R}: a donor, a receiver and a rank that is both")
        routes = max(map(case.token_count, range(case.R))) * case.K
        _require(routes >= 2, f"chain needs a rank with 2 real routes, not {routes}; raise S, K or tokens")
    if name == "overflow":
        per_rank, need = case.experts_per_rank, case.S * case.K
        _require(
            case.R >= 2 and per_rank >= 2, f"overflow needs R >= 2 and E/R >= 2, not R={case.R} and E/R={per_rank}"
        )
        busiest = -(-case.R * need // ((case.R - 1) * per_rank))
        _require(
            busiest < need,
            f"overflow: one expert has {busiest} rows, as many as the S*K={need} that a rank receives, "
            f"so one slot would do; raise E (now E/R={per_rank}), R or S",
        )


def _check_ids(ids: Sequence[int], num_experts: int, where: str) -> None:
    for position, expert in enumerate(ids):
        _require(
            0 <= expert < num_experts,
            f"{where}: expert id {expert} at position {position} is outside 0..{num_experts - 1} "
            f"(MoonEP has no sentinel id; give padding a legal id and weight 0)",
        )
