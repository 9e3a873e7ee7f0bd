"""What runs? A case is one line of text with one spelling, and this module is its grammar.

The single letters mirror the MoonEP contract and are used with this meaning everywhere:

==== ==========================================================================
R    ranks of the expert-parallel (EP) group
E    experts of the whole EP group; rank ``r`` owns ``E/R`` of them, contiguously
K    routed experts per token (top-k)
S    tokens that each rank passes to every dispatch
H    hidden size of a dispatched row; with ``k3`` the latent width, and a token of the model is wider
I    intermediate size of an expert
==== ==========================================================================

A case is a ``+``-separated list, e.g. ``genB+R4+E8+K2+S9+hot:5+@slot_used``. Defaults are omitted when a case
is printed, so a case has exactly one spelling: as CLI argument, as pytest id and as file name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from moonep_validate.errors import CaseError as CaseError

MAX_TOP_K = 32
MAX_RANKS = 128
MAX_ROWS = 2**24 - 1


@dataclass(frozen=True, order=True)
class Spec:
    """``name:arg,arg``: the one grammar for routing, fill, model, format, scenario and fault ids."""

    name: str
    args: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name + (":" + ",".join(self.args) if self.args else "")

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Split ``name:arg,arg``; the name and the arguments are not checked here."""
        name, colon, args = text.partition(":")
        if not name or (colon and not args):
            raise CaseError(f"{text!r} is not a name or name:arg,arg")
        return cls(name, tuple(args.split(",")) if colon else ())


@dataclass(frozen=True)
class Word:
    """One name of the case language: the field it fills, its arguments and what it means."""

    field: str
    usage: str
    summary: str
    args: tuple[Callable[[str], Any], ...] | None = ()  # None: any number of integers


