"""Which cases run by default? Named lists of case lines; adding a case is adding a line."""

from __future__ import annotations

from collections.abc import Sequence

from moonep_validate.cases.case import Case, CaseError

_DEFAULT = """
genB+R4+E8+K2+S9+hot:5+@slot_used
genB+R4+E8+K2+S9+pad4+fill:real+hot:5+@slot_used
genB+R4+E16+K4+S17+@duplicate+@padding
genB+R4+E16+K4+S17+fill:ulp+zipf:1.0+@duplicate
genB+R4+E16+K4+S17+pad1+zipf:1.0+@slot_used
genB+R4+E16+K4+S17+zipf:3.0+@donor_receiver+@empty_expert
genB+R4+E16+K4+S17+zipf:2.0+fill:real+@slot_used
genB+R4+E16+K4+S17+pad8+all_remote+fill:real+@duplicate
genB+R4+E12+K8+S7+pad3+@triple
genB+R4+E12+K3+S11+tokens:11,0,5,1+@empty_rank+@two_slots
genB+R4+E12+K3+S11+tokens:0,10,1,11+zipf:1.0+fill:real+@empty_rank
genB+R4+E32+K1+S13+@empty_expert
genB+R4+E32+K6+S5+pad128+zipf:1.5+@slot_used
genB+R4+E8+K2+S2+pad2+table:1,1,0,0,0,3,3,3,2,2,0,1,0,0,3,0+@donor_receiver+@duplicate+@two_slots
genB+R4+E8+K2+S3+pad4+table:0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0+@slot_used+@duplicate
genB+R4+E8+K16+S6+zipf:1.0+@triple
genB+R4+E16+K4+S17+H384+I256+zipf:1.0+fill:real+@slot_used
genB+R4+E16+K6+S17+balanced+@duplicate+@empty_plan
genB+R4+E16+K4+S17+hot_rank:2+@slot_used+@empty_expert
genB+R4+E16+K4+S17+all_local+@triple+@empty_plan
genB+R4+E12+K5+S7+round_robin+@slot_used+@donor_receiver
genB+R4+E16+K4+S17+lognormal:1.5+@slot_used+@donor_receiver
genB+R4+E16+K4+S17+maxvio:2.0+fill:real+@slot_used
genB+R4+E16+K4+S17+per_rank+@slot_used
genB+R4+E16+K4+S17+empty_experts:5+@empty_expert
genB+R4+E16+K4+S17+repeated+@slot_used+@triple
genB+R8+E32+K3+S9+ties+@slot_used
genB+R4+E16+K4+S17+chain+@donor_receiver+@two_slots
genB+R4+E16+K4+S17+overflow+@two_slots
genB+R4+E4+K2+S9+pad4+hot:1+@full_plan
genB+R4+E16+K4+S17+two_poisons+@padding
genB+R4+E16+K4+S17+zipf:2.0+fill:real+two_poisons+@slot_used
genB+R4+E16+K4+S17+hot:6+marked_slots+@slot_used
genB+R4+E16+K4+S17+zipf:1.0+variants+@slot_used+@duplicate
genB+R4+E16+K4+S9+fill:real+hot:3+variants+@slot_used
genB+R4+E16+K8+S17+fill:ints+combine_only+@triple
genB+R4+E16+K8+S17+fill:ulp+combine_only+@rounding_visible
genB+R4+E12+K8+S8+fill:cancel+combine_only+@order_visible
genB+R4+E16+K4+S17+zipf:1.0+dispatch_only+@odd_bits
genB+R4+E16+K4+S17+hot:2+packed+@slot_used
genB+R4+E8+K2+S9+hot:5+pools+@slot_used
genA+R4+E8+K2+S8+hot:5+pools+@slot_used
genA+R2+E6+K2+S7+H24+I8+hot:1+pools+@slot_used
genB+R4+E8+K2+S9+hot:5+mxfp4+@slot_used
genB+R4+E12+K3+S11+H256+I64+pad4+zipf:1.0+fill:real+mxfp4+@slot_used
genB+R4+E8+K2+S9+hot:6+mxfp4+marked_slots+@slot_used
genB+R4+E8+K2+S9+hot:5+mxfp4+life+@slot_used
genB+R2+E4+K2+S17+pad4+hot:1+fill:scales+mxfp4+@slot_used
genB+R1+E4+K2+S9+pad8+fill:scales+mxfp4+grouped
genB+R4+E8+K2+S9+hot:5+fill:real+fp8+@slot_used
genB+R2+E8+K2+S9+pad8+grouped
genB+R2+E6+K2+S9+H96+I160+pad4+fill:real+mxfp4+grouped
genB+R2+E4+K2+S9+pad4+fill:real+k3+grouped
genB+R4+E16+K4+S17+chain+grads+@two_slots
genB+R2+E8+K2+S9+H24+I8+hot:1+grads+@slot_used
genB+R4+E12+K4+S7+H24+I8+hot:5+replayed_plan+@slot_used+@duplicate
genB+R2+E8+K2+S9+H24+I8+hot:1+fill:real+replayed_plan+@slot_used
genB+R4+E8+K2+S9+hot:5+life+@slot_used
genB+R2+E8+K2+S9+hot:1+shapes+@slot_used
genB+R2+E6+K2+S7+pad4+hot:1+fill:real+shapes+@slot_used
genB+R4+E8+K2+S9+hot:1+groups+@slot_used
genB+R4+E12+K4+S7+pad4+hot:1+fill:real+groups+@slot_used
genB+R2+E4+K2+S3+hot:1+hundredth+@slot_used
genB+R2+E6+K2+S3+H24+I8+hot:1+fill:real+hundredth+@slot_used
genB+R4+E8+K2+S9+refusals
genB+R2+E6+K2+S7+H24+I8+refusals
genB+R4+E8+K2+S9+destructive
genB+R2+E6+K2+S9+H64+pad4+zipf:1.0+@slot_used
genB+R1+E4+K2+S9+pad4+@duplicate
genB+R3+E12+K4+S8+pad4+zipf:1.0+fill:real+@slot_used
genB+R2+E8+K32+S1+fill:real+@triple
genB+R8+E64+K8+S16+zipf:1.2+@slot_used
genB+R8+E64+K8+S16+fill:real+hot:9+@slot_used
genB+R8+E896+K16+S8+pad128+lognormal:1.0+combine_only+@slot_used
genB+R16+E896+K16+S8+pad128+lognormal:1.0+dispatch_only+@slot_used
genB+R4+E8+K2+S4+pad4+table:0,4,0,4,0,4,0,4,0,4,1,4,1,6,1,6,1,6,1,6,2,6,3,6,4,6,4,6,4,6,4,6+@buffer_full
genB+R4+E8+K2+S4+pad4+table:0,2,0,3,0,4,0,4,0,4,0,4,0,4,0,4,0,5,0,6,1,6,2,6,2,6,2,6,2,6,2,7+@padding
genB+R4+E8+K2+S4+pad4+table:0,3,0,3,0,4,0,4,0,4,1,5,1,5,1,5,1,6,2,6,2,6,2,6,2,7,2,7,3,7,3,7+@slot_used
genB+R4+E8+K2+S4+pad4+table:0,2,0,3,0,3,0,3,0,3,0,3,1,4,1,4,1,4,1,5,1,5,1,6,2,6,2,6,2,7,2,7+@slot_used
genB+R4+E8+K2+S4+pad4+table:0,4,0,4,0,4,0,4,0,5,1,5,1,5,1,5,1,6,1,6,2,6,2,6,2,7,3,7,3,7,3,7+@slot_used
genB+R4+E8+K2+S4+pad4+table:0,3,0,4,0,4,0,4,0,5,1,5,1,5,1,5,1,6,1,6,2,6,2,6,2,7,3,7,3,7,3,7+@slot_used
genA+R4+E8+K2+S4+slots1+pad4+table:0,4,0,4,0,4,0,4,0,4,1,4,1,4,1,4,1,6,2,6,2,6,2,6,2,6,2,6,2,6,3,6+@full_plan
genA+R4+E8+K2+S4+slots1+pad4+table:0,4,0,4,0,4,0,4,0,4,1,4,1,6,1,6,1,6,1,6,2,6,3,6,4,6,4,6,4,6,4,6+@remote_read
genA+R4+E16+K4+S17+slots1+overflow+@remote_read
genA+R4+E16+K4+S17+slots1+pad8+fill:real+chain+@remote_read
genA+R4+E16+K4+S17+slots2+overflow+variants+@remote_read
genB+R4+E8+K2+S9+hot:5+in_flight:0+@slot_used
genB+R2+E6+K4+S7+H24+I8+hot:1+in_flight:5+@slot_used
genA+R4+E8+K2+S9+hot:5+in_flight:1+@slot_used
genB+R3+E12+K4+S7+zipf:1.0+in_flight:4+@slot_used
genA+R2+E6+K4+S7+hot:1+fill:real+in_flight:3+@slot_used
genB+R4+E16+K4+S9+hot:6+metamorphic+@slot_used
genA+R4+E12+K3+S7+slots2+tokens:7,0,5,1+zipf:1.0+metamorphic+@empty_rank
genB+R4+E16+K4+S9+fill:real+zipf:1.0+independent+@duplicate
genB+R4+E16+K4+S9+hot:6+linear+@slot_used
genB+R2+E6+K2+S7+H24+I8+hot:1+linear+@slot_used
genA+R4+E16+K4+S17+slots2+overflow+slot_counts+@remote_read
genA+R8+E896+K16+S8+H24+I8+slots1+zipf:1.5+metamorphic+@remote_read+@slot_used
genB+R2+E12+K3+S7+H24+I20+pad5+zipf:1.0+fill:real+k3
genB+R4+E16+K4+S17+zipf:1.0+fill:real+k3+@slot_used
genB+R4+E12+K3+S7+H256+pad4+hot:1+fill:real+k3+@slot_used
genB+R4+E16+K4+S9+zipf:2.0+fill:real+k3+two_poisons+@padding
genB+R4+E16+K4+S9+hot:6+fill:real+k3+marked_slots+@slot_used
genB+R4+E16+K4+S9+hot:5+fill:real+k3+layers+@slot_used
genB+R8+E896+K16+S2+H32+I32+pad128+zipf:1.0+fill:real+k3+@slot_used
genB+R2+E2+K8+S8200+pad4+hot_rank:0+dispatch_only
genB+R2+E2+K8+S8200+H8+I8+pad4+hot_rank:0+@slot_used+@wide_rows
genB+R2+E2+K16+S4104+H8+I8+pad4+hot_rank:1+fill:real+@slot_used+@wide_rows
genB+R2+E384+K9+S31+H40+I24+hot_rank:1+@slot_used+@wide_ids
genB+R2+E896+K7+S17+H24+I8+hot_rank:0+@slot_used+@wide_ids
genB+R2+E64+K9+S65+pad128+zipf:1.0+dispatch_only
genB+R2+E256+K7+S127+zipf:1.0+dispatch_only
genB+R2+E384+K1+S128+dispatch_only+@wide_ids
genB+R2+E64+K16+S255+pad128+dispatch_only
genB+R4+E128+K7+S256+lognormal:1.0+dispatch_only
genB+R2+E256+K6+S257+pad64+dispatch_only
genB+R4+E256+K9+S63+zipf:1.0+dispatch_only
genB+R2+E384+K8+S129+lognormal:1.0+dispatch_only+@wide_ids
genB+R2+E896+K1+S65+pad128+dispatch_only+@wide_ids
genB+R4+E896+K9+S64+zipf:1.0+dispatch_only+@wide_ids
genB+R2+E64+K1+S129+@slot_used
genB+R2+E128+K16+S64+zipf:1.0
genB+R4+E128+K6+S63+lognormal:1.0+@slot_used
genB+R1+E896+K6+S65+lognormal:1.0+dispatch_only+@wide_ids
genB+R2+E256+K8+S33+H256
genB+R2+E64+K9+S17+fill:real+k3
genB+R4+E128+K1+S9+fill:real+k3
genB+R2+E384+K7+S9+H32+I32+fill:real+k3+@wide_ids
"""

