"""How a failure is seen again: alone, behind the cases that it needs, or not at all; the run says which."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from moonep_validate.cases.case import Case
from moonep_validate.judge.verdict import Result, Verdict
from moonep_validate.studies.shrink import shrink_sequence

Cli = Callable[..., tuple[int, str, str]]
LINES = [f"genB+R2+E{experts}+K2+S3+H8+I8+pad4" for experts in (4, 6, 8, 4, 10, 12, 14, 16, 18)]
BEFORE, LAST = [Case.parse(line) for line in LINES], Case.parse("genB+R2+E20+K2+S3+H8+I8+pad4")
WANTED = ("failed", "combine", "C1")
LEAKY = """
from moonep_validate.reference import moonep_b
from moonep_validate.reference.moonep_b import MoonEPCommPlan
__version__ = "9.9"
class Buffer(moonep_b.Buffer):
    widths = []
    def dispatch(self, hidden, *args, **options):
        Buffer.widths.append(hidden.shape[1])
        return super().dispatch(hidden, *args, **options)
    def combine(self, *args, **options):
        out, *rest = super().combine(*args, **options)
        if {24, 40} <= set(Buffer.widths):
            out.zero_()
        return (out, *rest)
"""


def judge(needed: set[int], tried: list[tuple[Case, ...]]) -> Callable[[tuple[Case, ...]], Verdict]:
    """The last case fails if cases with these E were among those before it, in new workers."""

    def last(cases: tuple[Case, ...]) -> Verdict:
        tried.append(cases)
        bad = cases[-1] == LAST and needed <= {case.E for case in cases[:-1]}
        results = [Result("C1", "combine", "base", "failed" if bad else "passed", "none")]
        return Verdict(cases[-1], {}, results)

    return last


@pytest.mark.parametrize("needed", [{18}, {16}, {4}, {4, 12}, {6, 8, 10}])
def test_the_fewest_cases_before_it_are_found(needed: set[int]) -> None:
    tried: list[tuple[Case, ...]] = []
    found = shrink_sequence(BEFORE, LAST, WANTED, judge(needed, tried), seconds=60)
    assert (found.repeated, found.complete, found.tried) == (True, True, len(tried))
    assert {case.E for case in found.cases[:-1]} == needed
    assert len(found.cases) == len(needed) + 1
    assert found.cases[-1] == LAST


def test_what_nothing_repeats_keeps_all_cases_and_time_is_kept() -> None:
    tried: list[tuple[Case, ...]] = []
    found = shrink_sequence(BEFORE, LAST, WANTED, judge({999}, tried), seconds=60)
    assert (found.repeated, found.cases) == (False, (*BEFORE, LAST))
    assert [len(cases) - 1 for cases in tried] == [1, 2, 4, 8, 9]
    assert shrink_sequence(BEFORE, LAST, WANTED, judge({4}, []), seconds=-1).tried == 1
    assert shrink_sequence([], LAST, WANTED, judge({4}, []), seconds=60).cases == (LAST,)


def test_a_run_says_that_a_failure_needs_the_cases_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """Widths 24 and 40 in one worker, in either order, spoil its next combine: exit code 1, a reproducer that fails."""
    (tmp_path / "leaky_module.py").write_text(LEAKY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = ["--moonep-module", "leaky_module", "--relaxed", "--shrink-seconds", "60"]
    cases = [f"genB+R2+E4+K2+S3+H{width}+I8+pad4" for width in (8, 24, 16, 40, 32)]
    code, out, err = cli("run", *(f"--case={case}" for case in cases), *options)
    assert (code, err) == (1, "")
    assert "3 passed" in out
    assert "2 failed" in out
    assert "not reproduced alone: it needs the cases before it in the same workers" in out
    words = shlex.split(out.partition("sequences tried):\n  ")[2].partition("\n")[0])
    assert [word for word in words if word.startswith("gen")] == [cases[1], cases[3]]
    code, again, _ = cli(*words[1:], "--shrink-seconds", "0")
    assert code == 1
    assert "failed at stage combine" in again


def test_a_failure_of_another_kind_that_does_not_repeat_alone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """The first one does, and says nothing of the others, whose commands were printed too."""
    twice = LEAKY.replace(
        "        return super().dispatch(",
        "        hidden = hidden * (hidden.shape[1] != 8)\n        return super().dispatch(",
    )
    assert twice != LEAKY
    (tmp_path / "twice_leaky.py").write_text(twice)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cases = [f"genB+R2+E4+K2+S3+H{width}+I8+pad4" for width in (8, 24, 40)]
    asked = ["run", *(f"--case={case}" for case in cases), "--moonep-module", "twice_leaky", "--relaxed"]
    code, out, _ = cli(*asked, "--shrink-seconds", "20")
    assert code == 1
    assert "smallest failing case (" in out
    assert f"not reproduced alone: {cases[2]}\n" in out, out


def test_a_failure_that_stands_alone_is_shrunk_and_its_command_fails(cli: Cli) -> None:
    code, out, _ = cli(
        "run", "--case", "genB+R2+E4+K2+S9+H8+I8+hot:0", "--fault", "slot-not-filled", "--shrink-seconds", "5"
    )
    assert code == 1
    words = shlex.split(out.partition("candidates tried):\n  ")[2].partition("\n")[0])
    assert cli(*words[1:], "--shrink-seconds", "0")[0] == 1
