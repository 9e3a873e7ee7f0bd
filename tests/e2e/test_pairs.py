"""Two ways to serve one model say the same: one item for each pair, and one for each group of its prompts.

``pytest tests/e2e --moonep-pair one.toml moonep.toml --moonep-reference reference.toml``; `tox -e e2e-vllm` does so
with a tiny model that the project makes.
"""

from __future__ import annotations

from moonep_validate.served.pair import MISSING, UNEXPLAINED
from tests.e2e.conftest import WHOLE, Verdicts

Item = tuple[tuple[str, str], str]


def test_pair_says_the_same(pair_and_group: Item, verdicts: Verdicts) -> None:
    (base, candidate), group = pair_and_group
    verdict = verdicts.of(base, candidate)
    if group == WHOLE:
        said = [
            f"{one.check} {one.status}: {one.reason} {list(map(str, one.findings))}" for one in verdict.results
        ]
        print(*said, verdict.drift, verdict.noise.how, verdict.power, sep="\n")
        assert verdict.status == "passed", "\n".join(said)
        return
    mine = [one for one in verdict.prompts if one.group == group]
    wrong = [str(one) for one in mine if one.status in (MISSING, UNEXPLAINED)]
    # Single flips of a router are no defect in a coarse type: the pair's own item says whether there are too many.
    assert not wrong or (verdict.status == "passed" and not any(one.status == MISSING for one in mine)), wrong


def test_a_path_that_is_not_used_is_vacuous(vacuous_pair: Item, verdicts: Verdicts) -> None:
    (base, candidate), _ = vacuous_pair
    verdict = verdicts.of(base, candidate)
    path = next(one for one in verdict.results if one.check == "path")
    assert (path.status, verdict.exit_code) in (("vacuous", 10), ("vacuous", 1))
    assert "no dispatches on rank any" in path.reason
