"""Verdicts of pairs: what is a pass, a failure, vacuous, unknown; and what `compare` prints and returns."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moonep_validate.served.answers import Answer, Answers, PathTaken, Who, read, write
from moonep_validate.served.pair import PairVerdict, judge_pair
from tests.self.served_data import BASE, EXACT, answer, noisy, side

Cli = Callable[..., tuple[int, str, str]]


def status(verdict: PairVerdict, check: str) -> str:
    return next(one.status for one in verdict.results if one.check == check)


@pytest.mark.parametrize("seed", range(10))
def test_healthy_pair_passes_with_a_reference(seed: int) -> None:
    third = noisy(EXACT, "third", 32, 0.0, 0)
    base, other = noisy(BASE, "base", 32, 0.01, 100 + seed), noisy(BASE, "other", 32, 0.01, 200 + seed)
    verdict = judge_pair(base, other, reference=third)
    assert (verdict.status, verdict.exit_code) == ("passed", 0)
    assert verdict.test is not None
    assert verdict.test.prompts == 32
    assert "95%" in verdict.power


def test_drift_without_a_different_token_is_red() -> None:
    third = noisy(EXACT, "third", 32, 0.0, 0)
    base, other = noisy(BASE, "base", 32, 0.01, 1), noisy(BASE, "other", 32, 0.05, 2)
    verdict = judge_pair(base, other, reference=third)
    assert verdict.count("identical") == 32
    assert (status(verdict, "tokens"), status(verdict, "drift"), verdict.exit_code) == ("passed", "failed", 1)


def test_without_noise_nothing_passes() -> None:
    verdict = judge_pair(noisy(BASE, "base", 32, 0.01, 1), noisy(BASE, "other", 32, 0.01, 2))
    assert (verdict.status, verdict.exit_code) == ("unknown", 12)
    assert "--reference" in next(one.reason for one in verdict.results if one.check == "drift")


def test_few_prompts_are_unknown() -> None:
    third = noisy(EXACT, "third", 3, 0.0, 0)
    verdict = judge_pair(noisy(BASE, "b", 3, 0.01, 1), noisy(BASE, "o", 3, 0.01, 2), reference=third)
    assert verdict.status == "unknown"
    assert verdict.power == "3 prompts are too few for the test of drift, 8 are needed"


def test_float32_has_a_floor() -> None:
    base = noisy(EXACT, "base", 4, 0.0, 1)
    assert judge_pair(base, noisy(EXACT, "other", 4, 1e-6, 2)).status == "passed"
    verdict = judge_pair(base, noisy(EXACT, "other", 4, 1e-3, 2))
    assert verdict.status == "failed"
    assert "within 6.1e-05" in str(verdict.to_json())


def test_equal_numbers_of_two_runs_pass() -> None:
    assert judge_pair(noisy(BASE, "base", 4, 0.0, 1), noisy(BASE, "other", 4, 0.0, 2)).status == "passed"


def test_a_file_against_itself_is_vacuous() -> None:
    base = noisy(BASE, "same", 4, 0.0, 1)
    verdict = judge_pair(base, base)
    assert (status(verdict, "apart"), verdict.exit_code) == ("vacuous", 10)


def test_a_copy_of_a_file_is_no_second_side(tmp_path: Path) -> None:
    """Under another name too, and as a measure of noise, which would excuse any drift of the side that it copies."""
    base, wrong = noisy(BASE, "base", 32, 0.01, 1), noisy(BASE, "wrong", 32, 0.5, 2)
    for answers, name in ((base, "base"), (base, "copy of base"), (wrong, "wrong"), (wrong, "copy of wrong")):
        write(answers, tmp_path / name)
    base, same, wrong, excuse = (read(tmp_path / n) for n in ("base", "copy of base", "wrong", "copy of wrong"))
    verdicts = {
        "copy of base": judge_pair(base, same),
        "healthy": judge_pair(base, wrong, healthy=[excuse]),
        "reference": judge_pair(base, wrong, reference=excuse),
    }
    for name, verdict in verdicts.items():
        assert status(verdict, "apart") == "vacuous", name
        assert verdict.exit_code in (1, 10), name
        assert "are one recording" in next(one.reason for one in verdict.results if one.check == "apart")


MOONEP = replace(BASE, backend="moonep")


@pytest.mark.parametrize(
    ("who", "wanted", "said"),
    [
        (MOONEP, "vacuous", "names moonep, and nothing shows that it was used"),
        (replace(BASE, arguments=["--all2all-backend=moonep"]), "vacuous", "nothing shows"),
        (replace(MOONEP, path=PathTaken([5, 5], [2, 0], [9, 9])), "vacuous", "no used slots on rank 1"),
        (replace(MOONEP, path=PathTaken([5, 5], [2, 1], [0, 9])), "vacuous", "no real tokens in slots on rank 0"),
        (replace(MOONEP, path=PathTaken([], [], [])), "vacuous", "no dispatches on rank any"),
        (replace(MOONEP, path=PathTaken([5, 5], [2, 1], [1, 9])), "passed", ""),
        (BASE, "not_applicable", ""),
    ],
)
def test_a_named_path_must_have_been_used(who: Who, wanted: str, said: str) -> None:
    verdict = judge_pair(noisy(BASE, "base", 4, 0.0, 1), noisy(who, "other", 4, 0.0, 2))
    assert status(verdict, "path") == wanted
    assert said in next(one.reason for one in verdict.results if one.check == "path")


def splits(gap: float, count: int, who: Who = BASE) -> tuple[Answers, Answers]:
    """``count`` of 32 prompts whose first token differs, at a gap; noise of 0.01 in prompts and repetitions."""
    base, other = noisy(who, "base", 32, 0.01, 1, again=0.01), noisy(who, "other", 32, 0.01, 2)
    for number in range(count):
        name = f"p{number}"
        for answers, own, another in ((base, 20, 21), (other, 21, 20)):
            one = answers.runs["greedy"][name]
            tokens, logprobs = one.tokens.copy(), one.logprobs.copy()
            tokens[0], logprobs[0] = own, -1.0
            ids, top = np.tile([own, another], (8, 1)), np.tile([-1.0, -1.0 - gap], (8, 1))
            changed = replace(one, tokens=tokens, logprobs=logprobs, top_ids=ids, top_logprobs=top)
            answers.runs["greedy"][name] = changed
        again = base.runs["again"][name].logprobs
        again[0] = -1.001  # the noise is that of the other places
    return base, other


def test_ties_are_explained_and_jumps_are_not() -> None:
    verdict = judge_pair(*splits(0.01, 6))
    assert (verdict.count("explained"), status(verdict, "tokens")) == (6, "passed")
    verdict = judge_pair(*splits(0.5, 20))
    assert (verdict.count("unexplained"), status(verdict, "tokens")) == (20, "failed")
    finding = next(one for one in verdict.results if one.check == "tokens").findings[0]
    assert finding.what == "token after prompt p0"
    assert "gaps 0.5 and 0.5" in str(finding)


def test_a_single_jump_is_a_defect_in_float32_only() -> None:
    verdict = judge_pair(*splits(0.5, 1))
    assert status(verdict, "tokens") == "passed"
    assert status(judge_pair(*splits(0.5, 1, EXACT)), "tokens") == "failed"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (answer("a", error="connection refused"), "connection refused"),
        (answer("a", logprobs=[float("nan"), -2.0]), "NaN or infinite"),
        (answer("a", logprobs=[None, None]), "one for each token"),
        (answer("a", logprobs=[-1.0, None]), "1 of 2 missing"),
        (answer("a", prompt_logprobs=[None, None, -4.0]), "one for each token but the first"),
        (answer("a", logprobs=[0.5, -2.0]), "at most 0, as logarithms of probabilities are"),
        (answer("a", prompt_logprobs=[None, 0.5, -4.0]), "at most 0, as logarithms of probabilities are"),
        (answer("a", top=[{5: -1.0, 8: -3.0}, {7: -0.5, 8: -1.0}]), "6 is not listed"),
        (answer("a", top=[{5: -1.0, 8: -3.0}, {6: -0.5, 8: -1.0}]), "6 is not listed, or with another"),
        (answer("a", [5, 64]), "ids below the vocabulary's size of 64"),
        (answer("a", asked=[9, 10, 64]), "ids below the vocabulary's size of 64"),
        (answer("a", top=[{5: -1.0, 64: -3.0}, {6: -2.0}]), "ids below the vocabulary's size of 64"),
        (answer("a", asked=[9, 10, 12]), "the same 3 token ids"),
        (answer("a", [5], [-1.0]), "2 tokens (length)"),
        (answer("b"), "none of the candidate"),
    ],
)
def test_what_is_no_answer_is_a_finding(other: object, said: str) -> None:
    who = replace(BASE, vocab=64)
    verdict = judge_pair(side(who, [answer("a")], "base"), side(who, [other], "other"))  # type: ignore[list-item]
    assert status(verdict, "answered") in ("failed", "vacuous")
    assert said in str(verdict.to_json())


@pytest.mark.parametrize(
    "good",
    [
        answer("a", top=[{5: -1.0, 8: -3.0}, {7: -2.0, 8: -2.0}]),  # a tie with the last one that is listed
        answer("a", logprobs=[1e-6, -2.0]),  # a certain token, rounded
        answer("a", prompt_logprobs=()),  # a server that gives none
    ],
)
def test_what_rounding_and_ties_do_is_an_answer(good: Answer) -> None:
    verdict = judge_pair(side(BASE, [answer("a")], "base"), side(BASE, [good], "other"))
    assert status(verdict, "answered") == "passed"


def test_the_order_of_answers_does_not_matter() -> None:
    base, other = noisy(EXACT, "base", 9, 0.0, 1), noisy(EXACT, "other", 9, 1e-6, 2)
    turned = side(EXACT, list(other.run("greedy").values())[::-1], "turned")
    assert judge_pair(base, turned).to_json()["drift"] == judge_pair(base, other).to_json()["drift"]
    assert judge_pair(base, turned).status == "passed"


def test_a_question_that_is_asked_twice_counts_once() -> None:
    """Four prompts under nine names are four samples: fewer than the test of drift needs."""
    third = noisy(EXACT, "third", 9, 0.0, 0)
    base, other = noisy(BASE, "base", 9, 0.01, 1), noisy(BASE, "other", 9, 0.01, 2)
    assert judge_pair(base, other, reference=third).status == "passed"
    for one in (third, base, other):
        run = one.runs["greedy"]
        run.update({name: replace(run[name], asked=run["p0"].asked) for name in ("p4", "p5", "p6", "p7", "p8")})
    verdict = judge_pair(base, other, reference=third)
    assert verdict.status == "unknown"
    assert verdict.test is not None
    assert verdict.test.prompts == 4


def saved(folder: Path, name: str, answers: Answers) -> str:
    path = folder / f"{name}.jsonl"
    write(answers, path)
    return str(path)


def test_compare_prints_a_verdict_and_its_code(cli: Cli, tmp_path: Path) -> None:
    base = saved(tmp_path, "base", noisy(BASE, "", 32, 0.01, 1))
    good, bad = (saved(tmp_path, f"n{size}", noisy(BASE, "", 32, size, 2)) for size in (0.01, 0.08))
    third = saved(tmp_path, "third", noisy(EXACT, "", 32, 0.0, 0))
    code, out, err = cli("compare", base, good, "--reference", third)
    assert (code, err) == (0, "")
    assert "prompts: 32, 32 identical, 0 explained, 0 unexplained" in out
    assert "passed: exit code 0" in out
    code, out, _ = cli("compare", base, bad, "--reference", third)
    assert code == 1
    assert "drift over noise, all prompts" in out
    code, out, _ = cli("compare", base, good)
    assert code == 12
    code, out, _ = cli("compare", base, bad, "--reference", third, "--json")
    data = json.loads(out)
    assert (code, data["status"], data["exit_code"], len(data["prompts"])) == (1, "failed", 1, 32)
    code, out, _ = cli("compare", base, base)
    assert code == 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "is no side"),
        (["no.jsonl", "no.jsonl"], "is no file"),
        (["nobody:model", "--save", "x"], "engine nobody is not known"),
    ],
)
def test_sides_that_are_none_are_usage_errors(cli: Cli, arguments: list[str], said: str) -> None:
    code, out, err = cli("compare", *arguments)
    assert code == 4
    assert said in out + err


@pytest.mark.slow
def test_ten_thousand_prompts_in_half_a_minute_and_a_gigabyte(cli: Cli, tmp_path: Path) -> None:
    """10,000 prompts x 256 tokens with 5 alternatives, two files: under 30 s and 1 GiB."""
    for name, seed in (("base", 1), ("other", 2)):
        big(tmp_path / f"{name}.jsonl", seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()  # one thread; what other processes take is not ours
    code, out, _ = cli("compare", str(tmp_path / "base.jsonl"), str(tmp_path / "other.jsonl"), "--json")
    seconds = time.process_time() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    assert json.loads(out)["drift"]["places"] == 10_000 * 256
    assert code in (1, 12)
    assert seconds < 30, seconds
    assert grown < 1, grown


def big(path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    head = {"kind": "moonep-validate answers", "format": 1, "who": {"engine": "fake", "dtype": "bfloat16"}}
    tokens = list(range(256))
    with path.open("w") as file:
        file.write(json.dumps(head) + "\n")
        for number in range(10_000):
            values = (np.log(0.5) + 0.01 * random.standard_normal(256)).round(6).tolist()
            line = {
                "prompt": f"p{number}",
                "group": "short",
                "run": "greedy",
                "asked": [1, 2, 3],
                "tokens": tokens,
                "logprobs": values,
                "top_ids": [[token, 300, 301, 302, 303] for token in tokens],
                "top_logprobs": [[value, -3.0, -4.0, -5.0, -6.0] for value in values],
            }
            file.write(json.dumps(line) + "\n")
