"""Engines as subjects: an honest one passes by the front door, and each defect of an integration has its place.

The engines are in ``tests/self/engines``. A pool of workers is dear, so the tests are in the order of their pools.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.require import unmet
from moonep_validate.pipeline.run import run_case
from moonep_validate.pipeline.target import Engine
from moonep_validate.subjects.engines import start as engines
from moonep_validate.trace.trace import Part, Trace
from moonep_validate.worlds import processes

Cli = Callable[..., tuple[int, str, str]]
ENGINES = Path(__file__).with_name("engines")
SHIM = Path(engines.__file__).parents[1] / "shim"
SIZES = "genA+R2+E8+K2+S16+pad4"
GOOD, FAULTY = "fake_engine:Good", "faulty_engine:Faulty"
#: Seconds without a sign of life. A new pool imports much in its first pass, so only tests of hangs go lower.
DEADLINE, SHORT = 60.0, 4.0


@pytest.fixture(scope="module", autouse=True)
def _engines_can_be_imported() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ENGINES))
        patch.syspath_prepend(str(ENGINES))
        yield
    processes.close_pools()


def job_of(subject: str = GOOD, faults: tuple[str, ...] = (), deadline: float = DEADLINE) -> Job:
    job = make_job(Options(subject=subject, fault=faults, deadline=deadline))
    assert job.not_run is None, job.not_run
    return job


def judged(words: str, job: Job | None = None) -> Verdict:
    return run_case(job or job_of(), Case.parse(f"{SIZES}+{words}"))[1]


def defects() -> list[str]:
    return list(importlib.import_module("faulty_engine").DEFECTS)


def faulty(name: str, words: str, deadline: float = DEADLINE) -> Verdict:
    """Judge the engine with one defect, which the seed of the case chooses."""
    seed = defects().index(name)
    return judged(f"{words}+seed{seed}" if seed else words, job_of(FAULTY, deadline=deadline))


def failed_checks(verdict: Verdict) -> set[str]:
    return {result.check for result in verdict.results if result.status == "failed"}


def workers() -> list[int]:
    return [worker.pid for pool in processes._pools.values() for worker in pool.workers]


# The honest engine.

HONEST = {
    "hot:5+@slot_used": "I1 I2 I3 I4 I6 I8 I15 I16 L3 X2 D1 W1 W7 P1 C1 M1 F1",
    "fill:real+hot:1+@slot_used": "I1 I8 P1 C3 M1",
    "tokens:5,11+fill:real+zipf:1.0": "I1 I3 I4 I16 M1",
    "tokens:0,3+hot:6+@empty_rank": "I1 I4 I16 M1",
    "tokens:16,0+fill:real+@empty_rank": "I1 I4 I16 M1",
    "slots1+hot_rank:0+@remote_read": "I8 L9 W1 P1 M1",
    "hot:5+two_poisons+@slot_used": "I10 M1",
    "fill:real+hot:2+two_poisons+@slot_used": "I10 M1",
    "hot:5+marked_slots+@slot_used": "P1 M1",
    "fill:real+hot:1+marked_slots+@slot_used": "P1 M1",
    "hot:3+layers+@slots_everywhere": "V8 I6 I8",
    "fill:real+hot:3+layers+@slots_everywhere": "V8 I6 I8",
    "hot:5+token_counts+@slot_used": "I1 I4 I16",
    "fill:real+token_counts": "I1 I4 I16",
    "hot:5+invalid_ids+@duplicate": "I2 I3 M1",
    "fill:real+invalid_ids": "I2 I3 M1",
    "hot:5+abort+@slot_used": "I11 I15 Z1",
    "hot:5+reload+@slot_used": "I8 W1 M1",
    "hot:5+lives+@slot_used": "V7 I8 W1 I15 M1",
    "hot:5+hundredth+@slot_used": "V1 M1",
    "configurations": "Z1 M1",
    "hot:5+metamorphic+@slot_used": "V9 V10 V11 V12 I8 M1",
    "tokens:5,11+metamorphic": "V9 V10 V11 V12",
    "fill:real+hot:5+independent+@slot_used": "V13",
    "hot:5+linear+@slot_used": "V14 V15 V16 V17 I8 M1",
}


@pytest.mark.parametrize("words", HONEST)
def test_an_honest_engine_passes(words: str) -> None:
    verdict = judged(words)
    assert verdict.status == "passed", verdict.diagnosis
    compared = {result.check for result in verdict.results if result.status == "passed" and result.examined}
    assert set(HONEST[words].split()) - compared == set(), "these checks compared nothing"
    assert f"--subject {GOOD}" in verdict.command


def test_every_scenario_for_engines_is_tried() -> None:
    from moonep_validate.scenarios import SCENARIOS

    tried = {Case.parse(f"{SIZES}+{words}").scenario.name for words in HONEST}
    wanted = {name for name, one in SCENARIOS.items() if "buffer" not in one.needs}
    assert tried == wanted, (
        f"{sorted(wanted ^ tried)}: HONEST above has one line for each scenario that engines run"
    )


def test_evidence_says_which_part_is_real() -> None:
    job = job_of()
    verdict = judged("hot:5", job)
    parts = {stage: (p.origin, p.package, p.version) for stage, p in verdict.parts.items()}
    for stage in ("life", "load", "prepare", "experts", "layer"):
        assert parts[stage] == ("real", "fake_engine", "1.0"), stage
    for stage in ("plan", "dispatch", "prefetch", "combine"):
        assert parts[stage][:2] == ("stand-in", "moonep"), stage
    assert verdict.level == "stand-in"
    levels = {result.check: result.level for result in verdict.results}
    assert (levels["I8"], levels["P1"], levels["D1"]) == ("unverified", "unverified", "stand-in")
    assert Job.from_json(job.to_json()) == job


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("genB+R2+E8+K2+S16", "genB: fake_engine:Good calls MoonEP's generation A; use genA"),
        (f"{SIZES}+H24", "not portable to hardware"),
        (f"{SIZES}+H128+I128+fp8", "format fp8: an integration is given BF16 weights; leave fp8 out"),
        (
            f"{SIZES}+combine_only",
            "the scenario combine_only calls a Buffer by itself; an engine has no such door",
        ),
    ],
)
def test_what_an_engine_cannot_run_is_not_run_with_its_reason(line: str, reason: str) -> None:
    verdict = run_case(job_of(), Case.parse(line))[1]
    assert verdict.status == "not_run"
    assert reason in verdict.results[0].reason


def test_order_of_cases_changes_nothing_and_no_buffer_is_left() -> None:
    lines = [
        "hot:5+abort",
        "tokens:5,11",
        "hot:3+layers",
        "configurations",
        "hot:5+reload",
        "fill:real+token_counts",
    ]

    def run(order: list[str]) -> dict[str, Trace]:
        job, traces = job_of(), {}
        for words in order:
            traces[words], verdict = run_case(job, Case.parse(f"{SIZES}+{words}"))
            assert verdict.status == "passed", verdict.diagnosis
        return traces

    there, back = run(lines), run(lines[::-1])
    for words in lines:
        assert there[words].digest() == back[words].digest(), f"{words}: other bytes after other cases"
        living = [call.info["living"] for calls in back[words].calls for call in calls if call.op == "buffers"]
        assert living == [0, 0], words


@pytest.mark.parametrize(
    ("fault", "words", "stage", "check"),
    [
        ("routes-swap-experts", "hot:5", "plan", "L4"),
        ("row-of-another-token", "hot:5", "dispatch", "D1"),
        ("pads-not-zeroed", "hot:5", "dispatch", "D2"),
        ("slot-not-filled:rank=0", "hot:5", "prefetch", "W1"),
        ("slot-of-first-prefetch:rank=0", "hot:5+layers", "prefetch", "W1"),
        ("tokens-shifted", "hot:5", "combine", "C1"),
        ("combine-of-latest-plan", "hot:5+layers", "combine", "C1"),
    ],
)
def test_seeded_faults_work_through_the_taps(fault: str, words: str, stage: str, check: str) -> None:
    verdict = judged(words, job_of(faults=(fault,)))
    assert verdict.first is not None
    assert (verdict.status, verdict.first.stage, verdict.first.check) == ("failed", stage, check), (
        verdict.diagnosis
    )
    assert f"--subject {GOOD} --fault {fault}" in verdict.command


def test_a_fault_that_an_engine_has_no_door_for_is_not_exercised() -> None:
    assert judged("hot:5", job_of(faults=("source-row-for-slot",))).status == "not_exercised"


# What really must run.


def test_require_compares_with_what_would_run() -> None:
    job = job_of()
    assert isinstance(job.target, Engine)
    assert job.target.part is not None
    (doubted,) = unmet(job, ["load=fake_engine"])
    assert "is not met: unverified fake_engine 1.0" in doubted
    assert "(no installed distribution lists" in doubted
    known = replace(job.target.part, doubts=())
    job = replace(job, target=replace(job.target, part=known))
    assert unmet(job, ["load=fake_engine", "engine=fake_engine"]) == []
    assert unmet(job, ["loader=fake_engine,layer=fake_engine"]) == []
    (missing,) = unmet(job, ["load=fake_engine,transport=moonep"])
    assert missing.startswith("--require transport=moonep is not met: stand-in moonep ")
    (other,) = unmet(job, ["load=vllm"])
    assert other.startswith("--require load=vllm is not met: real fake_engine 1.0")
    assert isinstance(job.target, Engine)
    real = replace(job, target=replace(job.target, moonep=Part("real", "moonep.api", "1.2")))
    assert unmet(real, ["transport=moonep"]) == []
    assert len(unmet(real, ["transport=moon"])) == 1
    lost = replace(job, not_run="no such engine")
    assert unmet(lost, ["load=fake_engine"]) == ["--require load=fake_engine is not met: no such engine"]
    assert "reference moonep_validate.reference" in unmet(Job(), ["plan=moonep"])[0]


@pytest.mark.parametrize("demand", ["load", "load=", "=vllm", "lod=vllm", "load=vllm,", ""])
def test_a_demand_of_another_form_is_refused(demand: str) -> None:
    with pytest.raises(
        CaseError, match="write STAGE=PACKAGE, where STAGE is one of transport, loader, engine, life"
    ):
        unmet(job_of(), [demand])


# The command line.


def test_run_prints_evidence_and_meaning(cli: Cli) -> None:
    code, out, err = cli("run", "--subject", GOOD, "--case", f"{SIZES}+hot:5+@slot_used")
    assert (code, err) == (0, "")
    assert "evidence: unverified fake_engine 1.0" in out
    assert "unverified: fake_engine: no installed distribution lists" in out
    assert "for life, load, prepare, experts, layer" in out
    assert "evidence: stand-in moonep " in out
    assert "for plan, dispatch, prefetch, combine" in out
    for word in ("load      I8 ", "prepare   I1 ", "I6 ", "M1 "):
        assert word in out
    assert f"proves: the MoE layer of {GOOD} 1.0 is right on these cases" in out
    assert "leaves open: ranks were CPU processes with gloo, moonep was this project's stand-in; router, " in out


def test_run_stops_where_a_required_package_would_not_run(cli: Cli) -> None:
    code, out, err = cli("run", "--subject", GOOD, "--case", f"{SIZES}+hot:5", "--require", "transport=moonep")
    assert code == 1
    assert "--require transport=moonep is not met: stand-in moonep" in err
    assert "cases ran" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--subject", "nonsense"], "--subject nonsense: known are reference, vllm, sglang, or MODULE:CLASS"),
        (["--subject", "no_engine:Good"], "cannot be made: ModuleNotFoundError: No module named 'no_engine'"),
        (
            ["--subject", "fake_engine:Bad"],
            "cannot be made: AttributeError: module 'fake_engine' has no attribute",
        ),
        (["--subject", GOOD, "--moonep-module", "moonep"], "an engine takes the moonep that it can import"),
        (["--subject", GOOD, "--api", "A"], "--api, --policy, --relaxed and --destructive go without --subject"),
        (["--subject", GOOD, "--fault", "slot"], "unknown fault 'slot'"),
        (["--subject", GOOD, "--device", "tpu"], "--device is 'tpu'; known: cpu, cuda"),
        (["--subject", GOOD, "--waivers", "no_such_file"], "waivers no_such_file cannot be read"),
        (["--subject", GOOD, "--require", "load"], "--require load: write STAGE=PACKAGE"),
        (
            ["--engine-path", "somewhere"],
            "--engine-path and --waivers go with an engine: --subject vllm, sglang or MODULE:CLASS",
        ),
    ],
)
def test_wrong_usage_is_said_in_one_line(cli: Cli, arguments: list[str], message: str) -> None:
    code, _, err = cli("run", "--case", f"{SIZES}+hot:5", *arguments)
    assert (code, len(err.splitlines())) == (4, 1), err
    assert message in err


# One defect at a time, all in one pool.

#: defect -> (words of a case that shows it, status, stage, first check, what its first finding says)
FOUND_BY = {
    "PrefetchSkipped": ("hot:5", "failed", "prefetch", "I6", "expected dispatch, prefetch, combine, got dispatch, combine"),
    "PrefetchOnce": ("hot:5+layers", "failed", "prefetch", "I6", "got dispatch, combine"),
    "SourceRowForSlot": ("hot:5+marked_slots", "failed", "experts", "P1", "expert 5, column 0: expected -"),
    "PadsBeforeTokens": ("tokens:5,11", "failed", "prepare", "I1", "dispatched token bits at rank 0, token 0"),
    "PadsOfGarbage": ("tokens:5,11", "failed", "prepare", "I1", "padding hidden at rank 0, token 5, column 0: expected 0, got 3"),
    "PadsOfWeightOne": ("tokens:5,11", "failed", "prepare", "I1", "padding topk_weights at rank 0, token 5"),
    "InvalidIdsWrap": ("invalid_ids", "failed", "prepare", "I2", "dispatched route weight bits at rank 0, token 0, k 0: expected 0 "),
    "InvalidIdsKept": ("invalid_ids", "failed", "prepare", "I2", "dispatched expert id, in 0..7 at rank 0, token 0, k 0: expected legal, got -1"),
    "InvalidIdsWeighted": ("invalid_ids", "failed", "prepare", "I2", "dispatched route weight bits at rank 0, token 0, k 0: expected 0 "),
    "PadsNotCounted": ("tokens:5,11", "failed", "prepare", "I3", "tokens_per_expert at rank 0, expert 0: expected 2"),
    "OwnCapacity": ("tokens:3,16", "failed", "prepare", "I4", "capacity of a rank's Buffer, against most ranks at rank 1: expected 4, got 16"),
    "OwnCapacityOfSeveral": ("tokens:3,16", "failed", "prepare", "I4", "against most ranks at rank 1: expected 4, got 16"),
    "OwnCapacityInOneBuffer": ("tokens:3,16", "failed", "prepare", "I4", "against most ranks at rank 1: expected 4, got 16"),
    "BucketTooSmall": ("tokens:3,16", "failed", "dispatch", "F1", "hidden_sh is torch.bfloat16 (16, 128), contiguous torch.bfloat16 (8, 128) is needed"),
    "WeightTwice": ("hot:5", "failed", "experts", "P1", "expert output at rank 0, row"),
    "WeightNever": ("hot:5", "failed", "experts", "P1", "expert output at rank 0, row"),
    "GeluForSilu": ("fill:real", "failed", "experts", "P1", "expert output at rank 0, row 0"),
    "TailRead": ("hot:5", "failed", "experts", "P1", ", got nan"),
    "GateAndUpSwapped": ("hot:5", "failed", "load", "I8", "gate weight bits at rank 0, expert 0"),
    "FirstExpertNotLoaded": ("hot:5", "failed", "load", "I8", "gate weight bits at rank 0, expert 0"),
    "RanksReversed": ("hot:5", "failed", "load", "I8", "gate weight bits at rank 0, expert 0"),
    "ReloadIgnored": ("reload", "failed", "load", "I8", "gate weight bits at rank 0, expert 0"),
    "ReloadMistyped": ("reload", "failed", "load", "F1", "at rank 0: expected return, got AttributeError: 'Layer' object has no attribute 'ful'"),
    "ReloadNotGathered": ("reload", "failed", "load", "I8", "gate weight bits at rank 0, expert 4"),
    "SlotsOfLatestLayer": ("hot:3+layers", "failed", "load", "I8", "gate weight bits at rank 0, expert 0"),
    "PrefetchIntoCopy": ("hot:5", "failed", "experts", "P1", "got nan; all home groups are right and the rows of all 1 used slots are wrong: the slot that the experts read is not the slot that prefetch filled"),
    "PrefetchIntoOtherCopy": ("hot:5", "failed", "experts", "P1", "the slot that the experts read is not the slot that prefetch filled"),
    "WeightsOfFirstLife": ("hot:5+lives", "failed", "load", "I8", "gate weight bits at rank 0, expert 0"),
    "ExpertsOfFirstLife": ("lives", "failed", "prepare", "I3", "tokens_per_expert at rank 0, expert 8"),
    "PlanOfFirstStep": ("hot:3+layers", "failed", "prefetch", "I6", "; combine with another plan"),
    "CutOneLate": ("tokens:5,11", "failed", "layer", "I16", "layer output bits at rank 0, token 0"),
    "NotCut": ("tokens:5,11", "failed", "layer", "F1", "the layer returned shape (16, 128) for 5 tokens of 128"),
    "PlanKeptAfterError": ("abort", "failed", "layer", "F1", "RuntimeError: prepare was called twice"),
    "WeightsKeptAfterError": ("abort", "failed", "prepare", "I2", "dispatched route weight bits at rank 0"),
    "BuffersLeft": ("hot:5", "failed", "life", "I15", "Buffers never destroyed at rank 0: expected 0, got 1"),
    "WithoutMoonEP": ("hot:5", "vacuous", "", "", "rank 1 made no dispatch in step 'base': MoonEP was not used"),
    "AcceptsFloat32": ("configurations", "failed", "life", "Z1", "hidden states of float32 at rank 0: expected an exception"),
    "RefusesEmptySteps": ("configurations", "failed", "life", "Z1", "no token on any rank at rank 0: expected nothing raised, got ValueError: no tokens"),
    "RefusesInvalidIds": ("invalid_ids+@duplicate", "failed", "layer", "F1", "at rank 0: expected return, got ValueError: an expert id is -1"),
    "RaisesOnEveryRank": ("hot:5", "failed", "layer", "F1", "at rank 0: expected return, got ValueError: out of memory (faulty_engine.py"),
    "TokensReplaced": ("hot:5", "failed", "prepare", "I1", "dispatched token bits at rank 1, token 0"),
    "TokensLeftOut": ("hot:5", "failed", "prepare", "I1", "dispatched tokens at rank 0: expected 16, got 8"),
    "IdsOfInt64": ("hot:5", "failed", "prepare", "O3", "form of dispatch.topk_ids at rank 0: expected int32 [16, 2], got int64"),
    # The last three cost their pool.
    "RaisesOnOneRank": ("hot:5", "failed", "layer", "F1", "at rank 1: expected return, got ValueError: out of memory"),
    "OwnCapacityWaits": ("tokens:3,16", "hung", "prepare", "I4", "capacity of a rank's Buffer, against most ranks"),
    "NeverReturns": ("hot:5", "hung", "layer", "F1", "in experts"),
    "SkipsWithoutTokens": ("tokens:0,3", "hung", "life", "F1", "rank 1 waits in construct for peers that do not come"),
}  # fmt: skip
#: Checkers that cannot cope with a defect yet; none of them hides where it is.
_LOSES_ITS_POOL = ("OwnCapacityWaits", "RaisesOnOneRank", "NeverReturns", "SkipsWithoutTokens")


def check_defect(name: str, deadline: float = DEADLINE) -> None:
    words, status, stage, check, says = FOUND_BY[name]
    verdict = faulty(name, words, deadline)
    first = verdict.first
    got = (verdict.status, first.stage, first.check) if first else (verdict.status, "", "")
    assert got == (status, stage, check), verdict.diagnosis
    assert says in verdict.diagnosis, verdict.diagnosis
    assert verdict.errors == [], "a defect of the engine is no error of the suite"
    crashed = {result.check for result in verdict.results if result.reason.startswith("the checker raised")}
    assert not crashed, "a defect of the engine crashes no checker"


def test_without_a_defect_the_same_cases_pass() -> None:
    for words in dict.fromkeys(words for words, *_ in FOUND_BY.values()):
        verdict = faulty("None_", words)
        assert verdict.status == "passed", verdict.diagnosis


def test_an_update_that_is_refused_and_changes_nothing_is_right() -> None:
    verdict = faulty("ReloadRefused", "hot:5+reload")
    assert verdict.status == "passed", verdict.diagnosis
    assert "kept" in {result.step for result in verdict.results}


@pytest.mark.parametrize("words", ["hot:5", "fill:real+tokens:5,11", "invalid_ids"])
def test_taps_do_not_change_results(words: str) -> None:
    verdict = faulty("TapsRemoved", words)
    assert verdict.status == "passed", verdict.diagnosis


@pytest.mark.parametrize("name", [name for name in FOUND_BY if name not in _LOSES_ITS_POOL])
def test_a_defect_is_found_at_its_stage(name: str) -> None:
    check_defect(name)


def test_catalogue_of_defects_is_complete() -> None:
    assert set(FOUND_BY) == set(defects()) - {"None_", "TapsRemoved", "ReloadRefused"}


@pytest.mark.parametrize(
    ("name", "also"),
    [
        ("CutOneLate", "M1"),
        ("WeightsKeptAfterError", "I11"),
        ("SlotsOfLatestLayer", "V8"),
        ("PadsNotCounted", "F1"),
        ("RanksReversed", "M1"),
    ],
)
def test_what_else_sees_a_defect(name: str, also: str) -> None:
    assert also in failed_checks(faulty(name, FOUND_BY[name][0]))


def test_some_defects_need_their_own_case() -> None:
    """Which is why the profile has it: the plain case cannot tell them from an honest engine."""
    for name, words in [("SourceRowForSlot", "hot:5"), ("GeluForSilu", "hot:5"), ("ReloadIgnored", "hot:5")]:
        assert faulty(name, words).status == "passed", f"{words} shows {name}: then use it"


def test_one_case_is_not_to_blame_for_another() -> None:
    assert "I15" in failed_checks(faulty("BuffersLeft", "hot:5"))
    assert faulty("None_", "hot:5").status == "passed"


def test_a_pool_survives_a_case_in_which_all_ranks_raise() -> None:
    faulty("None_", "hot:5")
    before = workers()
    assert faulty("RaisesOnEveryRank", "hot:5").status == "failed"
    after = faulty("None_", "hot:5")
    assert after.status == "passed", after.diagnosis
    assert (len(before), workers()) == (2, before)


def test_exit_codes_of_faulty_engines(cli: Cli) -> None:
    for name, code in [("WithoutMoonEP", 10), ("WeightTwice", 1)]:
        case = f"{SIZES}+hot:5+seed{defects().index(name)}"
        got, out, _ = cli("run", "--subject", FAULTY, "--case", case, "--shrink-seconds", "0")
        assert got == code, out
        assert f"exit code {code}" in out
        assert "proves: " not in out


def test_a_known_defect_is_waived_where_its_version_runs(tmp_path: Path, cli: Cli) -> None:
    case = f"{SIZES}+hot:5+abort+seed{defects().index('PlanKeptAfterError')}"
    waiver = (
        '[[waiver]]\nsubject = "faulty_engine"\nchecks = ["F1"]\ncase = "*+abort*"\nstep = "after"\n'
        'versions = "VERSIONS"\nlink = "docs/found.md, a-plan-kept"\nexpires = 2999-01-01\n'
    )

    def run(versions: str, one: str = case) -> tuple[int, str]:
        file = tmp_path / f"waivers{versions}.toml"
        file.write_text(waiver.replace("VERSIONS", versions))
        arguments = ("--subject", FAULTY, "--case", one, "--shrink-seconds", "0", "--waivers", str(file))
        code, out, _ = cli("run", *arguments)
        return code, out

    code, out = run(">=1.0")
    assert code == 0, out
    assert "1 waived" in out
    assert "passed)" not in out
    code, out = run("<1.0")
    assert (
        code,
        "failed at stage layer (check F1 returns: every call returns on every rank, step after)" in out,
    ) == (1, True), out
    code, out = run(">=0.9", f"{SIZES}+hot:5+abort")
    assert (code, "nothing failed: remove the waiver" in out) == (1, True), out


def test_a_known_refusal_leaves_nothing_to_show(tmp_path: Path, cli: Cli) -> None:
    """A waived F1 explains why the events of a case did not occur; nothing else does."""
    waivers = tmp_path / "waivers.toml"
    waivers.write_text(
        '[[waiver]]\nsubject = "faulty_engine"\nchecks = ["F1"]\ncase = "*+invalid_ids*"\n'
        'link = "docs/found.md, ids-refused"\nexpires = 2999-01-01\n'
    )
    seed = defects().index("RefusesInvalidIds")

    def run(*words: str) -> tuple[int, str]:
        cases = [part for one in words for part in ("--case", f"{SIZES}+{one}+seed{seed}")]
        code, out, _ = cli("run", "--subject", FAULTY, *cases, "--shrink-seconds", "0", "--waivers", str(waivers))
        return code, out

    known = "invalid_ids+@duplicate"
    assert run(known)[0] == 0
    code, out = run(known, "hot:5")
    assert (
        code,
        "proves: the MoE layer of faulty_engine:Faulty 1.0 is right on these cases, but for the case " in out,
    ) == (0, True), out
    assert "with a known defect; values were compared at" in out
    code, out = run("hot:5+@empty_rank")
    assert (code, "the case claims @empty_rank" in out) == (10, True), out


def test_one_rank_that_raises_does_not_stop_the_suite() -> None:
    check_defect("RaisesOnOneRank")


def test_a_raise_is_itself_where_the_capacity_is_below_that_of_the_case() -> None:
    """The plan of the others has the shape of what they dispatched, and is not to blame for it."""
    verdict = faulty("RaisesOnOneRank", "tokens:3,4")
    assert verdict.first is not None
    assert (verdict.first.stage, verdict.first.check) == ("layer", "F1"), verdict.diagnosis
    assert "at rank 1: expected return, got ValueError: out of memory" in verdict.diagnosis
    assert failed_checks(verdict) == {"F1"}


def test_a_hang_ends_within_the_deadline_and_the_next_case_has_a_new_pool() -> None:
    assert faulty("None_", "hot:5").status == "passed"
    before, start = workers(), time.monotonic()
    check_defect("NeverReturns", SHORT)
    assert time.monotonic() - start > SHORT
    after = faulty("None_", "tokens:0,3")
    assert after.status == "passed", after.diagnosis
    assert set(workers()).isdisjoint(before)


def test_a_capacity_that_one_rank_has_to_build_is_told_before_the_hang() -> None:
    check_defect("OwnCapacityWaits", SHORT)


def test_a_rank_that_nobody_waits_with_is_a_deadlock() -> None:
    check_defect("SkipsWithoutTokens", SHORT)


# Engines that cannot run here.


def test_an_engine_that_cannot_be_imported_is_not_run(cli: Cli) -> None:
    subject = ("--subject", "faulty_engine:NotInstalled", "--case", f"{SIZES}+hot:5")
    code, out, _ = cli("run", *subject)
    reason = (
        "faulty_engine:NotInstalled cannot run here: ImportError: libengine.so: cannot open shared object file"
    )
    assert code == 5
    assert f"not run, 1 cases: {reason}" in out
    assert "passed" not in out
    code, _, err = cli("run", *subject, "--require", "load=faulty_engine")
    assert code == 1
    assert f"--require load=faulty_engine is not met: {reason}" in err


def test_a_torchvision_of_another_torch_is_recognised(cli: Cli) -> None:
    code, out, _ = cli("run", "--subject", "faulty_engine:OtherTorchvision", "--case", f"{SIZES}+hot:5")
    assert code == 5
    assert f"torchvision was built for another torch than {torch.__version__}: install the torchvision of" in out


def test_an_engine_of_the_other_generation_is_refused_before_any_case() -> None:
    with pytest.raises(CaseError) as error:
        make_job(Options(subject="faulty_engine:OtherGeneration"))
    said = str(error.value)
    assert "passes local_first_pool to moonep's Buffer, which takes S, H, K, E, num_ep_ranks" in said
    assert "they are of different API generations" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_device_that_is_not_there_is_not_run(cli: Cli) -> None:
    code, out, _ = cli("run", "--subject", GOOD, "--device", "cuda", "--case", f"{SIZES}+hot:5")
    assert code == 5
    assert "not run, 1 cases: " in out
    assert "passed" not in out


# The stand-in on the import path.


def test_a_real_moonep_keeps_the_stand_in_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(SHIM) in engines.environment(GOOD, None, "cpu")["PYTHONPATH"].split(os.pathsep)
    (tmp_path / "moonep").mkdir()
    (tmp_path / "moonep" / "__init__.py").write_text("class Buffer: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert str(SHIM) not in engines.environment(GOOD, None, "cpu")["PYTHONPATH"].split(os.pathsep)
    for first, second in ((SHIM, tmp_path), (tmp_path, SHIM)):
        path = os.pathsep.join([str(first), str(second)])
        done = subprocess.run(
            [sys.executable, "-c", "import moonep; print(moonep.__file__)"],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        if first == SHIM:
            assert "the stand-in for moonep is on the import path beside a real moonep" in done.stderr
        else:
            assert done.stdout.strip() == str(tmp_path / "moonep" / "__init__.py")


def test_path_and_device_reach_the_workers() -> None:
    got = engines.environment(GOOD, "some/folder", "cuda")
    assert got["PYTHONPATH"].split(os.pathsep) == ["some/folder", str(SHIM), str(ENGINES)]
    assert got[engines.DEVICE] == "cuda"
