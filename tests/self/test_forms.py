"""The form of every tap: another one is found at its own stage, on its own rank, whoever returns it and on how many."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moonep_validate.cases.case import Case
from moonep_validate.faults import FAULTS
from moonep_validate.judge.checks import axes, differ, differ_bits
from moonep_validate.judge.facts import Malformed, Step
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.judge import judge
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.record import record
from moonep_validate.pipeline.run import run_case
from moonep_validate.trace.recording import AMOUNTS
from moonep_validate.trace.trace import Trace, form_of
from tests.self.conftest import CASE
from tests.self.corruptions import call, results, tensor
from tests.self.test_faults import KILLED_BY, job_with

OF_FORM = [id for id in FAULTS if id.endswith("-form")]
OF_PLANS = [id for id in FAULTS if id.endswith("-changes-plan")]
OUTSIDE = Case.parse("genB+R2+E8+K2+S5+pad4+hot:1")
BODY = """
import torch
from moonep_validate.reference import moonep_{generation}
__version__ = "9.9"
class Buffer(moonep_{generation}.Buffer):
    def combine(self, *a, **k):
        hidden, weights, *rest = super().combine(*a, **k)
        {change}
        return (hidden, weights, *rest)
"""
#: What a module from outside does to what its combine returns -> (tensor, ranks that are named, what is said).
CHANGES = {
    "hidden = hidden[:-1] if self.rank else hidden": ("hidden", [1], "got bfloat16 [4, 128]"),
    "hidden = torch.cat([hidden, hidden[:2] * 9]) if self.rank else hidden": (
        "hidden",
        [1],
        "got bfloat16 [7, 128]",
    ),
    "weights = weights[:-1] if self.rank else weights": ("topk_weights", [1], "got float32 [4, 2]"),
    "hidden = hidden.double()": ("hidden", [0, 1], "got float64 [5, 128]"),
    "hidden = hidden.float()": ("hidden", [0, 1], "got float32 [5, 128]"),
    "hidden = torch.stack([hidden, hidden], 2)[..., 0]": ("hidden", [0, 1], "[5, 128] on cpu, not contiguous"),
}


def all_words(id: str) -> list[str]:
    """A fault with every combination of words of its parameters; the catalogue takes one word at a time."""
    choices = [[f"{name}={word}" for word in words] for name, words in FAULTS[id].words.items() if name != "rank"]
    texts = [",".join(one) for one in itertools.product(*choices, ["rank=1", "rank=all"])]
    return [f"{id}:{text}" for text in texts]


@pytest.mark.parametrize("text", [text for id in OF_FORM + OF_PLANS for text in all_words(id)])
def test_another_form_or_a_changed_plan_is_found_at_its_stage_on_its_rank(text: str) -> None:
    """Generation B; test_faults.py tries them in A."""
    id = text.partition(":")[0]
    status, check, sizes = KILLED_BY[id]
    verdict = run_case(Job(faults=job_with(text).faults), Case.parse(f"genB+{sizes}"))[1]
    first = verdict.first
    assert first is not None, f"{text} survives"
    assert (verdict.status, first.stage, first.check) == (status, FAULTS[id].stage, check), verdict.diagnosis
    assert f"--fault {text}" in verdict.command
    named = [finding.place["rank"] for finding in first.findings]
    assert set(named) == {1} if "rank=all" not in text else {0, 1} <= set(named), verdict.diagnosis


@pytest.mark.parametrize("amount", AMOUNTS)
def test_the_noted_form_is_judged_whatever_is_recorded(amount: str) -> None:
    job = Job(faults=job_with("combine-form:how=short").faults, recording=amount)
    verdict = run_case(job, CASE)[1]
    assert verdict.first is not None
    assert (verdict.first.check, verdict.first.findings[0].place) == ("O6", {"rank": 1}), verdict.diagnosis
    assert run_case(Job(recording=amount), CASE)[1].ok


@pytest.mark.parametrize("generation", ["A", "B"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_whose_combine_returns_another_form_is_found(
    change: str, generation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"form_{generation}_{list(CHANGES).index(change)}"
    (tmp_path / f"{name}.py").write_text(BODY.format(generation=generation.lower(), change=change))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = make_job(Options(moonep_module=name, deadline=30.0))
    first = run_case(job, OUTSIDE.but(generation=generation))[1].first
    which, ranks, said = CHANGES[change]
    assert first is not None, change
    assert (first.stage, first.check) == ("combine", "O6")
    assert [(f.what, f.place["rank"]) for f in first.findings] == [(f"form of combine.{which}", r) for r in ranks]
    assert said in str(first.findings[0])


def test_what_has_another_form_is_compared_with_nothing(recorded: Callable[..., Trace]) -> None:
    """Stacking would promote its dtype, and equal values would pass."""
    trace = recorded()
    call(trace, "combine").tensors["hidden"] = tensor(trace, "combine", "hidden").double()
    with pytest.raises(Malformed, match=r"rank 1: combine\.hidden is float64 \[7, 24\]"):
        Step(trace, "base").tap("combine", "hidden")
    by_check = {r.check: r for r in judge(trace).results if r.step == "base"}
    assert {by_check[id].status for id in ("C1", "C3", "I16")}.isdisjoint({"passed", "failed"})
    assert by_check["O6"].status == "failed"


def test_the_rank_that_differs_is_named_and_not_rank_0(recorded: Callable[..., Trace]) -> None:
    trace = recorded()
    call(trace, "dispatch", 0).put(hidden=tensor(trace, "dispatch", "hidden", 0)[:-1])
    tensor(trace, "dispatch", "experts_to_copy", 0)[2, 1] += 1
    for check in ("I4", "L8", "O3"):
        found = [finding for result in results(judge(trace), check) for finding in result.findings]
        assert [finding.place["rank"] for finding in found if "against" in finding.what or check == "O3"] == [0]


def test_values_of_another_shape_or_dtype_are_never_equal() -> None:
    place = axes("row")
    one = torch.zeros(3)
    assert "dtype of x" in str(differ_bits("x", one, one.int(), place).findings[0])
    assert differ_bits("x", one, one[:2], place).findings
    assert differ("x", torch.zeros(2), torch.zeros(3), place, bad=torch.zeros(3, dtype=torch.bool)).findings
    assert not differ("x", 1, one, place, bad=torch.zeros(3, dtype=torch.bool)).findings


def test_a_form_is_noted_before_the_copy_loses_it() -> None:
    strided = torch.zeros(4, 2, dtype=torch.int64).T
    form = {"shape": [2, 4], "dtype": "int64", "device": "cpu", "contiguous": False}
    assert form_of(strided) == form
    trace = record(Job(), CASE)
    for calls in trace.calls:
        for one in calls:
            assert set(one.tensors) == set(one.info.get("forms", {})), one.op
