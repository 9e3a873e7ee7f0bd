"""Faults around an engine's loader, adapter, experts and layer: each is found by its check at its own stage.

All run on the honest engine of ``tests/self/engines``, in one pool of workers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.faults import FAULTS, parse_fault
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.run import run_case
from moonep_validate.worlds import processes
from tests.self.conftest import CASE

ENGINES = Path(__file__).with_name("engines")
SIZES = "genA+R2+E8+S16+pad4"
#: Seconds without a sign of life; only a test of a hang goes lower.
DEADLINE, SHORT = 60.0, 4.0

#: fault -> (words of a case that shows it, check that finds it first)
KILLED_BY = {
    "loader-swaps-gate-and-up": ("hot:5", "I8"),
    "loader-takes-gate-for-up": ("hot:5", "I8"),
    "loader-transposes": ("hot:5", "I8"),
    "loader-shifts-experts": ("hot:5", "I8"),
    "loader-takes-other-shard": ("hot:5", "I8"),
    "loader-skips-expert": ("hot:5", "I8"),
    "loader-skips-tensor": ("hot:5", "I8"),
    "loader-keeps-stale": ("hot:5", "I8"),
    "loader-rounds-to-int": ("fill:real", "I8"),
    "loader-through-float8": ("fill:real", "I8"),
    "loader-misses-tail-rows": ("hot:5", "I8"),
    "loader-flips-one-bit": ("hot:5", "I8"),
    "adapter-pads-first": ("tokens:5,11", "I1"),
    "adapter-weighs-pads": ("tokens:5,11", "I1"),
    "adapter-counts-without-pads": ("tokens:5,11", "I3"),
    "adapter-wraps-invalid-ids": ("invalid_ids", "I2"),
    "adapter-capacity-differs": ("tokens:5,11", "I4"),
    "adapter-shifts-tokens": ("hot:5", "I1"),
    "adapter-rounds-weights": ("fill:real", "I2"),
    "adapter-flips-ids": ("hot:5", "I2"),
    "adapter-shifts-ids": ("hot:5", "I2"),
    "adapter-sends-local-ids": ("hot:5", "I2"),
    "adapter-sends-previous-ids": ("hot:3+layers", "I2"),
    "experts-weigh-twice": ("hot:5", "P1"),
    "experts-weigh-never": ("hot:5", "P1"),
    "experts-drop-row": ("hot:5", "P1"),
    "experts-swap-groups": ("hot:5", "P1"),
    "experts-copy-tail": ("hot:5", "P1"),
    "experts-scale-columns": ("hot:5", "P1"),
    "experts-return-previous": ("hot:3+layers", "P1"),
    "adapter-narrows-ids": ("E512", "I2"),
    "experts-narrow-rows": ("K8+S8200", "P1"),
    "layer-shifts-tokens": ("hot:5", "I16"),
    "layer-returns-previous": ("hot:3+layers", "I16"),
    "layer-times-ranks": ("hot:5", "I16"),
    "layer-adds-its-input": ("hot:5", "I16"),
    "layer-returns-float32": ("hot:5", "O7"),
    "loader-keeps-first-life": ("hot:5+lives", "I8"),
    "adapter-keeps-first-size": ("hot:5+lives", "I2"),
    "experts-keep-first-size": ("hot:5+lives", "P1"),
    "layer-keeps-first-size": ("hot:5+lives", "I16"),
    "layer-skips-without-tokens": ("tokens:0,3", "F1"),  # last: it costs the pool
}

#: The same for faults of a Buffer that a tap can seed too; those that end a pool of workers are in test_faults.py.
THROUGH_TAPS = {
    "routes-swap-experts": ("hot:5", "L4"),
    "row-used-twice": ("hot:5", "L2"),
    "row-behind-last-group": ("hot:5", "L1"),
    "cu-seqlens-are-starts": ("hot:5", "L4"),
    "groups-dealt-evenly": ("hot:5", "L4"),
    "slot-table-differs": ("hot:5", "L8"),
    "own-expert-in-slot": ("hot:5", "L8"),
    "zero-fill-off-by-one": ("hot:5", "L7"),
    "stats-count-own": ("hot:5", "L13"),
    "duplicates-not-marked": ("hot:5", "L11"),
    "dedup-list-reversed": ("K8", "L12"),
    "dedup-list-short": ("hot:5", "L12"),
    "plan-form": ("hot:5", "O1"),
    "rows-form": ("hot:5", "O4"),
    "combine-form": ("hot:5", "O6"),
    "prefetch-changes-plan": ("hot:5", "U2"),
    "combine-changes-plan": ("hot:5", "U3"),
    "row-of-another-token": ("hot:5", "D1"),
    "route-weights-shifted": ("hot:5", "D1"),
    "pads-not-zeroed": ("hot:5", "D2"),
    "pad-weights-not-zeroed": ("hot:5", "D2"),
    "duplicates-not-copied": ("hot:5", "D1"),
    "dispatch-changes-input": ("hot:5", "U1"),
    "slot-not-filled": ("hot_rank:0", "W1"),
    "slot-of-first-prefetch": ("hot:3+layers", "W1"),
    "projection-not-moved": ("hot_rank:0", "W1"),
    "gate-and-up-swapped": ("hot_rank:0", "W1"),
    "slots-in-other-order": ("hot_rank:0", "W1"),
    "slot-row-shifted": ("hot_rank:0", "W1"),
    "unused-slot-written": ("hot:5", "W2"),
    "owner-weight-changed": ("hot:5", "U2"),
    "others-weight-changed": ("hot:5", "U2"),
    "duplicates-dropped": ("hot:5", "C1"),
    "duplicates-dropped-later": ("hot:3+layers", "C1"),
    "duplicates-added-twice": ("hot:5", "C1"),
    "combine-adds-tail": ("hot:5", "C1"),
    "tokens-shifted": ("hot:5", "C1"),
    "combine-of-latest-plan": ("hot:5", "C1"),
    "combine-changes-input": ("hot:5", "U3"),
    "combine-in-bf16": ("hot_rank:0+fill:real", "C1"),
    "destroy-does-nothing": ("hot:5", "I15"),
}
#: Where a fault of all ranks is found by another check than one of rank 1.
ON_ALL = {"slot-table-differs:rank=all": "L4"}  # all tables are alike, and wrong
#: What no engine does with a Buffer, so that these change nothing there.
NO_ENGINE_DOES = {
    "payload-through-arithmetic": "sends NaN payloads or -0.0",
    "replay-returns-copy": "replays a plan",
    "replay-changes-plan": "replays a plan",
    "replay-of-latest-plan": "replays a plan",
    "plan-storage-reused": "keeps a plan beyond its step",
    "zero-copy-copies": "asks for zero-copy",
    "zero-copy-drops-duplicates": "asks for zero-copy",
    "async-returns-early": "asks for an asynchronous call",
    "rows-zero-without-weights": "dispatches without route weights",
    "scales-left-behind": "prefetches scales",
    "combine-applies-weights": "gives combine route weights",
    "gathered-weights-shifted": "gives combine route weights",
    "gathered-weights-form": "gives combine route weights",
    "bad-input-accepted": "gives dispatch another dtype",
}


@pytest.fixture(scope="module")
def good() -> Iterator[Job]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ENGINES)]))
        patch.syspath_prepend(str(ENGINES))
        job = make_job(Options(subject="fake_engine:Good", deadline=DEADLINE))
        assert job.not_run is None, job.not_run
        yield job
    processes.close_pools()


def judged(job: Job, words: str, *faults: str) -> Verdict:
    seeded = replace(job, faults=tuple(parse_fault(text) for text in faults))
    parts = {part.rstrip("0123456789"): part for part in f"{SIZES}+K2+{words}".split("+")}  # the last of a size
    return run_case(seeded, Case.parse("+".join(parts.values())))[1]


def failed_steps(verdict: Verdict) -> set[str]:
    return {result.step for result in verdict.results if result.status == "failed" and result.check == "I16"}


def test_without_a_fault_the_same_cases_pass(good: Job) -> None:
    for words in dict.fromkeys(words for words, _ in (KILLED_BY | THROUGH_TAPS).values()):
        verdict = judged(good, words)
        assert verdict.status == "passed", verdict.diagnosis


@pytest.mark.parametrize("fault", [one for one in KILLED_BY | THROUGH_TAPS if not FAULTS[one].crashes])
def test_a_fault_around_an_engine_is_found_at_its_stage(good: Job, fault: str) -> None:
    words, check = (KILLED_BY | THROUGH_TAPS)[fault]
    verdict = judged(good, words, fault)
    first = verdict.first
    assert first is not None, f"{fault} survives"
    assert (verdict.status, first.stage, first.check) == ("failed", FAULTS[fault].stage, check), verdict.diagnosis
    assert f"--fault {fault}" in verdict.command


@pytest.mark.parametrize(
    "text", [text for id in KILLED_BY | THROUGH_TAPS if not FAULTS[id].crashes for text in FAULTS[id].texts[1:]]
)
def test_a_fault_of_all_ranks_is_found_at_its_stage(good: Job, text: str) -> None:
    id = parse_fault(text).name
    words, check = (KILLED_BY | THROUGH_TAPS)[id]
    verdict = judged(good, words, text)
    first = verdict.first
    assert first is not None, f"{text} survives"
    expected = ("failed", FAULTS[id].stage, ON_ALL.get(text, check))
    assert (verdict.status, first.stage, first.check) == expected, verdict.diagnosis


def test_every_fault_of_an_engine_is_tried() -> None:
    assert set(KILLED_BY) == {id for id, one in FAULTS.items() if one.for_engine}
    both = {id for id, one in FAULTS.items() if one.for_engine is None and not one.crashes}
    assert set(THROUGH_TAPS) | set(NO_ENGINE_DOES) <= both
    assert set(THROUGH_TAPS) & set(NO_ENGINE_DOES) == set()
    assert all(one.bugs and one.summary.endswith(".") for one in FAULTS.values() if one.for_engine)


def test_what_is_not_loaded_is_found_although_memory_held_it_before(good: Job) -> None:
    """The case before leaves the very bytes that are missing; the loader's memory is filled with NaN instead."""
    assert judged(good, "hot:5").ok
    for fault in ("loader-skips-expert", "loader-skips-tensor"):
        verdict = judged(good, "hot:5", fault)
        assert verdict.first is not None
        assert "got nan" in str(verdict.first.findings[0])


