"""Shared by the tests of the suite itself."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import pytest

from moonep_validate.cases.case import Case
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.record import record
from moonep_validate.trace.trace import Trace

#: Uses slots, padding, duplicates; sizes neither square nor round.
CASE = Case.parse("genB+R4+E12+K3+S7+H24+I20+pad5+hot:1+@slot_used+@duplicate+@padding")


@pytest.fixture(scope="session")
def _clean() -> dict[str, Trace]:
    return {}


@pytest.fixture
def recorded(_clean: dict[str, Trace]) -> Callable[..., Trace]:
    """A private copy of the clean trace of a case."""

    def get(case: Case = CASE) -> Trace:
        if str(case) not in _clean:
            _clean[str(case)] = record(Job(), case)
        return copy.deepcopy(_clean[str(case)])

    return get


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Call the command line in this process: (exit code, stdout, stderr)."""
    from moonep_validate.doors.cli.main import main

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moonep-validate", *arguments])
        with pytest.raises(SystemExit) as exit:
            main()
        captured = capsys.readouterr()
        return int(exit.value.code or 0), captured.out, captured.err

    return call