VOCABULARY: dict[str, Word] = {
    "uniform": Word("routing", "uniform", "K distinct experts per token, all equally likely"),
    "hot": Word("routing", "hot:EXPERT", "each token has one route to EXPERT, the others are uniform", (int,)),
    "zipf": Word("routing", "zipf:EXPONENT", "expert popularity falls as rank**-EXPONENT", (float,)),
    "all_remote": Word("routing", "all_remote", "no token is routed to an expert of its own rank"),
    "table": Word("routing", "table:ID,ID,...", "R*S*K expert ids, in order of rank, token, k", None),
    "balanced": Word("routing", "balanced", "the experts of each rank get exactly S*K routes: nothing moves"),
    "hot_rank": Word("routing", "hot_rank:RANK", "all routes go to experts of RANK, equally likely", (int,)),
    "all_local": Word("routing", "all_local", "each token is routed to experts of its own rank only"),
    "round_robin": Word("routing", "round_robin", "the routes go to experts 0, 1, 2, ... in turn"),
    "lognormal": Word("routing", "lognormal:SIGMA", "expert popularity is exp(SIGMA * normal)", (float,)),
    "maxvio": Word(
        "routing", "maxvio:VALUE", "log-normal; largest expert load / mean load - 1 is VALUE", (float,)
    ),
    "per_rank": Word("routing", "per_rank", "log-normal with other popular experts on each rank"),
    "empty_experts": Word(
        "routing", "empty_experts:COUNT", "uniform, but COUNT experts get no real token", (int,)
    ),
    "repeated": Word("routing", "repeated", "all K routes of a token go to one expert"),
    "ties": Word("routing", "ties", "the loads of all experts are equal, or differ by one where they cannot be"),
    "chain": Word("routing", "chain", "one rank starves: donors give more than they can spare and receive too"),
    "overflow": Word(
        "routing", "overflow", "as chain, and a rank needs several remote experts (slots1 overflows)"
    ),
    "ints": Word("fill", "fill:ints", "every sum is exact, so each wrong row is a bit difference"),
    "real": Word("fill", "fill:real", "normal-like values, judged by derived bounds"),
    "ulp": Word("fill", "fill:ulp", "random mantissas in one binade, so that rounding points show"),
    "cancel": Word("fill", "fill:cancel", "+-2**30 and 1, so that the order of sums shows; for combine_only"),
    "moe": Word("model", "moe", "routed experts with SiLU-gated FFNs, no router and no shared expert"),
    "k3": Word("model", "k3", "moe inside Kimi-K3's layer: router, latent projections, norm, SiTU, shared expert"),
    "bf16": Word("format", "bf16", "BF16 expert weights"),
    "mxfp4": Word(
        "format", "mxfp4", "uint8 expert weights, two E2M1 codes a byte, with an E8M0 byte per 32 values"
    ),
    "base": Word("scenario", "base", "one forward pass, all undefined memory poisoned with NaN"),
    "two_poisons": Word("scenario", "two_poisons", "two passes with different poisons must agree bit for bit"),
    "marked_slots": Word("scenario", "marked_slots", "slots change sign after prefetch; their rows must follow"),
    "variants": Word("scenario", "variants", "repeat, async, zero-copy, replays: each equals the base step"),
    "nemesis": Word(
        "scenario", "nemesis:SEED", "batches in flight on two Buffers, launched and delayed as SEED says", (int,)
    ),
    "graph": Word("scenario", "graph", "CUDA graphs: captured replays give what eager calls give"),
    "combine_only": Word("scenario", "combine_only", "combine of injected rows, on copies and on a view"),
    "dispatch_only": Word("scenario", "dispatch_only", "dispatch of random bit patterns, NaN payloads among them"),
    "packed": Word("scenario", "packed", "prefetch of uint8 weights with scales"),
    "pools": Word(
        "scenario", "pools", "as packed: gaps behind slots, own experts first (genA), new tensors later"
    ),
    "grouped": Word(
        "scenario", "grouped", "experts alone: groups empty, of one row, at the padding and beside it"
    ),
    "grads": Word("scenario", "grads", "gradients of redundant experts come home"),
    "life": Word("scenario", "life", "recreate, two Buffers, two layers on the same slots, destroy"),
    "refusals": Word("scenario", "refusals", "bad input that every build must refuse"),
    "destructive": Word("scenario", "destructive", "bad input on which upstream is undefined; --destructive"),
    "layers": Word("scenario", "layers", "engines: two layers in turn on the same slots"),
    "token_counts": Word("scenario", "token_counts", "engines: other token counts on each rank in each step"),
    "invalid_ids": Word("scenario", "invalid_ids", "engines: expert ids -1, and repeated ones"),
    "abort": Word("scenario", "abort", "engines: an exception inside the layer, then a healthy step"),
    "reload": Word("scenario", "reload", "engines: other weights are loaded into a living layer"),
    "answers": Word("scenario", "answers", "engines: configurations that must be refused, or must not"),
    "metamorphic": Word("scenario", "metamorphic", "tokens moved, batch split, experts renumbered: same outputs"),
    "independent": Word("scenario", "independent", "other tokens change, a token's output keeps its bits"),
    "linear": Word("scenario", "linear", "contributions of experts and of routes add up"),
    "slot_counts": Word("scenario", "slot_counts", "generation A: another slot count gives the same outputs"),
    "slot_used": Word("witness", "@slot_used", "a redundant expert slot holds rows"),
    "two_slots": Word("witness", "@two_slots", "one rank uses two slots"),
    "duplicate": Word("witness", "@duplicate", "a token has two rows on one rank"),
    "triple": Word("witness", "@triple", "a token has three rows on one rank"),
    "padding": Word("witness", "@padding", "a group ends in padding rows"),
    "empty_expert": Word("witness", "@empty_expert", "an expert receives no token"),
    "empty_rank": Word("witness", "@empty_rank", "a rank contributes no real token"),
    "remote_read": Word("witness", "@remote_read", "generation A: an expert without slot is read remotely"),
    "empty_plan": Word("witness", "@empty_plan", "no expert moves, and no slot is used"),
    "full_plan": Word("witness", "@full_plan", "a rank uses every slot it has"),
    "buffer_full": Word("witness", "@buffer_full", "a rank's last group ends at the end of its buffer"),
    "odd_bits": Word("witness", "@odd_bits", "a NaN payload and a -0.0 travel"),
    "order_visible": Word("witness", "@order_visible", "another order of summation gives another combine"),
    "rounding_visible": Word(
        "witness", "@rounding_visible", "leaving out the rounding per rank gives another combine"
    ),
    "slots_everywhere": Word("witness", "@slots_everywhere", "each rank uses a slot in some step"),
    "donor_receiver": Word("witness", "@donor_receiver", "a rank gives rows away and receives others"),
}

