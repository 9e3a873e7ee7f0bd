"""Sampled MoE layer calls: which are chosen, what is judged in them, and what a pair says of that."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moonep_validate.cases.case import Case
from moonep_validate.served import samples
from moonep_validate.served.answers import Layers, Who, read, write
from moonep_validate.served.pair import judge_pair
from moonep_validate.served.taps.schedule import Amount, Schedule
from tests.self.served_data import answer, side

RIGHT = "the MoE layers are right in 4 sampled calls of MoE layers 0, 1"
#: What the ranks of a stand-in for an engine do wrong, and how many megabytes of a call are kept -> what is said.
SERVED = {
    "-64": RIGHT,
    "-0": RIGHT,
    "buffer-only-64": RIGHT,
    "not-sampled-64": "no call of a MoE layer was sampled",
    "no-prefetch-64": "stage prefetch (I6 prefetch-in-time",
    "other-memory-64": "MoE layer 1, stage prefetch (I6 prefetch-in-time",
    "other-content-64": "stage prefetch (W7 slots-read",
    "no-route-weights-64": "stage experts (P1 expert-rows",
    "no-route-weights-0": "stage experts (P1 expert-rows",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks serve once for each."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    folder = tmp_path_factory.mktemp("taps")
    command = [sys.executable, "-m", "tests.self.served_moe"]
    ranks = [
        subprocess.Popen([*command, str(rank), port, str(folder), *SERVED], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=200)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return folder


@pytest.mark.parametrize("name", SERVED)
def test_a_red_layer_is_named_by_its_stage(served: Path, name: str) -> None:
    assert samples.stopped(served / name) == ""
    layers, found = samples.judged(samples.collect(served / name))
    assert SERVED[name] in layers.said
    assert layers.status == ("failed" if "stage" in layers.said else "passed" if found else "not_run")
    assert layers.calls == len(found)


@pytest.mark.parametrize(("name", "code"), [("-0", 0), ("other-content-64", 1)])
def test_samples_are_judged_again_without_an_engine(served: Path, tmp_path: Path, name: str, code: int) -> None:
    samples.save(samples.judged(samples.collect(served / name))[1], tmp_path / "kept")
    command = [sys.executable, "-m", "moonep_validate", "check", str(tmp_path / "kept")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout
    assert "evidence: sampled inputs" in done.stdout
    assert ("reproduce: moonep-validate check" in done.stdout) == bool(code)


def test_a_call_that_a_rank_lacks_is_not_judged(served: Path, tmp_path: Path) -> None:
    files = sorted((served / "-64").iterdir())
    for file in files[1:]:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert len(samples.collect(tmp_path)) == len(files) // 2 - 1
    (tmp_path / "1.stopped").write_text("30 s are spent")
    assert "sampling ended early: 30 s are spent" in samples.judged([], samples.stopped(tmp_path))[0].said


def test_every_rank_chooses_the_same_calls_of_all_layers_and_few_stay() -> None:
    kept: list[list[int]] = []
    for _ in range(2):
        schedule, mine = Schedule(8, 6), []
        for call in range(4000):
            if schedule.chooses(call):
                mine.append(call)
                gone = schedule.thinned(mine)
                mine = [one for one in mine if one not in gone]
        kept.append(mine)
    assert kept[0] == kept[1]
    assert 3 <= len(kept[0]) <= 6
    assert {call % 2 for call in kept[0]} == {0, 1}
    assert max(kept[0]) > 2000


def test_amounts_travel_as_text() -> None:
    assert Amount.parse(str(Amount(7, 3, 9, 11))) == Amount(7, 3, 9, 11)


@pytest.mark.parametrize(("status", "exit_code"), [("passed", 0), ("failed", 1), ("vacuous", 10)])
def test_a_pair_says_what_its_layers_say(tmp_path: Path, status: str, exit_code: int) -> None:
    names = [f"p{number}" for number in range(9)]
    base = side(Who("a", dtype="float32"), [answer(name) for name in names])
    who = Who("b", dtype="float32", layers=Layers(3, [0], status, "what was seen"))
    write(side(who, [answer(name) for name in names]), tmp_path / "b.jsonl")
    verdict = judge_pair(base, read(tmp_path / "b.jsonl"))
    mine = next(one for one in verdict.results if one.check == "layers")
    assert (mine.status, mine.examined, mine.reason) == (status, 3, "b float32: what was seen")
    assert verdict.exit_code == exit_code


def test_a_sampled_case_does_not_run(tmp_path: Path) -> None:
    line = "genA+R2+E4+K2+S16+sampled:0,5+fill:real"
    assert str(Case.parse(line)) == line
    command = [sys.executable, "-m", "moonep_validate", "run", "--case", line, "--keep", "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert "a served engine was given" in done.stdout
