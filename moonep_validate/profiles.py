"""Which cases run by default? Named lists of case lines; adding a case is adding a line."""

from __future__ import annotations

from moonep_validate.case import Case, CaseError

_DEFAULT = """
genB+R4+E8+K2+S9+hot:5+@slot_used
genB+R4+E8+K2+S9+pad4+fill:real+hot:5+@slot_used
genB+R4+E16+K4+S17+@duplicate+@padding
genB+R4+E16+K4+S17+fill:real+@duplicate
genB+R4+E16+K4+S17+pad1+zipf:1.0+@slot_used
genB+R4+E16+K4+S17+zipf:3.0+@donor_receiver+@empty_expert
genB+R4+E16+K4+S17+zipf:2.0+fill:real+@slot_used
genB+R4+E16+K4+S17+all_remote+@duplicate
genB+R4+E16+K4+S17+pad8+all_remote+fill:real+@duplicate
genB+R4+E12+K8+S7+pad3+@triple
genB+R4+E12+K8+S7+fill:real+@triple
genB+R4+E12+K3+S11+pad3+hot:0+@slot_used
genB+R4+E12+K3+S11+tokens:11,0,5,1+@empty_rank+@two_slots
genB+R4+E12+K3+S11+tokens:11,0,5,1+zipf:1.0+fill:real+@empty_rank
genB+R4+E32+K1+S13+@empty_expert
genB+R4+E32+K6+S5+pad128+zipf:1.5+@slot_used
genB+R4+E8+K2+S2+pad2+table:1,1,0,0,0,3,3,3,2,2,0,1,0,0,3,0+@donor_receiver+@duplicate+@two_slots
genB+R4+E8+K2+S3+pad4+table:0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0+@slot_used+@duplicate
genB+R4+E16+K4+S17+two_poisons+@padding
genB+R4+E16+K4+S17+zipf:2.0+fill:real+two_poisons+@slot_used
genB+R4+E8+K16+S6+zipf:1.0+@triple
genB+R4+E16+K4+S17+H384+I256+zipf:1.0+fill:real+@slot_used
genB+R1+E4+K2+S9+pad4+@duplicate
genB+R2+E6+K2+S9+pad4+zipf:1.0+@slot_used
genB+R3+E12+K4+S8+pad4+zipf:1.0+fill:real+@slot_used
genB+R8+E64+K8+S16+zipf:1.2+@slot_used
genB+R8+E64+K8+S16+fill:real+hot:9+@slot_used
"""

_SMOKE = """
genB+R4+E8+K2+S9+hot:5+@slot_used
genB+R4+E16+K4+S17+zipf:2.0+fill:real+@slot_used
"""


def profile(name: str) -> list[Case]:
    """The cases of a profile.

    Raises:
        CaseError: for an unknown name.
    """
    if name not in PROFILES:
        raise CaseError(f"unknown profile {name!r}; known: {', '.join(PROFILES)}")
    return [Case.parse(line) for line in PROFILES[name].split()]


PROFILES = {"default": _DEFAULT, "smoke": _SMOKE}
