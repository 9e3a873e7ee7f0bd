"""Which words has the case language? Each with the field that it fills, its arguments and what it means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moonep_validate.formats.stored import FORMATS
from moonep_validate.formats.weight_format import WeightFormat
from moonep_validate.scenarios import SCENARIOS


@dataclass(frozen=True)
class Word:
    """One name of the case language: the field it fills, its arguments and what it means."""

    field: str
    usage: str
    summary: str
    args: tuple[Callable[[str], object], ...] | None = ()  # None: any number of integers


_WORDS = {
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
    "sampled": Word(
        "routing", "sampled:LAYER,CALL", "what a served engine gave a MoE layer; `check` judges it", (int, int)
    ),
    "ints": Word("fill", "fill:ints", "every sum is exact, so each wrong row is a bit difference"),
    "real": Word("fill", "fill:real", "normal-like values, judged by derived bounds"),
    "ulp": Word("fill", "fill:ulp", "random mantissas in one binade, so that rounding points show"),
    "cancel": Word("fill", "fill:cancel", "+-2**30 and 1, so that the order of sums shows; for combine_only"),
    "scales": Word("fill", "fill:scales", "weights and tokens over all of BF16's range, their products near 1"),
    "moe": Word("model", "moe", "routed experts with SiLU-gated FFNs, no router and no shared expert"),
    "k3": Word("model", "k3", "moe inside Kimi-K3's layer: router, latent projections, norm, SiTU, shared expert"),
    **{one.name: Word("format", one.name, one.summary) for one in FORMATS.values()},
}
_WITNESSES = {
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
    "wide_ids": Word("witness", "@wide_ids", "a token goes to an expert whose id does not fit 8 bits"),
    "wide_rows": Word("witness", "@wide_rows", "a token has a row whose number does not fit 16 bits"),
    "donor_receiver": Word("witness", "@donor_receiver", "a rank gives rows away and receives others"),
}

#: All words; those of scenarios come from their declarations.
VOCABULARY: dict[str, Word] = {
    **_WORDS,
    **{name: Word("scenario", s.usage, s.sentence, tuple(s.args.values())) for name, s in SCENARIOS.items()},
    **_WITNESSES,
}


def add_format(one: WeightFormat) -> None:
    """Make a format of your own a word of cases, as a file of ``formats/stored`` does for those of the suite."""
    FORMATS[one.name] = one
    VOCABULARY[one.name] = Word("format", one.name, one.summary)