_NUMBERS = ("R", "E", "K", "S", "H", "I", "slots", "pad", "seed")
_REQUIRED = ("generation", "R", "E", "K", "S")
_SPECS = ("routing", "fill", "model", "format", "scenario")


@dataclass(frozen=True)
class Case:
    """One problem for one subject: *what* runs, never where or on whom.

    Attributes:
        generation: API generation of MoonEP, ``"A"`` or ``"B"`` (docs/contract.md, Generations).
        R, E, K, S, H, I: sizes, see the module docstring.
        slots: redundant expert slots per rank, generation A only; None means ``E/R``.
        pad: ``token_padding``, the alignment of a group in rows.
        tokens: real tokens per rank, each at most S; the rest of S are padding tokens of route weight 0.
            None means S everywhere.
        routing, fill, model, format, scenario: see ``VOCABULARY``.
        seed: varies all data of the case.
        witnesses: events that must occur in the trace, or the verdict is vacuous.

    Raises:
        CaseError: if a value is outside its limit (contract section Limits).
    """

    generation: str
    R: int
    E: int
    K: int
    S: int
    H: int = 128
    I: int = 128
    slots: int | None = None
    pad: int = 16
    tokens: tuple[int, ...] | None = None
    routing: Spec = Spec("uniform")
    fill: Spec = Spec("ints")
    model: Spec = Spec("moe")
    format: Spec = Spec("bf16")
    scenario: Spec = Spec("base")
    seed: int = 0
    witnesses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _set = object.__setattr__
        for name in _SPECS:
            _set(self, name, _normalised(getattr(self, name), name))
        _set(self, "witnesses", tuple(sorted({_normalised(Spec(w), "witness").name for w in self.witnesses})))
        if self.tokens == (self.S,) * self.R:
            _set(self, "tokens", None)
        if self.slots is not None and self.slots == self.E // max(self.R, 1):
            _set(self, "slots", None)
        check_geometry(self.generation, self.R, self.E, self.K, self.S, self.pad, self.slots)
        _check_rest(self)

    @property
    def experts_per_rank(self) -> int:
        """``E/R``."""
        return self.E // self.R

    @property
    def portable(self) -> bool:
        """Whether real hardware accepts the geometry (docs/contract.md, Limits)."""
        planned = self.R % 2 == 0 or self.experts_per_rank % 4 == 0
        if self.format.name == "mxfp4":  # packed rows count in bytes, and scales in 16384 bytes an expert
            return self.H % 256 == 0 and self.I % 256 == 0 and self.H * self.I // 32 % 16384 == 0 and planned
        return self.H % 128 == 0 and self.I % 128 == 0 and planned

    def token_count(self, rank: int) -> int:
        """Real tokens of ``rank``; tokens from this index on are padding."""
        return self.S if self.tokens is None else self.tokens[rank]

    def but(self, **changes: Any) -> Case:
        """The same case with some fields changed."""
        return replace(self, **changes)

    def __str__(self) -> str:
        parts = [f"gen{self.generation}"]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name in _REQUIRED or value != field.default:
                parts += _printed(field.name, value)
        return "+".join(parts)

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read a case line.

        Raises:
            CaseError: for a typo (the nearest word is suggested), a repeated or missing part, a bad value.
        """
        values: dict[str, Any] = {}
        for token in text.strip().split("+"):
            name, value = _read(token)
            if name == "witnesses":
                values[name] = (*values.get(name, ()), value)
            elif name in values:
                raise CaseError(f"{token!r} sets {name} a second time in {text!r}; keep one")
            else:
                values[name] = value
        missing = [name for name in _REQUIRED if name not in values]
        if missing:
            raise CaseError(f"case {text!r} lacks {', '.join(missing)}; a case starts like 'genB+R4+E8+K2+S9'")
        return cls(**values)


def check_geometry(generation: str, R: int, E: int, K: int, S: int, pad: int, slots: int | None) -> None:
    """Refuse what no MoonEP build accepts (docs/contract.md, Limits).

    Raises:
        CaseError: naming the value, the limit and the fix.
    """
    _require(generation in ("A", "B"), f"generation {generation!r} is not A or B")
    _require(1 <= R <= MAX_RANKS, f"R={R} ranks: must be 1 to {MAX_RANKS}")
    _require(E >= 1, f"E={E} experts: must be at least 1")
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
    rows = buffer_rows(generation, R, E, K, S, pad)
    _require(rows <= MAX_ROWS, f"NvS is {rows} rows a rank, limit {MAX_ROWS}: lower S, K or pad")


def buffer_rows(generation: str, R: int, E: int, K: int, S: int, pad: int) -> int:
    """``NvS``, the rows of a rank's buffer: worst padding included, in B a multiple of ``pad``."""
    rows = S * K + (pad - 1) * 2 * (E // R)
    return rows if generation == "A" else -(-rows // pad) * pad


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CaseError(message)


def _check_rest(case: Case) -> None:
    """The limits that need the whole case: data sizes, token counts, routing arguments."""
    _require(case.H >= 8 and case.H % 8 == 0, f"H={case.H}: must be a multiple of 8 (16-byte rows), at least 8")
    _require(case.I >= 1, f"I={case.I}: must be at least 1")
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
    _require(
        case.fill.name != "cancel" or case.scenario.name == "combine_only",
        "fill:cancel is for injected rows and needs the scenario combine_only",
    )
    _require(
        case.scenario.name != "grads" or case.slots is None,
        f"grads with slots{case.slots}: training needs E/R={case.experts_per_rank} slots; leave slots out",
    )
    _check_format(case)
    _check_relations(case)
    _check_routing_argument(case)
    _check_routing_geometry(case)
    if case.model.name == "k3":
        _check_model(case)


def _check_format(case: Case) -> None:
    """What packed weights need."""
    if case.format.name != "mxfp4":
        return
    for name in ("H", "I"):
        size = getattr(case, name)
        _require(
            size % 32 == 0,
            f"{name}={size}: mxfp4 shares a scale among 32 values, so H and I must be multiples of 32; "
            f"the next larger {name} is {-(-size // 32) * 32}",
        )
    _require(case.scenario.name != "grads", "grads with mxfp4: packed weights have no gradients; leave mxfp4 out")


def _check_model(case: Case) -> None:
    """What the model ``k3`` can run: its router chooses K distinct experts for each of S tokens."""
    scenarios = ("base", "two_poisons", "marked_slots", "layers", "grouped")
    _require(
        case.scenario.name in scenarios,
        f"scenario {case.scenario}: model k3 runs {', '.join(scenarios)}; use one of these, or model moe",
    )
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


def _check_relations(case: Case) -> None:
    """What the scenarios need whose steps must agree without an oracle."""
    name = case.scenario.name
    if name in ("metamorphic", "linear", "slot_counts"):
        _require(
            case.fill.name == "ints",
            f"{name} needs fill:ints, not fill:{case.fill}: another plan sums and rounds in another order, "
            "so only exact sums must agree; with real values there is independent",
        )
    if name in ("metamorphic", "independent", "linear", "slot_counts"):
        _require(case.model.name == "moe", f"{name} needs the model moe, not {case.model}: routed experts alone")
    _require(name != "metamorphic" or case.S >= 2, "metamorphic needs S >= 2: one token has no other order")
    _require(name != "linear" or case.K >= 2, "linear needs K >= 2: it splits the routes of a token")
    _require(
        name != "slot_counts" or case.generation == "A",
        "slot_counts needs genA: generation B has E/R slots always",
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


def _normalised(spec: Spec, field: str) -> Spec:
    """The one spelling of a spec, e.g. ``zipf:2`` becomes ``zipf:2.0``."""
    word = VOCABULARY.get(spec.name)
    if word is None or word.field != field:
        known = [name for name, word in VOCABULARY.items() if word.field == field]
        raise CaseError(f"unknown {field} {spec.name!r}{_suggestion(spec.name, known)}")
    kinds: tuple[Callable[[str], Any], ...] = word.args or (int,) * len(spec.args) * (word.args is None)
    if len(kinds) != len(spec.args) or (word.args is None and not spec.args):
        raise CaseError(f"{str(spec)!r} has {len(spec.args)} arguments; usage: {word.usage}")
    try:
        return Spec(spec.name, tuple(repr(kind(arg)) for kind, arg in zip(kinds, spec.args, strict=True)))
    except ValueError:
        raise CaseError(f"{str(spec)!r} has an argument that is not a number; usage: {word.usage}") from None


def _printed(name: str, value: Any) -> list[str]:
    """The tokens that set one field."""
    if name == "tokens":
        return ["tokens:" + ",".join(map(str, value))]
    if name == "witnesses":
        return ["@" + witness for witness in value]
    if name == "fill":
        return [f"fill:{value}"]
    return [str(value) if name in _SPECS else f"{name}{value}"]


def _read(token: str) -> tuple[str, Any]:
    """One token as (field, value)."""
    if match := re.fullmatch(r"gen(\w+)", token):
        return "generation", match[1]
    if match := re.fullmatch(rf"({'|'.join(_NUMBERS)})(-?\d+)", token):
        return match[1], int(match[2])
    if token.startswith("@"):
        return "witnesses", token[1:]
    if token.startswith("tokens:"):
        try:
            return "tokens", tuple(int(count) for count in token[len("tokens:") :].split(","))
        except ValueError:
            raise CaseError(f"{token!r} is not tokens:COUNT,COUNT,... with one number a rank") from None
    if token.startswith("fill:"):
        return "fill", Spec.parse(token[len("fill:") :])
    return _read_spec(token)


def _read_spec(token: str) -> tuple[str, Spec]:
    spec = Spec.parse(token) if token else Spec("")
    word = VOCABULARY.get(spec.name)
    if word is not None and word.field in _SPECS:
        return word.field, spec
    usages = [word.usage for word in VOCABULARY.values()]
    numbers = [f"{name}NUMBER" for name in _NUMBERS]
    raise CaseError(
        f"unknown part {token!r} of a case{_suggestion(spec.name, [*usages, *numbers, 'tokens:COUNT,...'])}"
    )


def _suggestion(name: str, known: Sequence[str]) -> str:
    """``; did you mean 'zipf:EXPONENT'?`` or the list of what is known."""
    stems = {re.split(r"[:,]|NUMBER", usage)[0].lstrip("@"): usage for usage in known}
    near = difflib.get_close_matches(name, stems, n=1, cutoff=0.5)
    if not near:
        near = [stem for stem in stems if stem and re.fullmatch(rf"{stem}-?\d*", name, re.IGNORECASE)]
    return f"; did you mean {stems[near[0]]!r}?" if near else f"; known: {', '.join(known)}"
