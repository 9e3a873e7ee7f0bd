"""From a red pair to the command that judges the candidate's MoE layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moonep_validate.cases.case import Case
from moonep_validate.served.answers import PathTaken, Who
from moonep_validate.served.locate import arguments, cases, meaning
from tests.e2e.tiny import CONFIG


def model(folder: Path, config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_cases_have_the_shapes_of_the_model(tmp_path: Path) -> None:
    who = Who("vllm", model=model(tmp_path, CONFIG), path=PathTaken([1, 1, 1, 1], [1] * 4))
    found = [Case.parse(line) for line in cases(who)]
    assert len(found) == 3
    assert {(c.R, c.E, c.K, c.H, c.I, c.slots, c.pad) for c in found} == {(4, 8, 2, 128, 128, 4, 128)}
    assert arguments(who)[:4] == ["run", "--subject", "vllm", "--case"]


def test_shapes_of_nested_configs(tmp_path: Path) -> None:
    nested = {
        "text_config": {
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "hidden_size": 256,
            "moe_intermediate_size": 128,
        }
    }
    assert "E16+K4" in cases(Who("sglang", model=model(tmp_path, nested)))[0]


@pytest.mark.parametrize("config", [{}, [], {"num_experts": "8"}, {**CONFIG, "num_experts": None}])
def test_nothing_is_said_without_shapes(tmp_path: Path, config: object) -> None:
    assert arguments(Who("vllm", model=model(tmp_path, config))) == []


def test_only_engines_that_can_be_judged(tmp_path: Path) -> None:
    assert arguments(Who("transformers", model=model(tmp_path, CONFIG))) == []
    assert arguments(Who("vllm", model="no/folder")) == []


def test_meanings() -> None:
    assert "look outside" in meaning(0)
    assert "a stage" in meaning(1)
    assert "exit code 5" in meaning(5)
