"""What a finding says beside its numbers: only what alone fits, and of a digest no more than that it differs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moonep_validate.cases.case import Case
from moonep_validate.data.problem import batch, expert_weights
from moonep_validate.faults import parse_fault
from moonep_validate.formats.stored import FORMATS
from moonep_validate.judge.checks.identity import said_of
from moonep_validate.judge.oracle.arithmetic import Arithmetic
from moonep_validate.judge.oracle.dense import expert_rows
from moonep_validate.judge.verdict import Finding
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.run import run_case

CASE = Case.parse("genB+R1+E4+K2+S3+H16+I8")
WEIGHTS = list(expert_weights(CASE, 0).values())
EXACT = Arithmetic.of(CASE, ())


@pytest.mark.parametrize(
    ("weights", "factors", "said"),
    [
        ((0.5,), (1.0,), ""),  # without its weight, or twice as much
        ((0.5, 0.25), (1.0, 1.0), "; it is the row without its route weight"),
        ((0.5, 0.25), (1.0, 0.5), "; it is the row times 2**1"),
        ((0.5, 0.25), (0.25, 0.0625), "; it is the row with the route weight applied twice"),
        ((0.5, 0.25), (3.0, 3.0), ""),
    ],
)
def test_a_remark_is_the_only_one_that_fits(
    weights: tuple[float, ...], factors: tuple[float, ...], said: str
) -> None:
    x, mine = batch(CASE, 0).hidden[: len(weights)], [weight[1] for weight in WEIGHTS]
    came = expert_rows(x, mine, torch.tensor(factors), EXACT)[0]
    assert came.abs().max() > 0
    rows = x, torch.tensor(weights), came
    assert said_of(rows, 1, WEIGHTS, np.full(4, -1), EXACT, FORMATS["bf16"]) == said


@pytest.mark.parametrize(
    ("fault", "what", "axes"),
    [
        ("row-of-another-token", "digest of hidden", ("rank", "row", "source_rank", "token", "k", "expert")),
        ("slot-not-filled", "digest of gate weight", ("rank", "slot", "expert")),
    ],
)
@pytest.mark.parametrize("recording", ["digest", "columns:1"])
def test_a_digest_that_differs_is_no_number_of_a_column(
    fault: str, what: str, axes: tuple[str, ...], recording: str
) -> None:
    job = Job(faults=(parse_fault(fault),), recording=recording)
    first = run_case(job, Case.parse("genB+R4+E8+K2+S9+hot:5+@slot_used"))[1].first
    assert first is not None
    (found,) = [one for one in first.findings if one.what == what]
    assert isinstance(found, Finding)
    assert (tuple(found.place), found.count) == (axes, 1)
    assert ": the bits differ" in found.actual
    assert int(found.expected, 16) != int(found.actual.partition(":")[0], 16)
