"""Every check can fail: a corrupted trace that it catches at its own stage, and nothing else on a clean one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moonep_validate.case import Case, Spec
from moonep_validate.checks import CHECKS, Compared
from moonep_validate.engine import judge
from moonep_validate.facts import Step
from moonep_validate.trace import Call, Part, Trace
from moonep_validate.verdict import Result, Verdict
from tests.self.conftest import CASE

REAL = CASE.but(fill=Spec("real"))
POISONS = CASE.but(scenario=Spec("two_poisons"))


def call(trace: Trace, op: str, rank: int, step: str = "base") -> Call:
    return next(c for c in trace.calls[rank] if c.op == op and c.step == step)


def tensor(trace: Trace, op: str, name: str, rank: int = 1, step: str = "base") -> Tensor:
    return call(trace, op, rank, step).tensors[name]


def results(verdict: Verdict, check: str) -> list[Result]:
    return [result for result in verdict.results if result.check == check]


def occupied_row(trace: Trace, rank: int) -> int:
    """A row of ``rank`` that holds a route."""
    step = Step(trace, "base")
    return int((step.row_route[rank] >= 0).nonzero()[0][0])


def pad_row(trace: Trace, rank: int) -> int:
    step = Step(trace, "base")
    return int(((step.row_route[rank] < 0) & (step.row_group[rank] < step.layout.num_groups)).nonzero()[0][0])


@dataclass(frozen=True)
class Corruption:
    """A change to a trace, the check that must catch it, and what its finding must say."""

    check: str
    stage: str
    says: str
    change: Callable[[Trace], None]
    case: Case = CASE


def one_row_to_another_rank(trace: Trace) -> None:
    step = Step(trace, "base")
    dst = tensor(trace, "dispatch", "dst", rank=2)
    d, row = int(step.rank_of[2, 0, 0]), int(step.row_of[2, 0, 0])
    dst[0] = (d + 1) % 4 * step.num_rows + row


def two_routes_swap_rows(trace: Trace) -> None:
    step = Step(trace, "base")
    dst = tensor(trace, "dispatch", "dst", rank=0)
    ids = step.topk[0].flatten()
    other = next(i for i in range(3, len(ids)) if ids[i] != ids[0])
    dst[0], dst[other] = int(dst[other]), int(dst[0])


def stats_off_by_one(trace: Trace) -> None:
    tensor(trace, "dispatch", "remote_stats")[1] += 1


def hidden_bit(trace: Trace) -> None:
    rows = tensor(trace, "dispatch", "rows")
    rows[occupied_row(trace, 1), 5] += 1.0


def weight_bit(trace: Trace) -> None:
    weights = tensor(trace, "dispatch", "row_weights").view(torch.int32)
    weights[occupied_row(trace, 1)] ^= 1


def minus_zero_for_zero(trace: Trace) -> None:
    rows = tensor(trace, "dispatch", "rows").view(torch.int16)
    rows[pad_row(trace, 1), 3] = -0x8000


def padding_weight(trace: Trace) -> None:
    tensor(trace, "dispatch", "row_weights")[pad_row(trace, 1)] = 0.5


def stale_slot(trace: Trace) -> None:
    pool = tensor(trace, "prefetch", "slot_up")
    slot = int((tensor(trace, "prefetch", "experts_to_copy")[1] >= 0).nonzero()[0])
    pool[slot, 7, 3] += 1


def expert_element(trace: Trace) -> None:
    tensor(trace, "experts", "out")[occupied_row(trace, 1), 2] += 16.0


def expert_element_beyond_bound(trace: Trace) -> None:
    out = tensor(trace, "experts", "out")
    out[occupied_row(trace, 1), 2] += 0.25


def combined_element(trace: Trace) -> None:
    tensor(trace, "combine", "hidden")[3, 4] += 16.0


def weights_of_two_routes(trace: Trace) -> None:
    weights = tensor(trace, "combine", "topk_weights").view(torch.int32)
    weights[2, 1] ^= 1


def layer_element(trace: Trace) -> None:
    tensor(trace, "layer", "out")[3, 4] += 16.0


def layer_row_scaled(trace: Trace) -> None:
    tensor(trace, "layer", "out")[3] *= 1.25


def other_poison_shows(trace: Trace) -> None:
    out = tensor(trace, "layer", "out", step="other_poison")
    out.view(torch.int16)[0, 0] ^= -0x8000


def call_raises(trace: Trace) -> None:
    broken = call(trace, "combine", 1)
    broken.error = {
        "type": "RuntimeError",
        "message": "illegal memory access",
        "where": "x.py:1 in f",
        "peer": False,
    }


def call_never_returns(trace: Trace) -> None:
    call(trace, "combine", 1).done = False
    trace.hung.append({"rank": 1, "stack": "File a\n in spin\n", "deadline": 2.0})


CORRUPTIONS = [
    Corruption("L3", "plan", "rows per rank at rank", one_row_to_another_rank),
    Corruption("L4", "plan", "expert of the row at rank", two_routes_swap_rows),
    Corruption("X1", "plan", "remote_stats at rank 1, field 1", stats_off_by_one),
    Corruption("D1", "dispatch", "hidden bits at rank 1, row", hidden_bit),
    Corruption("D1", "dispatch", "route weight bits at rank 1, row", weight_bit),
    Corruption("D2", "dispatch", "expected 0 (0x0000), got -0 (0x8000)", minus_zero_for_zero),
    Corruption("D2", "dispatch", "padding row_weights bits at rank 1, row", padding_weight),
    Corruption("W1", "prefetch", "up weight bits at rank 1, slot 0, expert 1, weight row 7", stale_slot),
    Corruption("P1", "experts", "expert output at rank 1, row", expert_element),
    Corruption("P1", "experts", "expert output at rank 1, row", expert_element_beyond_bound, REAL),
    Corruption("C1", "combine", "combined hidden at rank 1, token 3, column 4", combined_element),
    Corruption("C2", "combine", "gathered route weight bits at rank 1, token 2, k 1", weights_of_two_routes),
    Corruption("M1", "layer", "layer output at rank 1, token 3, column 4", layer_element),
    Corruption("M1", "layer", "layer output at rank 1, token 3", layer_row_scaled, REAL),
    Corruption("I10", "layer", "layer.out of step 'other_poison' against 'base'", other_poison_shows, POISONS),
    Corruption("F1", "combine", "RuntimeError: illegal memory access (x.py:1 in f)", call_raises),
    Corruption("F1", "combine", "no return after 2.0 s; it is in File a in spin", call_never_returns),
]


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda c: f"{c.check}-{c.change.__name__}")
def test_corruption_is_caught_at_its_stage(corruption: Corruption, recorded: Callable[..., Trace]) -> None:
    clean = judge(recorded(corruption.case))
    assert clean.ok, clean.diagnosis
    trace = recorded(corruption.case)
    corruption.change(trace)
    verdict = judge(trace)
    caught = [r for r in results(verdict, corruption.check) if r.status in ("failed", "hung")]
    assert caught, f"{corruption.check} missed {corruption.change.__name__}: {verdict.diagnosis}"
    assert {r.stage for r in caught} == {corruption.stage}
    assert any(corruption.says in str(finding) for r in caught for finding in r.findings), verdict.diagnosis
    assert verdict.first is not None
    assert verdict.first.stage == corruption.stage


def test_every_check_has_a_negative_control() -> None:
    assert {c.check for c in CORRUPTIONS} == {*CHECKS, "F1"}


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_without_body_is_vacuous(check: str, recorded: Callable[..., Trace]) -> None:
    trace = recorded(POISONS)
    empty = replace(CHECKS[check], function=lambda s: iter(()))
    verdict = judge(trace, [empty])
    assert verdict.status == "vacuous"
    assert {r.status for r in results(verdict, check)} == {"vacuous"}


def test_every_check_examines_something_on_a_clean_case(recorded: Callable[..., Trace]) -> None:
    for result in judge(recorded(POISONS)).results:
        assert result.examined > 0 or result.check == "I10", result


def test_a_crashing_check_is_unknown_and_no_pass(recorded: Callable[..., Trace]) -> None:
    def crash(s: Step) -> Iterator[Compared]:
        raise ZeroDivisionError("in the judge")

    verdict = judge(recorded(), [replace(CHECKS["L3"], function=crash)])
    assert verdict.status == "unknown"
    assert results(verdict, "L3")[0].reason == "the checker raised ZeroDivisionError: in the judge"


def test_a_missing_tap_is_not_run_with_its_reason(recorded: Callable[..., Trace]) -> None:
    trace = recorded()
    del call(trace, "combine", 2).tensors["hidden"]
    missing = results(judge(trace), "C1")[0]
    assert missing.status == "not_run"
    assert missing.reason == "rank 2 has no combine.hidden in step 'base'"


def test_drop_in_checks_inform_where_upstream_policy_is_not_promised(recorded: Callable[..., Trace]) -> None:
    trace = recorded()
    stats_off_by_one(trace)
    assert judge(trace).status == "failed"
    trace.parts["plan"] = Part("real", "other_moonep", "1.0", policy="legal")
    verdict = judge(trace)
    assert verdict.status == "passed"
    assert results(verdict, "X1")[0].status == "failed"
    assert not results(verdict, "X1")[0].gates
    assert results(verdict, "X1")[0].level == "real"


def test_equal_payloads_on_two_ranks_are_vacuous(recorded: Callable[..., Trace]) -> None:
    trace = recorded()
    for rank in (1, 3):
        call(trace, "layer", rank).tensors["hidden"] = tensor(trace, "layer", "hidden", rank=0)
    verdict = judge(trace)
    assert "ranks 0 and 1 hold the same payload in step 'base'" in verdict.vacuous
    assert "ranks 0 and 3 hold the same payload in step 'base'" in verdict.vacuous