def test_the_place_of_a_fault_is_told(good: Job) -> None:
    for fault, rank in [("layer-returns-float32", 1), ("layer-returns-float32:rank=0", 0)]:
        verdict = judged(good, "hot:5", fault)
        assert verdict.first is not None
        finding = verdict.first.findings[0]
        assert (finding.what, finding.place["rank"]) == ("form of layer.out", rank)
        assert (finding.expected, finding.actual) == ("bfloat16 [16, 128]", "float32 [16, 128]")
    verdict = judged(good, "hot:5", "loader-flips-one-bit:rank=0,expert=2")
    assert verdict.first is not None
    place = verdict.first.findings[0].place
    assert (place["expert"], place["weight_row"], place["weight_column"]) == (2, 127, 127)
    assert verdict.first.findings[0].count == 1


@pytest.mark.parametrize(
    ("turns", "steps"),
    [
        ("", {"base", "other_layer", "back", "other_tokens"}),
        (":first=2", {"back", "other_tokens"}),
        (":every=2", {"base", "back"}),
        (":every=2,first=1", {"other_layer", "other_tokens"}),
        (":every=3,first=1", {"other_layer"}),
    ],
)
def test_first_and_every_say_in_which_steps_a_fault_acts(good: Job, turns: str, steps: set[str]) -> None:
    assert failed_steps(judged(good, "hot:3+layers", f"layer-shifts-tokens{turns}")) == steps


