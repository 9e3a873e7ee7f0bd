"""Seeded faults: each is killed by the right check at its own stage; one that did nothing is no pass."""

from __future__ import annotations

import pytest

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.faults import FAULTS, Seams, parse_fault
from moonep_validate.faults.packed import _ELSEWHERE
from moonep_validate.formats.faults import BYTE_FAULTS
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.run import run_case
from moonep_validate.studies.shrink import shrink
from tests.self.conftest import CASE

PLAIN = "R4+E12+K3+S7+H24+I20+pad5+hot:1"
REAL = "R4+E12+K3+S7+H24+I20+pad5+zipf:1.0+fill:real"
CHAIN = "R4+E12+K8+S6+H24+I20+pad5+chain+fill:real"
VARIANTS = "R4+E12+K3+S7+H24+I20+pad5+hot:1+variants"
BITS = "R4+E12+K3+S7+H24+I20+pad5+hot:1+dispatch_only"
PACKED = "R4+E12+K3+S7+H24+I8+hot:1+packed"
POOLS = "R3+E12+K3+S7+H24+I8+hot:1+pools"
GRADS = "R4+E12+K3+S7+H24+I20+pad5+chain+grads"
LIFE = "R4+E12+K3+S7+H24+I20+pad5+hot:1+life"
BALANCED = "R4+E12+K3+S8+H24+I20+pad5+balanced"
REFUSALS = "R4+E12+K3+S7+H24+I20+pad5+refusals"
METAMORPHIC = "R4+E12+K3+S7+H24+I20+pad5+hot:1+metamorphic"
INDEPENDENT = "R4+E12+K3+S7+H24+I20+pad5+hot:1+fill:real+independent"
LINEAR = "R4+E12+K3+S7+H24+I20+pad5+hot:1+linear"
MXFP4 = "R4+E12+K3+S7+H32+I64+pad5+hot:1+mxfp4"
MXFP4_REAL = "R4+E12+K3+S7+H64+I96+pad5+hot:1+fill:real+mxfp4"
IN_FLIGHT = "R3+E6+K4+S7+H24+I8+in_flight:"
WIDE_IDS = "R2+E384+K9+S31+H40+I24+hot_rank:1"
WIDE_SLOTS = "R2+E896+K7+S17+H24+I8+hot_rank:0"
WIDE_ROWS = "R2+E2+K8+S8200+H8+I8+pad4+hot_rank:1"
SHAPES = "R2+E6+K2+S7+H24+I8+pad5+hot:1+shapes"
HUNDREDTH = "R2+E6+K2+S3+H24+I8+hot:1+hundredth"
GROUPS = "R4+E12+K3+S7+H24+I8+pad5+hot:1+groups"
K3 = "R4+E12+K3+S7+H24+I20+pad5+zipf:1.0+fill:real+k3"

