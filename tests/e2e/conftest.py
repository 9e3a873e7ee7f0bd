"""Options of the end-to-end tests: which pairs, held against which third opinion, with how many prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonep_validate.served.pair import PairVerdict, judge_pair
from moonep_validate.served.prompts import GROUPS
from moonep_validate.served.sides import Questions, answers_of

#: The item of a pair beside those of its groups.
WHOLE = "pair"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("moonep-validate, served engines")
    both = {"nargs": 2, "action": "append", "metavar": ("BASE", "CANDIDATE")}
    group.addoption("--moonep-pair", help="Two sides, as for `moonep-validate compare`.", **both)
    group.addoption("--moonep-vacuous", help="Two sides of which the candidate never uses its path.", **both)
    group.addoption("--moonep-reference", help="A third opinion in float32.", default=None)
    group.addoption("--moonep-prompts", help="How many prompts.", type=int, default=14)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, option, groups in (
        ("pair_and_group", "--moonep-pair", [WHOLE, *GROUPS]),
        ("vacuous_pair", "--moonep-vacuous", [WHOLE]),
    ):
        if fixture in metafunc.fixturenames:
            pairs = metafunc.config.getoption(option, default=None) or []
            items = [(pair, group) for pair in pairs for group in groups]
            names = [f"{Path(base).stem}-{Path(candidate).stem}-{group}" for (base, candidate), group in items]
            metafunc.parametrize(fixture, items, ids=names)


class Verdicts:
    """Each side is asked once, each pair judged once."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._found: dict[tuple[str, str], PairVerdict] = {}

    def of(self, base: str, candidate: str) -> PairVerdict:
        if (base, candidate) not in self._found:
            questions = Questions(self._config.getoption("--moonep-prompts"), 0, "float32", 1200.0)
            third = self._config.getoption("--moonep-reference")
            mine = answers_of(base, questions, None, self._folder / f"{Path(base).stem}.jsonl")
            other = answers_of(candidate, questions, mine, self._folder / f"{Path(candidate).stem}.jsonl")
            reference = answers_of(third, questions, mine) if third else None
            self._found[base, candidate] = judge_pair(mine, other, reference=reference)
        return self._found[base, candidate]


@pytest.fixture(scope="session")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    return Verdicts(request.config, tmp_path_factory.mktemp("answers"))