def test_a_fault_may_wait_for_a_reload(good: Job) -> None:
    verdict = judged(good, "hot:5+reload", "loader-flips-one-bit:first=1")
    assert verdict.first is not None
    assert (verdict.first.check, verdict.first.step) == ("I8", "reloaded")


@pytest.mark.parametrize(
    ("fault", "words", "why"),
    [
        ("loader-rounds-to-int", "hot:5", "whole numbers stay what they are"),
        ("loader-through-float8", "hot:5", "the weights of this fill are E2M1 times a power of two"),
        ("adapter-wraps-invalid-ids", "hot:5", "no id is invalid"),
        ("adapter-weighs-pads", "hot:5", "a full step has no padding"),
        ("layer-returns-previous", "hot:5", "there is no step before"),
        ("layer-shifts-tokens:first=1", "hot:5", "there is no second step"),
        *[(fault, "hot:5", f"no engine {why}") for fault, why in NO_ENGINE_DOES.items()],
    ],
)
def test_a_fault_that_a_case_cannot_show_is_not_exercised(good: Job, fault: str, words: str, why: str) -> None:
    assert judged(good, words, fault).status == "not_exercised", why


def test_a_bare_buffer_has_no_seam_of_an_engine() -> None:
    for fault in ("loader-swaps-gate-and-up", "adapter-shifts-ids", "experts-weigh-twice", "layer-times-ranks"):
        verdict = run_case(Job(faults=(parse_fault(fault),), deadline=5.0), CASE)[1]
        assert verdict.status == "not_exercised"


def test_buffers_that_a_fault_leaves_are_not_the_next_cases(good: Job) -> None:
    assert not judged(good, "hot:5", "destroy-does-nothing").ok
    assert judged(good, "hot:5").ok


def test_a_turn_that_never_comes_is_refused() -> None:
    with pytest.raises(CaseError, match="every is 0, 1 or more is needed"):
        parse_fault("layer-times-ranks:every=0")
    with pytest.raises(CaseError, match="has no parameter 'first=1'"):
        parse_fault("slot-not-filled:first=1")


def test_a_rank_that_leaves_a_step_out_is_a_deadlock(good: Job) -> None:
    words, check = KILLED_BY["layer-skips-without-tokens"]
    assert judged(good, words).ok  # the pool is warm, so a short deadline is enough
    verdict = judged(replace(good, deadline=SHORT), words, "layer-skips-without-tokens")
    assert verdict.first is not None
    assert (verdict.status, verdict.first.stage, verdict.first.check) == ("hung", "life", check), verdict.diagnosis