#: fault -> (status, check that finds it first, case on which it does)
KILLED_BY = {
    "routes-swap-experts": ("failed", "L4", PLAIN),
    "row-used-twice": ("failed", "L2", PLAIN),
    "row-behind-last-group": ("failed", "L1", PLAIN),
    "cu-seqlens-are-starts": ("failed", "L4", PLAIN),
    "slot-table-differs": ("failed", "L4", PLAIN),
    "own-expert-in-slot": ("failed", "L8", PLAIN),
    "zero-fill-off-by-one": ("failed", "L7", PLAIN),
    "stats-count-own": ("failed", "L13", PLAIN),
    "duplicates-not-marked": ("failed", "L11", PLAIN),
    "dedup-list-reversed": ("failed", "L12", CHAIN),
    "dedup-list-short": ("failed", "L12", PLAIN),
    "plan-form": ("failed", "O1", PLAIN),
    "rows-form": ("failed", "O4", PLAIN),
    "experts-form": ("failed", "P3", PLAIN),
    "combine-form": ("failed", "O6", PLAIN),
    "gathered-weights-form": ("failed", "O6", PLAIN),
    "router-form": ("failed", "O9", K3),
    "latent-form": ("failed", "O10", K3),
    "norm-form": ("failed", "O11", K3),
    "shared-form": ("failed", "O12", K3),
    "output-form": ("failed", "O13", K3),
    "replay-changes-plan": ("failed", "U1", VARIANTS),
    "prefetch-changes-plan": ("failed", "U2", PLAIN),
    "combine-changes-plan": ("failed", "U3", PLAIN),
    "reduce-changes-plan": ("failed", "U4", GRADS),
    "row-of-another-token": ("failed", "D1", PLAIN),
    "payload-through-arithmetic": ("failed", "D1", BITS),
    "route-weights-shifted": ("failed", "D1", PLAIN),
    "pads-not-zeroed": ("failed", "D2", PLAIN),
    "pad-weights-not-zeroed": ("failed", "D2", PLAIN),
    "duplicates-not-copied": ("failed", "D1", PLAIN),
    "dispatch-changes-input": ("failed", "U1", PLAIN),
    "replay-returns-copy": ("failed", "A2", VARIANTS),
    "replay-of-latest-plan": ("failed", "D1", VARIANTS),
    "zero-copy-copies": ("failed", "A1", VARIANTS),
    "zero-copy-copies-weights": ("failed", "A1", VARIANTS),
    "async-returns-early": ("failed", "D1", VARIANTS),
    "rows-zero-without-weights": ("failed", "D1", VARIANTS),
    "slot-not-filled": ("failed", "W1", PLAIN),
    "slot-of-first-prefetch": ("failed", "W1", LIFE),
    "projection-not-moved": ("failed", "W1", PLAIN),
    "scales-left-behind": ("failed", "W1", PACKED),
    "gate-and-up-swapped": ("failed", "W1", PLAIN),
    "slots-in-other-order": ("failed", "W1", CHAIN),
    "slot-row-shifted": ("failed", "W1", PLAIN),
    "unused-slot-written": ("failed", "W2", PLAIN),
    "gap-written": ("failed", "W2", POOLS),
    "sources-of-first-load": ("failed", "W1", POOLS),
    "rotation-without-scales": ("failed", "W6", POOLS),
    "rotation-one-rank-too-far": ("failed", "W1", POOLS),
    **{f"loaded-{id}": ("failed", "I8", MXFP4_REAL) for id in BYTE_FAULTS if id not in _ELSEWHERE},
    "loaded-scale-nan": ("failed", "F1", MXFP4_REAL),
    "owner-weight-changed": ("failed", "U2", PLAIN),
    "others-weight-changed": ("failed", "U2", PLAIN),
    "route-weight-twice": ("failed", "P1", PLAIN),
    "source-row-for-slot": ("failed", "P1", PLAIN),
    "first-group-skipped": ("failed", "P1", PLAIN),
    "gate-without-silu": ("failed", "P1", PLAIN),
    "group-index-off-by-one": ("failed", "P1", PLAIN),
    "group-id-per-tile": ("failed", "P1", PLAIN),
    "no-group-lands-in-first-row": ("failed", "P1", PLAIN),
    "tail-written": ("failed", "P2", PLAIN),
    "weights-of-first-call": ("failed", "P1", LIFE),
    "offset-wraps": ("failed", "P1", PLAIN),
    "gate-for-up": ("failed", "P1", MXFP4),
    "weight-on-input": ("failed", "P1", PLAIN),
    "situ-for-silu": ("failed", "P1", PLAIN),
    "nibbles-exchanged": ("failed", "P1", MXFP4),
    "scales-of-next-expert": ("failed", "P1", MXFP4),
    "scale-rows-shuffled": ("failed", "P1", MXFP4),
    "scale-bias-off-by-one": ("failed", "P1", MXFP4),
    "duplicates-dropped": ("failed", "C1", PLAIN),
    "duplicates-added-twice": ("failed", "C1", PLAIN),
    "combine-applies-weights": ("failed", "C1", PLAIN),
    "combine-adds-tail": ("failed", "C1", PLAIN),
    "tokens-shifted": ("failed", "C1", PLAIN),
    "combine-of-latest-plan": ("failed", "C1", PLAIN),
    "gathered-weights-shifted": ("failed", "C2", PLAIN),
    "combine-changes-input": ("failed", "U3", PLAIN),
    "combine-in-bf16": ("failed", "C1", REAL),
    "slot-gradient-dropped": ("failed", "R1", GRADS),
    "slot-gradient-twice": ("failed", "R1", GRADS),
    "slot-gradient-rounded": ("failed", "R1", GRADS),
    "owner-gradient-rounded": ("failed", "R1", GRADS),
    "slot-gradient-not-cleared": ("failed", "R2", GRADS),
    "unused-slot-cleared": ("failed", "R2", GRADS),
    "rounding-follows-batch": ("failed", "V13", INDEPENDENT),
    "weights-of-first-load": ("failed", "V10", METAMORPHIC),
    "output-follows-place": ("failed", "C1", PLAIN),
    "output-follows-rank": ("failed", "C1", PLAIN),
    "neighbour-added": ("failed", "C1", PLAIN),
    "zero-weight-counts": ("failed", "P1", LINEAR),
    "sign-lost": ("failed", "P1", PLAIN),
    "no-dispatch-exit-fence": ("failed", "H1", PLAIN),
    "no-prefetch-exit-fence": ("failed", "H4", PLAIN),
    "no-combine-prologue-fence": ("failed", "H3", PLAIN),
    "slots-reused-early": ("failed", "H2", IN_FLIGHT + "0"),
    "view-used-after-dispatch": ("failed", "H2", IN_FLIGHT + "1"),
    "rank-raises": ("failed", "F1", PLAIN),
    "rank-never-returns": ("hung", "F1", PLAIN),
    "rank-skips-combine": ("hung", "F1", PLAIN),
    "bad-input-accepted": ("failed", "Z1", REFUSALS),
    "destroy-does-nothing": ("failed", "Z1", LIFE),
    "destroy-fails": ("failed", "F1", PLAIN),
    "groups-dealt-evenly": ("failed", "L4", PLAIN),
    "empty-plan-refused": ("failed", "F1", BALANCED),
    "zero-copy-drops-duplicates": ("failed", "C1", VARIANTS),
    "duplicates-dropped-later": ("failed", "C1", LIFE),
    "plan-storage-reused": ("failed", "L2", VARIANTS),
    "factor-applied-twice": ("failed", "Q2", K3),
    "factor-never-applied": ("failed", "Q2", K3),
    "factor-on-first-route": ("failed", "Q2", K3),
    "factor-on-sum": ("failed", "C1", K3),
    "bias-rounded-to-bf16": ("failed", "Q1", K3),
    "bias-added-in-bf16": ("failed", "Q1", K3),
    "bias-misread": ("failed", "Q1", K3),
    "bias-ignored": ("failed", "Q1", K3),
    "bias-in-weights": ("failed", "Q2", K3),
    "weights-not-renormalised": ("failed", "Q2", K3),
    "weights-over-all-experts": ("failed", "Q2", K3),
    "softmax-for-sigmoid": ("failed", "Q1", K3),
    "router-in-bf16": ("failed", "Q2", K3),
    "router-sees-part": ("failed", "Q1", K3),
    "one-expert-for-all-routes": ("failed", "Q1", K3),
    "id-behind-last-expert": ("failed", "Q1", K3),
    "ids-of-int64-misread": ("failed", "Q1", K3),
    "latent-rows-rolled": ("failed", "T1", K3),
    "silu-for-situ": ("failed", "P1", K3),
    "clamp-for-tanh": ("failed", "P1", K3),
    "caps-exchanged": ("failed", "P1", K3),
    "up-not-capped": ("failed", "P1", K3),
    "norm-before-sum": ("failed", "P1", K3),
    "norm-eps-too-small": ("failed", "N1", K3),
    "norm-over-tokens": ("failed", "N1", K3),
    "norm-left-out": ("failed", "N1", K3),
    "output-reduced-twice": ("failed", "S2", K3),
    "routed-part-twice": ("failed", "T2", K3),
    "shared-on-every-rank": ("failed", "S2", K3),
    "shared-left-out": ("failed", "S2", K3),
    "shared-over-factor": ("failed", "S1", K3),
    "shared-of-other-tokens": ("failed", "S1", K3),
    "shared-with-silu": ("failed", "S1", K3),
    "ids-narrowed": ("failed", "L4", WIDE_IDS),
    "plan-rows-narrowed": ("failed", "L1", WIDE_ROWS),
    "group-ends-narrowed": ("failed", "L1", WIDE_ROWS),
    "payload-rows-narrowed": ("failed", "D1", WIDE_ROWS),
    "prefetch-ids-narrowed": ("failed", "W1", WIDE_SLOTS),
    "experts-rows-narrowed": ("failed", "P1", WIDE_ROWS),
    "combine-rows-narrowed": ("failed", "C1", WIDE_ROWS),
    "offset-narrowed": ("failed", "D1", WIDE_ROWS),
    "plan-size-wrong": ("failed", "L17", PLAIN),
    "weights-that-nobody-gave": ("failed", "O4", VARIANTS),
    "gathered-from-no-weights": ("failed", "O6", VARIANTS),
    "gradients-wrong-later": ("failed", "R1", GRADS),
    "rows-wrong-later": ("failed", "D1", HUNDREDTH),
    "slots-wrong-later": ("failed", "W1", HUNDREDTH),
    "sums-wrong-later": ("failed", "C1", HUNDREDTH),
    "gathered-weights-overwritten": ("failed", "C2", VARIANTS),
    "replay-sends-first-tokens": ("failed", "D1", VARIANTS),
    "replay-sends-first-weights": ("failed", "D1", VARIANTS),
    "plan-kept-by-ids": ("failed", "O1", SHAPES),
    "columns-of-first-buffer": ("failed", "D1", SHAPES),
    "bytes-of-first-buffer": ("failed", "W1", SHAPES),
    "weights-at-first-address": ("failed", "W1", SHAPES),
    "experts-of-first-width": ("failed", "P1", SHAPES),
    "tokens-of-first-buffer": ("failed", "C1", SHAPES),
    "routes-of-first-buffer": ("failed", "C2", SHAPES),
    "rank-of-the-world": ("failed", "L2", GROUPS),
    "ranks-sorted": ("failed", "L1", GROUPS),
    "group-of-all-ranks": ("failed", "F1", GROUPS),
}
#: The others need an engine: test_engine_faults.py.
OF_A_BUFFER = [id for id, one in FAULTS.items() if not one.for_engine and not one.needs_gpu]
#: Faults that only one generation can have.
ONLY = {
    "others-weight-changed": "A",
    "no-prefetch-exit-fence": "B",
    "rotation-without-scales": "A",
    "rotation-one-rank-too-far": "A",
}
#: Where a fault of all ranks, or of another width, is found otherwise than one of rank 1.
ON_ALL = {
    "plan-storage-reused:rank=all": ("failed", "L4"),  # no rank has two routes for a row, but those of the old ids
    "plan-rows-narrowed:width=uint16": ("failed", "L2"),  # the rows are there, and those of others
    "rank-skips-combine:rank=all": ("failed", "C1"),  # nobody waits for anybody
}
WIDER = [text for id in OF_A_BUFFER for text in FAULTS[id].texts[1:]]


