"""What the recorder keeps: digests that move with rows and see each bit, and verdicts that say what was not judged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.judge.checks import CHECKS
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.run import run_case
from moonep_validate.trace.recording import DIGEST, Recording, chosen_columns, digest, sampled_rows

CASE = Case.parse("genB+R4+E12+K3+S7+H24+I20+pad5+hot:1")
NOT_FULL = ("plan", "digest", "columns:3")


@pytest.mark.parametrize("width", [1, 3, 8, 24])
def test_a_digest_is_zero_for_zeros_and_sees_every_bit(width: int) -> None:
    rows = torch.arange(5 * width, dtype=torch.int16).view(5, width)
    rows[3] = 0
    before = digest(rows)
    assert before.shape == (5, 2)
    assert before[3].tolist() == [0, 0]
    for column in range(width):
        for bit in range(16):
            changed = rows.clone()
            changed[1, column] ^= -0x8000 if bit == 15 else 1 << bit
            differs = digest(changed) != before
            assert differs[1].all(), (column, bit)
            assert not differs[[0, 2, 3, 4]].any()


def test_a_digest_knows_order_signs_of_zero_and_nan_payloads() -> None:
    rows = torch.tensor([[1.0, 2.0], [2.0, 1.0], [0.0, 0.0], [-0.0, 0.0], [float("nan"), 0.0]]).bfloat16()
    assert len({tuple(one) for one in digest(rows).tolist()}) == 5
    weights = torch.arange(2 * 3 * 8, dtype=torch.uint8).view(2, 3, 8)
    assert digest(weights).shape == (2, 1, 2)
    assert digest(weights[:1]).equal(digest(weights)[:1]), "of an expert, wherever it lies"


def test_policies_keep_what_they_say() -> None:
    rows = torch.randn(6, 40).bfloat16()
    ids = torch.arange(6 * 40).view(6, 40)
    assert Recording.parse("full").of("rows", rows)["rows"] is rows
    assert Recording.parse("plan").of("rows", rows)["rows"].shape == (6, 0)
    assert Recording.parse("digest").of("rows", rows)["rows"].equal(digest(rows))
    kept = Recording.parse("columns:4").of("rows", rows)
    assert kept["rows"].equal(rows[:, chosen_columns(40, 4)])
    assert kept["rows" + DIGEST].equal(digest(rows))
    assert {0, 39} <= set(chosen_columns(40, 4))
    for level in ("plan", "digest", "columns"):
        assert Recording.parse(level).of("ids", ids)["ids"] is ids, "integers are always kept"
    assert sampled_rows(3).tolist() == [0, 1, 2]
    assert len(sampled_rows(1000)) == 8
    assert int(sampled_rows(1000).max()) < 1000


@pytest.mark.parametrize("text", ["some", "columns:0", "columns:", "columns:x", "digest:4", ""])
def test_unknown_policies_are_refused(text: str) -> None:
    with pytest.raises(CaseError, match="write one of plan, digest, columns, full"):
        Recording.parse(text)


@pytest.mark.parametrize("generation", ["A", "B"])
@pytest.mark.parametrize("keep", NOT_FULL)
def test_right_code_passes_and_what_needs_more_says_so(keep: str, generation: str) -> None:
    trace, verdict = run_case(make_job(Options(record=keep)), CASE.but(generation=generation))
    assert verdict.ok, verdict.diagnosis
    assert trace.recording == keep
    by_check = {result.check: result for result in verdict.results if result.step == "base"}
    for id, check in CHECKS.items():
        if not Recording.parse(keep).reaches(check.needs) and id in by_check:
            result = by_check[id]
            assert (result.status, result.reason) == (
                "not_applicable",
                f"it needs --record {check.needs}, the recorder kept {keep}",
            )
    assert by_check["M1"].status == "not_applicable"
    assert "--record" in make_job(Options(record=keep)).reproducer


#: Fault -> the first check that finds it, and the least amount with which it does.
FOUND = {
    "row-used-twice": ("L2", "plan"),
    "row-of-another-token": ("D1", "digest"),
    "pads-not-zeroed": ("D2", "digest"),
    "slot-not-filled": ("W1", "digest"),
    "unused-slot-written": ("W2", "digest"),
    "dispatch-changes-input": ("U1", "digest"),
    "duplicates-dropped": ("C1", "columns:16"),
    "gate-without-silu": ("P1", "columns:16"),
}


@pytest.mark.parametrize(("fault", "check", "keep"), [(f, *found) for f, found in FOUND.items()])
def test_faults_are_found_in_what_is_kept(fault: str, check: str, keep: str) -> None:
    _, verdict = run_case(make_job(Options(fault=(fault,), record=keep)), CASE)
    assert verdict.first is not None
    assert verdict.first.check == check
    assert f"--record {keep.removesuffix(':16')} --fault {fault}" in verdict.command


def test_the_first_column_is_not_all_that_is_judged() -> None:
    """A bit in a column that is not kept is in the digest."""
    trace, verdict = run_case(make_job(Options(record="columns:1")), CASE)
    rows = trace.calls[1][-1]
    dispatch = next(call for call in trace.calls[1] if call.op == "dispatch")
    assert verdict.ok
    assert rows is not dispatch
    dispatch.tensors["rows" + DIGEST] = dispatch.tensors["rows" + DIGEST].clone()
    dispatch.tensors["rows" + DIGEST][0, 0] ^= 1
    from moonep_validate.pipeline.judge import judge

    failed = judge(replace(trace)).first
    assert failed is not None
    assert failed.check == "D1"
    assert failed.findings[0].what == "digest of hidden"
    assert failed.findings[0].actual.endswith("the bits differ")