# Elements, bytes and rows around 2**31: a minute each, and gigabytes; integers and digests are enough for them.
_SIZES = """
genB+R1+E32+K32+S5465+H6144+dispatch_only
genB+R1+E32+K32+S10925+H6144+dispatch_only
"""

# For the MoE layers of engines; vLLM fixes a padding of 128 and 4 slots, and both want two ranks at least.
_ENGINE = """
genA+R2+E8+K2+S16+pad128+@duplicate
genA+R2+E8+K2+S16+pad128+hot:5+@slot_used
genA+R2+E8+K2+S16+pad128+fill:real+hot:1+@slot_used
genA+R2+E8+K2+S16+pad128+tokens:0,3+hot:6+@empty_rank
genA+R2+E8+K2+S16+pad128+tokens:16,0+fill:real+@empty_rank
genA+R2+E8+K2+S16+pad128+tokens:5,11+fill:real+zipf:1.0
genA+R2+E8+K2+S16+pad128+repeated+@duplicate
genA+R2+E8+K2+S16+pad128+all_remote+fill:real+@empty_plan
genA+R2+E8+K2+S16+pad128+hot_rank:1+@slot_used
genA+R2+E8+K8+S16+pad128+@triple
genA+R2+E8+K1+S16+pad128+hot:7+@slot_used
genA+R2+E16+K4+S16+slots4+pad128+hot_rank:0+@slot_used
genA+R2+E16+K4+S16+slots4+pad128+fill:real+hot_rank:1+@full_plan
genA+R2+E32+K4+S32+slots4+pad128+hot_rank:0+@full_plan+@remote_read
genA+R2+E8+K2+S128+pad128+tokens:1,1+@padding
genA+R2+E8+K2+S128+pad128+tokens:37,5+fill:real+hot:0+@slot_used
genA+R2+E8+K2+S128+pad128+tokens:127,128+hot:3+@slot_used
genA+R2+E8+K3+S256+pad128+tokens:130,200+fill:real+zipf:1.5+@slot_used
genA+R2+E8+K3+S256+pad128+tokens:129,1+hot:2+@slot_used
genA+R2+E8+K2+S32+H384+I256+pad128+fill:real+hot:4+@slot_used
genA+R2+E8+K2+S32+H256+I384+pad128+hot:4+@slot_used
genA+R2+E8+K2+S16+pad128+hot:5+two_poisons+@slot_used
genA+R2+E8+K2+S16+pad128+fill:real+hot:2+two_poisons+@slot_used
genA+R2+E8+K2+S16+pad128+hot:5+marked_slots+@slot_used
genA+R2+E8+K2+S16+pad128+fill:real+hot:1+marked_slots+@slot_used
genA+R2+E8+K2+S16+pad128+hot:3+layers+@slots_everywhere
genA+R2+E8+K2+S16+pad128+fill:real+hot:3+layers+@slots_everywhere
genA+R2+E8+K2+S256+pad128+hot:5+token_counts+@slot_used
genA+R2+E8+K2+S256+pad128+fill:real+token_counts
genA+R2+E8+K3+S16+pad128+hot:5+invalid_ids+@duplicate
genA+R2+E8+K3+S16+pad128+fill:real+invalid_ids
genA+R2+E8+K2+S16+pad128+hot:5+abort+@slot_used
genA+R2+E8+K2+S16+pad128+hot:5+reload+@slot_used
genA+R2+E8+K2+S16+pad128+hot:5+lives+@slot_used
genA+R2+E8+K3+S16+pad128+fill:real+hot_rank:1+lives+@slot_used
genA+R2+E8+K2+S16+pad128+hot:5+hundredth+@slot_used
genA+R2+E8+K2+S16+pad128+configurations
genA+R2+E8+K2+S16+pad128+hot:5+metamorphic+@slot_used
genA+R2+E8+K2+S16+pad128+fill:real+hot:5+independent+@slot_used
genA+R2+E8+K2+S16+pad128+hot:5+linear+@slot_used
genA+R2+E256+K4+S16+slots4+pad128
genA+R2+E384+K9+S16+slots4+pad128+hot_rank:1+@full_plan+@wide_ids
genA+R2+E512+K1+S33+slots4+pad128+@wide_ids
genA+R2+E8+K8+S4096+pad128
genA+R2+E8+K8+S8200+pad128+@wide_rows
genA+R2+E8+K8+S8200+pad128+hot_rank:1+@slot_used+@wide_rows
"""