def job_with(fault: str) -> Job:
    return Job(faults=(parse_fault(fault),), deadline=0.5)


@pytest.mark.parametrize("generation", ["A", "B"])
@pytest.mark.parametrize("fault", OF_A_BUFFER)
def test_faulty_variant_is_caught_at_its_stage(fault: str, generation: str) -> None:
    """Over a hundred faulty Buffers: each fault in both generations, found by its check at its own stage."""
    if ONLY.get(fault, generation) != generation:
        pytest.skip(f"generation {generation} does not call what {fault} changes")
    assert fault in KILLED_BY, (
        f"{fault}: add to KILLED_BY which check must find it first, and a case on which it does"
    )
    status, check, sizes = KILLED_BY[fault]
    _, verdict = run_case(job_with(fault), Case.parse(f"gen{generation}+{sizes}"))
    first = verdict.first
    assert first is not None
    assert (verdict.status, first.stage, first.check) == (status, FAULTS[fault].stage, check), verdict.diagnosis
    assert f"--fault {fault}" in verdict.command


@pytest.mark.parametrize("fault", WIDER)
def test_a_fault_of_all_ranks_is_caught_at_its_stage(fault: str) -> None:
    """What all ranks do alike is no standard that any of them could be held to: each check has one of its own."""
    id = parse_fault(fault).name
    assert id in KILLED_BY, f"{id}: add to KILLED_BY which check must find it first, and a case on which it does"
    status, check, sizes = KILLED_BY[id]
    status, check = ON_ALL.get(fault, (status, check))
    _, verdict = run_case(job_with(fault), Case.parse(f"gen{ONLY.get(id, 'A')}+{sizes}"))
    first = verdict.first
    assert first is not None, f"{fault} survives"
    assert (verdict.status, first.stage, first.check) == (status, FAULTS[id].stage, check), verdict.diagnosis


