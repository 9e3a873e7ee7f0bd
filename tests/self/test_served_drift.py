"""Drift, splits, divergence and noise: values that were computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moonep_validate.errors import CaseError
from moonep_validate.served.answers import FORCED, Who
from moonep_validate.served.drift import drift, summary
from moonep_validate.served.noise import FLOOR, drifts_of, fewest_beyond_chance, measure, power_of, prompts_needed
from moonep_validate.served.noise import test as compared
from moonep_validate.served.prompts import FIRST_ID, GROUPS, make_prompts
from tests.self.served_data import BASE, EXACT, answer, noisy, side


def test_drift_counts_prompt_and_tokens_up_to_the_split() -> None:
    base = answer("a", [5, 6, 7], [-1.0, -2.0, -3.0])
    other = answer("a", [5, 8, 9], [-1.5, -0.5, -0.25], prompt_logprobs=[None, -3.25, -4.0])
    found = drift(base, other)
    assert found.prefill.tolist() == [-0.25, 0.0]
    assert found.decode.tolist() == [-0.5]  # the place of the split has two tokens: nothing to subtract
    assert found.size == pytest.approx(math.sqrt((0.0625 + 0.25) / 3))
    assert found.split is not None
    assert (found.split.position, found.split.base, found.split.candidate) == (1, 6, 8)
    assert math.isnan(found.split.base_gap)  # no alternatives were given


def test_gap_is_own_token_over_the_other() -> None:
    base = answer("a", [5, 6], [-1.0, -0.7], top=[{5: -1.0}, {6: -0.7, 8: -0.9}])
    other = answer("a", [5, 8], [-1.0, -0.75], top=[{5: -1.0}, {8: -0.75, 6: -0.8}])
    split = drift(base, other).split
    assert split is not None
    assert split.base_gap == pytest.approx(0.2)
    assert split.candidate_gap == pytest.approx(0.05)


def test_forced_answers_are_compared_at_all_places() -> None:
    base, other = answer("a"), answer("a", [7, 6])
    forced = answer("a", [5, 6], [-1.0, -2.0], run=FORCED), answer("a", [5, 6], [-1.0, -2.5], run=FORCED)
    assert drift(base, other, [forced]).prefill.tolist() == [0.0, 0.0, 0.0, -0.5]
    mine, theirs = side(BASE, [base, forced[0]]), side(BASE, [other, forced[1]])
    assert drifts_of(mine, theirs)["a"].prefill.tolist() == [0.0, 0.0, 0.0, -0.5]


def test_other_questions_and_errors_are_not_compared() -> None:
    base = side(BASE, [answer("a"), answer("b"), answer("c")])
    other = side(BASE, [answer("a", asked=[9, 10, 12]), answer("b", error="x"), answer("c")])
    assert list(drifts_of(base, other)) == ["c"]


def test_cut_is_no_split() -> None:
    found = drift(answer("a", [5, 6]), answer("a", [5], [-1.0]))
    assert (found.split, found.cut) == (None, True)


def test_divergence_over_listed_tokens_and_the_rest() -> None:
    p, q = (0.5, 0.3), (0.4, 0.4)
    one = answer("a", [5], [math.log(0.5)], top=[{5: math.log(p[0]), 6: math.log(p[1])}])
    two = answer("a", [5], [math.log(0.4)], top=[{6: math.log(q[1]), 5: math.log(q[0])}])
    wanted = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4) + 0.2 * math.log(0.2 / 0.2)
    assert drift(one, two).kl.tolist() == [pytest.approx(wanted)]
    assert drift(one, one).kl.tolist() == [0.0]


def test_summary_in_numbers() -> None:
    base = answer("a", [5, 6, 7, 8], [-1.0] * 4, prompt_logprobs=())
    other = answer("a", [5, 6, 7, 8], [-1.1, -1.1, -1.3, -0.7], prompt_logprobs=())
    found = summary({"a": drift(base, other)})
    assert found.places == 4
    assert found.mean == pytest.approx(0.2)
    assert found.largest == pytest.approx(0.3)
    assert found.prompt == "a"
    assert found.position in (2, 3)
    assert found.trend == pytest.approx(3.0)
    assert math.isnan(summary({}).trend)


def test_noise_is_the_best_measure_there_is() -> None:
    base = noisy(BASE, "base", 10, 0.01, 1, again=0.02)
    other = noisy(BASE, "other", 10, 0.01, 2)
    third, healthy = noisy(EXACT, "third", 10, 0.0, 3), noisy(BASE, "healthy", 10, 0.01, 4)
    assert measure(base, other, [healthy], third).kind == "reference"
    assert measure(base, other, [healthy]).kind == "healthy"
    again = measure(base, other)
    assert again.kind == "again"
    assert np.mean(list(again.sizes.values())) == pytest.approx(math.hypot(0.01, 0.02), rel=0.3)


def test_noise_that_is_zero_is_none() -> None:
    same = noisy(BASE, "base", 4, 0.0, 1)
    assert measure(same, same, [same]).kind == "unknown"
    assert "no difference at all" in measure(same, same, [same]).how
    exact = noisy(EXACT, "base", 4, 0.0, 1)
    assert measure(exact, exact) == measure(exact, exact, [])
    assert (measure(exact, exact).kind, measure(exact, exact).largest) == ("float32", FLOOR)
    assert measure(exact, same).kind == "unknown"


def test_test_of_drift() -> None:
    names = [f"p{i}" for i in range(16)]
    noise = {name: 0.01 * (1 + 0.1 * (i % 3)) for i, name in enumerate(names)}
    healthy = compared(noise, noise, exact=False)
    assert healthy.ratio == pytest.approx(1.0)
    assert not healthy.failed
    far = compared({name: 5 * size for name, size in noise.items()}, noise, exact=False)
    assert far.ratio == pytest.approx(5.0)
    assert far.failed
    one = compared(noise | {"p3": 1.0}, noise, exact=True)
    assert one.off == ("p3",)
    assert one.failed
    assert not compared(noise | {"p3": 1.0}, noise, exact=False).failed


def test_counts_beyond_chance() -> None:
    # 3 of 8 against 0 of 8: (8 choose 3) / (16 choose 3) = 0.1; 7 of 8: 8 / 11440 = 0.0007
    assert fewest_beyond_chance(8, 0, 8) == 7
    assert fewest_beyond_chance(64, 0, 64) == 10  # 9: C(64, 9) / C(128, 9) = 0.0012
    assert fewest_beyond_chance(3, 0, 3) == 4  # no count is enough


def test_prompts_needed_falls_with_the_ratio() -> None:
    counts = [prompts_needed(ratio) for ratio in (2.2, 2.5, 3.0, 5.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 500
    assert counts[-1] == 14


def test_prompts_are_the_same_everywhere_and_of_all_groups() -> None:
    made = make_prompts(512, 14, longest=100)
    assert made == make_prompts(512, 14, longest=100)
    assert {one.group for one in made} == set(GROUPS)
    assert len({one.name for one in made}) == 14
    for one in made:
        assert min(one.tokens) >= FIRST_ID
        assert max(one.tokens) < 512
        assert 1 <= len(one.tokens) <= 100 - one.max_tokens
    assert make_prompts(512, 3, seed=1)[0].tokens != made[0].tokens
    for vocab, count in ((8, 4), (512, 0)):
        with pytest.raises(CaseError):
            make_prompts(vocab, count)


def test_who_is_one_phrase() -> None:
    assert str(Who("vllm", "1", dtype="float32", backend="moonep")) == "vllm 1 float32 moonep"


def test_power_is_said_beforehand() -> None:
    assert power_of(64) == "64 prompts: a drift of 3 times the measured noise will show (95%)"
    assert prompts_needed(3.03) <= 64 < prompts_needed(2.9)
    assert "8 are needed" in power_of(7)