_SMOKE = """
genB+R4+E8+K2+S9+hot:5+@slot_used
genB+R4+E16+K4+S17+zipf:2.0+fill:real+@slot_used
"""


# One line for each Buffer key of the multi-GPU profile, since each builds and compiles anew; all are portable.
_MULTIGPU_KEYS = """
genA+R2+E16+K4+S64+slots4+pad128
genB+R2+E16+K4+S256+pad128
genA+R4+E32+K4+S64+slots4+pad128
genB+R4+E32+K8+S128+pad128
genA+R8+E64+K8+S64+slots4+pad128
genB+R8+E64+K8+S128+H256+pad128
"""
_MULTIGPU_WORDS = """
@duplicate seed1 seed2 hot:5+@slot_used hot:0+@slot_used hot_rank:1+@slot_used zipf:1.0 zipf:2.0+@slot_used
zipf:3.0 balanced+@empty_plan all_local+@empty_plan all_remote round_robin lognormal:1.5 per_rank
repeated+@triple ties empty_experts:5+@empty_expert hot_rank:0+@slot_used
"""
_MULTIGPU_ONCE = """
hot:5+variants+@slot_used zipf:1.0+variants fill:real+hot:3+variants hot:5+life+@slot_used fill:ulp+combine_only
fill:cancel+combine_only zipf:1.0+dispatch_only+@odd_bits hot:5+packed+@slot_used zipf:2.0+two_poisons+@padding
hot:6+marked_slots+@slot_used hot:6+metamorphic+@slot_used fill:real+zipf:1.0+independent hot:6+linear+@slot_used
hot:5+in_flight:0+@slot_used fill:real+hot:1+in_flight:1+@slot_used hot:3+in_flight:2+@slot_used
hot:5+graph+@slot_used
"""