@pytest.mark.parametrize(
    "fault", ["gate-up-interleaved", "scale-rows-shuffled", "scales-transposed", "expert-not-loaded"]
)
def test_a_fault_of_a_load_is_caught_there_where_nothing_is_prefetched(fault: str) -> None:
    alone = Case.parse("genB+R1+E4+K2+S9+pad8+fill:scales+mxfp4+grouped")
    first = run_case(job_with(f"loaded-{fault}:rank=all"), alone)[1].first
    assert first is not None
    assert (first.stage, first.check) == ("load", "I8")


def test_a_fault_of_a_plan_is_none_of_its_replays() -> None:
    """With K = 2 no token has two duplicates on a rank, so their order cannot be wrong, in a replay neither."""
    replayed = Case.parse("genB+R2+E8+K2+S9+H24+I8+hot:1+fill:real+replayed_plan")
    assert run_case(job_with("dedup-list-reversed:rank=all"), replayed)[1].status == "not_exercised"


def test_where_a_fault_acts_is_told_in_one_place() -> None:
    """The catalogue seeds each fault of a rank on rank 1 and on all; some are none on all, or of all ranks only."""
    assert FAULTS["slot-not-filled"].texts == ["slot-not-filled", "slot-not-filled:rank=all"]
    assert FAULTS["adapter-capacity-differs"].texts == ["adapter-capacity-differs"]
    assert FAULTS["destroy-does-nothing"].texts == ["destroy-does-nothing"]
    assert FAULTS["weights-of-first-load"].texts == ["weights-of-first-load", "weights-of-first-load:of=all"]
    for text, ranks in [("", [1]), (":rank=3", [3]), (":rank=all", [0, 1, 2, 3])]:
        spec = parse_fault(f"route-weight-twice{text}")
        acting = [rank for rank in range(4) if Seams([spec], rank).around("experts", max) is not max]
        assert acting == ranks


