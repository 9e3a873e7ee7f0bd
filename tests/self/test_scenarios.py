"""Each scenario declares all that others ask of it, in one place, and people can read it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.cases.vocabulary import VOCABULARY
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.run import run_case
from moonep_validate.scenarios import SCENARIOS
from moonep_validate.scenarios.registry import Need, Scenario, scenario
from moonep_validate.sessions.rig import Rig

CASE = Case.parse("genB+R2+E4+K2+S3+H8+I8+hot:0")


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_declares_everything(name: str) -> None:
    one = SCENARIOS[name]
    assert one.name == name == one.script.__name__
    assert set(one.needs) <= set(get_args(Need))
    assert len(set(one.needs)) == len(one.needs)
    assert set(one.models) <= {word for word, known in VOCABULARY.items() if known.field == "model"}
    assert 20 <= len((one.script.__doc__ or "").splitlines()[0]) <= 110, "the docstring is its one sentence"
    assert one.usage == ":".join([name, ",".join(one.args)]).rstrip(":")
    source = inspect.getsource(one.script)
    for door in ("buffer", "engine"):
        assert f"rig.open_{door}(" not in source or door in one.needs, f"it opens the {door} door undeclared"


def test_cases_prints_the_sentence_of_each(cli: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = cli("cases")
    assert code == 0
    printed = " ".join(out.split())
    for one in SCENARIOS.values():
        assert " ".join(f"{one.usage} {one.sentence}".split()) in printed
    assert "grads gradients of redundant experts come home" in printed
    assert "(needs: buffer, gradients)" in printed


def test_case_lines_and_scripts_load_without_torch() -> None:
    code = "import sys, moonep_validate.cases.profiles; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_one_declaration_makes_a_word_with_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_padding(case: Case) -> str | None:
        return None if case.pad == 1 else f"needs pad1, not pad{case.pad}"

    declared = replace(SCENARIOS["base"], limits=(no_padding,), models=("k3",))
    monkeypatch.setitem(SCENARIOS, "base", declared)
    with pytest.raises(CaseError, match="base needs pad1, not pad16"):
        Case.parse(str(CASE))
    with pytest.raises(CaseError, match="scenario base: model moe runs"):
        Case.parse(f"{CASE}+pad1")


def test_the_decorator_registers_under_the_name_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[str, Scenario] = {}
    monkeypatch.setattr("moonep_validate.scenarios.registry.SCENARIOS", table)

    @scenario(args={"COUNT": int}, needs=("buffer",))
    def some_passes(rig: Rig) -> None:
        """CUDA passes, COUNT of them."""

    assert list(table) == ["some_passes"]
    assert (table["some_passes"].usage, table["some_passes"].script) == ("some_passes:COUNT", some_passes)
    assert table["some_passes"].sentence == "CUDA passes, COUNT of them (needs: buffer)"


def test_a_door_that_a_session_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(rig: Rig) -> None:
        with rig.open_engine():
            pass

    monkeypatch.setitem(SCENARIOS, "base", replace(SCENARIOS["base"], script=wrong))
    _, verdict = run_case(Job(), CASE)
    assert verdict.status == "error"
    assert (
        "the scenario base needs the engine door, and a ComposedSession has none; declare it" in verdict.errors[0]
    )
