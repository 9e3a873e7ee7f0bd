"""Counting taps: what they count, in which process, and what a pair's path check makes of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moonep_validate.served.answers import Answers, PathTaken, Who
from moonep_validate.served.child import _merged
from moonep_validate.served.prompts import make_prompts
from moonep_validate.served.request import share
from moonep_validate.served.taps.counting import count, path_taken, real_rows, variables
from tests.self.served_data import answer, side


class Fake:
    """A Buffer that says what it is told to."""

    def __init__(self, B: int = 2, group: Any = None) -> None:
        self.out: Any = None

    def dispatch(self, *args: Any) -> Any:
        return self.out


def dispatched(copied: list[int], weights: Sequence[float], ends: list[int]) -> Any:
    plan = SimpleNamespace(experts_to_copy=torch.tensor(copied))
    return torch.zeros(len(weights), 4), torch.tensor(weights), torch.tensor(ends), plan


def test_counts_dispatches_slots_and_real_rows(tmp_path: Path) -> None:
    count(Fake, tmp_path)
    buffer = Fake(B=2)
    # Groups: two of own experts (rows 0-2, 2-4), two slots (rows 4-7, 7-8).
    for copied, weights in (([3, -1], [1, 1, 1, 1, 0.5, 0, 0.2, 0]), ([-1, -1], [1] * 8)):
        buffer.out = dispatched(copied, weights, [2, 4, 7, 8])
        buffer.dispatch()
    assert path_taken(tmp_path) == PathTaken([2], [1], [2])


def test_real_rows_are_those_with_a_weight() -> None:
    weights, ends = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0]), torch.tensor([2, 3, 5])
    assert [real_rows(weights, ends, slots) for slots in (0, 1, 2, 3)] == [0, 1, 2, 0]
    assert real_rows(None, ends, 2) == 0


def test_a_rank_without_counts_has_zeros(tmp_path: Path) -> None:
    from moonep_validate.served.taps.counting import Counts

    assert path_taken(tmp_path) == PathTaken([], [], [])
    counts = Counts(tmp_path)
    counts.place(1, 3)
    counts.add(4, 2, 9)
    assert path_taken(tmp_path) == PathTaken([0, 4, 0], [0, 2, 0], [0, 9, 0])
    (tmp_path / "cut.counts").write_bytes(b"123")
    assert path_taken(tmp_path).dispatches == [0, 4, 0]


PROGRAM = """
import sys, torch
from moonep import Buffer
print(hasattr(Buffer.dispatch, "__wrapped__"), "moonep_validate" in str(sys.modules["moonep"].__file__))
"""


@pytest.mark.parametrize("tapped", [True, False])
def test_every_process_with_the_variables_is_tapped(tmp_path: Path, tapped: bool) -> None:
    shim = str(Path(__file__).parents[2] / "moonep_validate" / "subjects" / "shim")
    environment = dict(variables(tmp_path, None))
    if not tapped:
        del environment["MOONEP_VALIDATE_TAPS"]
        environment["PYTHONPATH"] += f":{shim}"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout.split(), done.stderr) == ([str(tapped), "True"], "")


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one')\n")
    environment = dict(variables(tmp_path, str(tmp_path)))
    done = subprocess.run([sys.executable, "-c", ""], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("the other one\n", "")


def test_ranks_share_prompts_and_keep_step() -> None:
    prompts = make_prompts(512, 7)
    shares = [share(prompts, rank, 2) for rank in range(2)]
    assert [len(one) for one in shares] == [4, 4]
    assert {one.name for part in shares for one in part} == {one.name for one in prompts}
    assert share(prompts, 0, 1) == prompts


def test_answers_of_ranks_are_one_side() -> None:
    who = Who("fake")
    merged: Answers = _merged([side(who, [answer("a"), answer("b")]), side(who, [answer("c"), answer("a")])])
    assert sorted(merged.run("greedy")) == ["a", "b", "c"]
