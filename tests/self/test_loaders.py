"""``run --loader``: an honest loader passes with all seeded faults seen, and each careless one has its variant.

The loaders are in ``tests/self/engines/fake_loader.py``; a real engine's are judged in ``tests/integration``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from moonep_validate.cases.case import CaseError
from moonep_validate.judge.waivers import Waiver
from moonep_validate.subjects.loaders import child
from moonep_validate.subjects.loaders.variants import FAULTS, LoadPath, Variant, faults_of, variants_of
from moonep_validate.tools import loaders
from moonep_validate.tools.loaders import Report, inspect

Cli = Callable[..., tuple[int, str, str]]
ENGINES = Path(__file__).with_name("engines")
FORMATS = {"plain": "bf16", "blocks": "fp8", "packed": "mxfp4", "packed-up-first": "mxfp4"}


@pytest.fixture(scope="module", autouse=True)
def _loaders_can_be_imported() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ENGINES))
        patch.syspath_prepend(str(ENGINES))
        yield


def judged(name: str, chosen: str = "*", fault: str = "", waivers: tuple[Waiver, ...] = ()) -> Report:
    """As ``inspect`` does, but for the process, which takes seconds to start."""

    def asked(arguments: dict[str, Any], path: str | None) -> dict[str, Any]:
        return child.run(arguments["name"], Path(arguments["folder"]), chosen, fault)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "_asked", asked)
        return inspect(f"fake_loader:{name}", None, chosen, fault, waivers)


def failed(report: Report) -> dict[str, str]:
    """Variant -> what is wrong, of those that failed."""
    return {one.name: " | ".join(one.lines) for one in report.told if one.status == "failed"}


def test_an_honest_loader_passes_and_every_seeded_fault_is_seen() -> None:
    report = judged("Good")
    assert failed(report) == {}
    assert (report.exit_code, {one.status for one in report.told}) == (0, {"passed"})
    for one in report.told:
        path, word = one.name.split("+")
        plain = word.startswith(("tp", "ep")) and word != "tp1of4"
        scaled = FORMATS[path] != "bf16"
        wanted = {name for name in FAULTS if scaled or name != "scale-of-another-block"} if plain else set()
        assert set(one.faults) == wanted, one.name
    assert {one.name.split("+")[0] for one in report.told} == set(FORMATS)


#: loader -> (glob, the variants that must fail, what the first says)
CARELESS = {
    "UpFirst": ("*+tp0of1", {f"{path}+tp0of1" for path in FORMATS}, "up rows first"),
    "ScalesUncut": ("*+tp?of2", {"blocks+tp1of2", "packed+tp1of2", "packed-up-first+tp1of2"}, "w13_scale"),
    "ExpertsOfFirstRank": ("plain+ep?of2", {"plain+ep1of2"}, "local expert 0 (expert 3): w13 differs from the checkpoint; it holds expert 0's"),
    "LastExpertLeft": ("plain+[te]p?of2", {f"plain+{p}{r}of2" for p in ("tp", "ep") for r in (0, 1)}, "local expert 5 (expert 5)"),
    "ByValue": ("packed+scale:*", {f"packed+scale:{word}" for word in ("float8_e8m0fnu", "float32", "1.5")}, "scale bytes are not those of their codes"),
    "ShortTaken": ("*+short", {f"{path}+short" for path in FORMATS}, "half of the rows of a tensor are missing: expected an exception"),
    "CountsBlindly": ("*+missing", {f"{path}+missing" for path in FORMATS}, "a tensor is missing: expected an exception, or fewer than 18 tensors taken; it says 18"),
    "BlockCutInside": ("packed+tp1of4", {"packed+tp1of4"}, "192 columns over 4 ranks are 48 each, and a scale is of 32: w2 and w2_scale are not"),
    "Typo": ("plain+tp0of1", {"plain+tp0of1"}, "it raised at load: AttributeError"),
}  # fmt: skip


@pytest.mark.parametrize("name", CARELESS)
def test_a_careless_loader_fails_at_its_variants(name: str) -> None:
    chosen, variants, says = CARELESS[name]
    report = judged(name, chosen)
    wrong = failed(report)
    assert (set(wrong), report.exit_code) == (variants, 1), report
    assert says in next(iter(wrong.values())), wrong


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_red_in_every_format_that_has_it(fault: str) -> None:
    report = judged("Good", "*+tp1of2", fault)
    wanted = {
        f"{path}+tp1of2" for path, form in FORMATS.items() if form != "bf16" or fault != "scale-of-another-block"
    }
    assert wanted <= set(failed(report)), report


def test_a_comparison_that_sees_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "differences", lambda variant, got: [])
    wrong = failed(judged("Good", "packed+tp0of2"))
    assert wrong == {"packed+tp0of2": " | ".join(f"the seeded fault {fault} does not show" for fault in FAULTS)}


def test_what_does_not_come_to_an_answer_is_not_run() -> None:
    report = inspect("fake_loader:NotInstalled", None)
    assert (report.exit_code, report.told) == (5, ())
    assert report.not_run == (
        "fake_loader:NotInstalled cannot run here: ImportError: libengine.so: cannot open shared object file"
    )
    silent = judged("CountsNothing", "plain+missing")
    assert (silent.exit_code, silent.told[0].status) == (5, "not_run")
    crashed = inspect("fake_loader:Crashes", None, "plain+tp0of1")
    assert crashed.exit_code == 5
    assert "its process ended with code 7" in crashed.not_run


def test_a_known_defect_is_waived_and_a_waiver_that_covers_none_fails() -> None:
    def waiver(case: str) -> Waiver:
        return Waiver("fake_loader", ("Y11",), "docs/found.md, some", date(2999, 1, 1), case)

    by_value = judged("ByValue", "packed+scale:float32", "", (waiver("packed+scale:*"),))
    assert (by_value.exit_code, by_value.told[0].status) == (0, "waived")
    assert by_value.told[0].lines[0] == "known: docs/found.md, some"
    good = judged("Good", "packed+scale:float32", "", (waiver("packed+scale:*"),))
    assert good.exit_code == 1
    assert "remove the waiver" in good.told[0].lines[0]


def test_the_command_prints_what_it_proves_and_how_to_see_a_failure_again(cli: Cli, tmp_path: Path) -> None:
    good = ("run", "--subject", "fake_loader:Good", "--loader", "--case", "plain*")
    code, out, _ = cli(*good, "--out", str(tmp_path))
    assert code == 0, out
    assert "proves: the loaders of fake_loader:Good bring every byte of every expert to its place in the" in out
    written = json.loads((tmp_path / "loaders.json").read_text())
    assert {one["status"] for one in written["told"]} == {"passed"}
    code, out, _ = cli("run", "--subject", "fake_loader:UpFirst", "--loader", "--case", "packed+tp0*")
    assert code == 1, out
    assert "proves" not in out
    assert "reproduce: moonep-validate run --subject fake_loader:UpFirst --loader --case 'packed+tp0of1'" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--loader goes with an engine: --subject vllm, sglang or MODULE:CLASS of a Loader"),
        (
            ["--subject", "fake_loader:Good", "--ranks", "2"],
            "--ranks goes without --loader, which takes --subject",
        ),
        (
            ["--subject", "fake_loader:Good", "--case", "none*"],
            "--case none* names no variant; known: plain+tp0of1",
        ),
        (
            ["--subject", "fake_loader:Good", "--fault", "some"],
            "--fault some: a loader's faults are gate-up-swapped",
        ),
        (["--subject", "nonsense"], "--subject nonsense: loaders are known of vllm, sglang, or MODULE:CLASS"),
        (
            ["--subject", "fake_engine:Good"],
            "--subject fake_engine:Good is no Loader (subjects/loaders): it lacks",
        ),
        (["--subject", "vllm", "--engine-path", str(ENGINES)], "holds no package vllm"),
    ],
)
def test_wrong_usage_is_one_line(cli: Cli, arguments: list[str], says: str) -> None:
    code, _, err = cli("run", "--loader", *arguments)
    assert (code, len(err.splitlines())) == (4, 1), err
    assert says in err


def test_the_loader_must_lie_where_the_path_says(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="which does not lie in that folder"):
        inspect("fake_loader:Good", str(tmp_path), "plain+tp0of1")


def test_variants_name_their_ranks_and_experts() -> None:
    made = {one.word: one for one in variants_of("some", LoadPath("mxfp4"))}
    assert (made["ep1of2"].experts, made["tp1of2"].experts) == ((3, 4, 5), (0, 1, 2, 3, 4, 5))
    assert made["tp2of3"].tp == (2, 3)
    assert faults_of(Variant("some", LoadPath("bf16"), "tp0of1")) == [
        "gate-up-swapped",
        "expert-off-by-one",
        "cut-one-block-late",
    ]