@pytest.mark.parametrize("sizes", sorted({sizes for _, _, sizes in KILLED_BY.values()}))
@pytest.mark.parametrize("generation", ["A", "B"])
def test_without_a_fault_the_same_cases_pass(sizes: str, generation: str) -> None:
    assert run_case(Job(), Case.parse(f"gen{generation}+{sizes}"))[1].ok


def test_catalogue_is_large_enough() -> None:
    differ = sorted(set(KILLED_BY) ^ set(OF_A_BUFFER))
    assert not differ, f"{differ}: KILLED_BY has one line for each fault of a Buffer that needs no GPU"
    assert len(OF_A_BUFFER) * 2 >= 40


def test_fault_on_another_rank_is_found_there() -> None:
    _, verdict = run_case(job_with("row-of-another-token:rank=3,row=1"), CASE)
    assert verdict.first is not None
    assert verdict.first.findings[0].place["rank"] == 3
    assert verdict.first.findings[0].place["row"] == 1


def test_fault_that_changes_nothing_is_not_exercised() -> None:
    """Rank 9 does not exist; and in a case without slots there is no slot to leave unfilled."""
    assert run_case(job_with("row-of-another-token:rank=9"), CASE)[1].status == "not_exercised"
    no_slots = Case.parse("genB+R2+E4+K2+S3+H8+table:0,1,0,1,0,1,2,3,2,3,2,3")
    assert run_case(Job(), no_slots)[1].witnesses["slot_used"] == 0
    # The slot pool is poisoned before every prefetch, so the recorded bytes are the same.
    assert run_case(job_with("slot-not-filled"), no_slots)[1].status == "not_exercised"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slot-not-filed", "unknown fault 'slot-not-filed'; did you mean 'slot-not-filled'?"),
        ("slot", "unknown fault 'slot'; did you mean 'slot-table-differs' or 'slot-not-filled' or 'slot-"),
        ("slots-reused", "unknown fault 'slots-reused'; did you mean 'slots-reused-early'?"),
        ("slot-not-filled:rnk=1", "has no parameter 'rnk=1'; did you mean 'rank'?"),
        ("slot-not-filled:rank=x", "rank is 'x', a whole number or all is needed"),
        ("weights-of-first-load:of=none", "of is 'none', a whole number or all is needed"),
        ("destroy-does-nothing:rank=1", "has no parameter 'rank=1'"),
        ("slot-not-filled:1", "has no parameter '1'; known: rank"),
    ],
)
def test_bad_fault_ids_are_refused(text: str, message: str) -> None:
    with pytest.raises(CaseError) as error:
        parse_fault(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fault", "limits"),
    [
        ("row-of-another-token", {"R": 2, "E": 2, "K": 1, "S": 1}),
        ("slot-not-filled", {"R": 2, "E": 2, "K": 1, "S": 1}),
        ("duplicates-dropped", {"R": 2, "E": 2, "K": 2, "S": 1}),
        ("rank-raises", {"R": 2, "E": 2, "K": 1, "S": 1}),
    ],
)
def test_shrinks_to_a_smallest_case_that_still_fails_in_the_same_way(fault: str, limits: dict[str, int]) -> None:
    job = job_with(fault)
    whole = Case.parse("genB+R4+E16+K4+S9+fill:real+two_poisons+hot:1+tokens:9,9,9,3+seed3")
    result = shrink(whole, lambda case: run_case(job, case)[1], seconds=60)
    assert result.complete
    assert {name: getattr(result.case, name) for name in limits} == limits, str(result.case)
    assert (result.case.H, result.case.I, str(result.case.fill)) == (8, 8, "ints")
    verdict = run_case(job, Case.parse(str(result.case)))[1]
    assert verdict.first is not None
    assert (verdict.first.stage, verdict.first.check) == (FAULTS[fault].stage, KILLED_BY[fault][1])


def test_shrinking_twice_gives_the_same_case() -> None:
    job = job_with("duplicates-dropped")
    whole = Case.parse("genB+R3+E9+K3+S5+zipf:1.0")
    first = shrink(whole, lambda case: run_case(job, case)[1], seconds=60)
    again = shrink(first.case, lambda case: run_case(job, case)[1], seconds=60)
    assert again.case == first.case


def test_shrinker_keeps_its_budget_and_refuses_a_passing_case() -> None:
    result = shrink(CASE, lambda case: run_case(job_with("slot-not-filled"), case)[1], seconds=-1)
    assert (result.case, result.complete, result.tried) == (CASE, False, 0)
    with pytest.raises(CaseError, match="there is nothing to shrink"):
        shrink(CASE, lambda case: run_case(Job(), case)[1], seconds=1)