def _multigpu() -> str:
    """Each routing with exact and with real data, and the other scenarios once, on every key."""
    words = [f"{fill}{word}" for fill in ("", "fill:real+") for word in _MULTIGPU_WORDS.split()]
    return "\n".join(
        f"{key}+{word}" for key in _MULTIGPU_KEYS.split() for word in (*words, *_MULTIGPU_ONCE.split())
    )


def profile(name: str) -> list[Case]:
    """The cases of a profile, each in the generation that its line names.

    Raises:
        CaseError: for an unknown name.
    """
    if name not in PROFILES:
        raise CaseError(f"unknown profile {name!r}; known: {', '.join(PROFILES)}")
    return [Case.parse(line) for line in PROFILES[name].split()]


def for_generations(cases: Sequence[Case], generations: Sequence[str]) -> list[Case]:
    """The cases in every generation of a subject whose limits they keep, e.g. only A has a slot count.

    Sorted by ranks and size, so that a world of processes changes its pool seldom.
    """
    several = {made for case in cases for generation in generations if (made := _in(case, generation))}
    return sorted(several, key=lambda case: (case.R, case.E, case.S, str(case)))


def _in(case: Case, generation: str) -> Case | None:
    try:
        return case.but(generation=generation)
    except CaseError:
        return None


PROFILES = {
    "default": _DEFAULT,
    "engine": _ENGINE,
    "smoke": _SMOKE,
    "multigpu": _multigpu(),
    "sizes": _SIZES,
}
