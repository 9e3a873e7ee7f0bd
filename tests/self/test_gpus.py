"""GPUs for tests that run side by side: disjoint sets, a killed worker's are free again, and reasons with numbers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from moonep_validate.worlds import gpus
from moonep_validate.worlds.gpus import PRETEND, VISIBLE, TooFewGpus, leased, visible


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lock files of this test alone."""
    monkeypatch.setattr(gpus, "_folder", lambda: tmp_path / "locks")
    monkeypatch.setattr(gpus, "_last", [])


def test_leases_are_disjoint_and_end() -> None:
    environment = {PRETEND: "4", VISIBLE: "7,5,GPU-3a/b,1"}
    other = dict(environment)
    with leased(2, environment=environment) as mine:
        assert mine == ["7", "5"]
        assert environment[VISIBLE] == "7,5"
        with leased(2, environment=other) as others:
            assert others == ["GPU-3a/b", "1"]
            with (
                pytest.raises(TimeoutError, match=r"1 of 4 GPUs were not free within 0\.2 s"),
                leased(1, 0.2, {PRETEND: "4", VISIBLE: "7,5,GPU-3a/b,1"}),
            ):
                pass
    assert environment[VISIBLE] == other[VISIBLE] == "7,5,GPU-3a/b,1"
    with leased(4, 1.0, environment) as mine:
        assert len(mine) == 4


def test_those_held_last_come_first() -> None:
    environment = {PRETEND: "3"}
    with leased(1, environment={PRETEND: "3"}), leased(1, environment=environment) as mine:
        assert mine == ["1"]
    assert VISIBLE not in environment
    with leased(2, environment=environment) as mine:
        assert mine == ["0", "1"]
    gpus._last[:] = ["2"]
    with leased(1, environment=environment) as mine:
        assert mine == ["2"]


def test_a_killed_worker_gives_its_gpus_back() -> None:
    ready, write = os.pipe()
    child = os.fork()
    if child == 0:
        with leased(2, environment={PRETEND: "2"}):
            os.write(write, b"x")
            time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    with pytest.raises(TimeoutError), leased(1, 0.2, {PRETEND: "2"}):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with leased(2, 5.0, {PRETEND: "2"}) as mine:
        assert mine == ["0", "1"]


def test_too_few_are_said_at_once() -> None:
    with pytest.raises(TooFewGpus, match="3 GPUs are needed, torch sees 2"), leased(3, environment={PRETEND: "2"}):
        pass
    assert visible({PRETEND: "2", VISIBLE: "4,5"}) == ["4", "5"]


MARKED = """
import pytest
@pytest.mark.gpu
def test_one(): pass
@pytest.mark.multigpu
def test_two(moonep_gpus): assert len(moonep_gpus(2)) == 2
@pytest.mark.multigpu(4)
def test_four(): pass
"""


@pytest.mark.parametrize(
    ("count", "options", "outcome", "line"),
    [
        ("0", (), {"skipped": 3}, "*2 GPUs are needed, torch sees 0"),
        ("1", (), {"passed": 1, "skipped": 2}, "*4 GPUs are needed, torch sees 1"),
        ("2", (), {"passed": 2, "skipped": 1}, "*4 GPUs are needed, torch sees 2"),
        (
            "1",
            ("--require-gpus", "2"),
            {"passed": 1, "errors": 1, "skipped": 1},
            "*--require-gpus 2: 2 GPUs are needed, torch sees 1",
        ),
    ],
)
def test_a_skip_says_what_is_missing_and_can_be_an_error(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    count: str,
    options: tuple[str, ...],
    outcome: dict[str, int],
    line: str,
) -> None:
    monkeypatch.setenv(PRETEND, count)
    pytester.makepyfile(MARKED)
    result = pytester.runpytest_inprocess("-rs", "--strict-markers", *options)
    result.assert_outcomes(**outcome)
    result.stdout.fnmatch_lines([line])
