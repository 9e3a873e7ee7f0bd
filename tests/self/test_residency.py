"""Where weights lie: gaps behind slots, a rank's own experts first, and other tensors after a second load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.cases.layout import local_first_rows
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.run import run_case
from moonep_validate.subjects.buffer.api import Slots

CASE = Case.parse("genA+R3+E6+K2+S3")


@dataclass(frozen=True)
class Plan:
    experts_to_copy: Tensor
    zero_fill_ranges: Tensor = field(default_factory=lambda: torch.zeros(0, 2))
    dst: Tensor = field(default_factory=lambda: torch.zeros(0))


class Alone:
    """As much of a ``Comm`` as generation A's weights need."""

    rank, device = 1, torch.device("cpu")


def test_the_chunk_of_the_rank_itself_is_the_first() -> None:
    assert local_first_rows(CASE, 1).tolist() == [[4, 5], [0, 1], [2, 3]]
    assert local_first_rows(CASE, 0).flatten().tolist() == list(range(6))


def test_rows_are_found_by_experts_plans_and_groups() -> None:
    rows = torch.from_numpy(local_first_rows(CASE, 1))
    comm: Any = Alone()
    slots = Slots(CASE, comm, {"gate": (2,)}, {"gate": torch.uint8}, gap=1, rows=lambda what: rows)
    whole = torch.arange(6, dtype=torch.uint8)[:, None].expand(6, 2)
    slots.load({"gate": whole})
    sources = slots.sources("gate")
    assert sources is not None
    assert sources[:, 0].tolist() == [2, 3, 4, 5, 0, 1]
    assert slots.local("gate")[:, 0].tolist() == [2, 3]
    assert slots.groups("gate")[:6, 0].tolist() == [0, 1, 2, 3, 4, 5]
    plan = Plan(torch.tensor([[-1, 3], [0, 5], [2, -1]], dtype=torch.int32))
    assert slots.plan(plan).experts_to_copy.tolist() == [[-1, 1], [4, 3], [0, -1]]
    assert slots.plan(plan).experts_to_copy.dtype == torch.int32
    assert (len(slots.slots("gate")), len(slots.guards("gate"))) == (2, 1)
    before = slots.prefetch_arguments()["full_gate_weight"]
    slots.renew()
    assert before.data_ptr() != slots.prefetch_arguments()["full_gate_weight"].data_ptr()


@pytest.mark.parametrize("generation", ["A", "B"])
def test_each_load_is_judged_and_so_is_the_gap(generation: str) -> None:
    case = Case.parse(f"gen{generation}+R3+E12+K3+S7+H24+I8+hot:1+pools")
    _, verdict = run_case(Job(), case)
    assert verdict.ok
    judged = {(result.check, result.step): result.examined for result in verdict.results if result.examined}
    assert {("W1", "base"), ("W1", "replaced"), ("W2", "base"), ("W2", "replaced")} <= set(judged)
    assert (("W6", "replaced") in judged) == (generation == "A")
