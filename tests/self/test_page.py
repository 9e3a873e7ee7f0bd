"""report.html: what a reviewer finds on it, that it asks nothing of the network, and that it stays small."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from moonep_validate.doors.report import plots
from moonep_validate.doors.report.outcome import Outcome, Problem, RunTold, case_told, run_told
from moonep_validate.doors.report.page import page
from moonep_validate.faults import parse_fault
from moonep_validate.judge.checks import CHECKS
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.run import run_case
from tests.self.conftest import CASE
from tests.self.test_gate import failed, outcome, told

_VOID = {"meta", "link", "path", "rect", "circle", "br", "i"}


class _Reader(HTMLParser):
    """Collects text, ids and links, and notes tags that are not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.ids, self.links, self.open = "", list[str](), list[str](), list[str]()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [name for name in [given.get("id")] if name]
        self.links += [value for name, value in attrs if name in ("href", "src", "srcset") and value]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} is not the tag that is open"

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def seen(what: Outcome) -> _Reader:
    found = _Reader(page(what))
    assert found.open == [], "every tag is closed"
    assert len(set(found.ids)) == len(found.ids)
    assert all(link == "data:," or link.removeprefix("#") in found.ids for link in found.links), found.links
    return found


@pytest.fixture(scope="module")
def whole() -> Outcome:
    """A run with a fault at prefetch."""
    job = Job(faults=(parse_fault("slot-not-filled"),))
    data = run_case(job, CASE)[1].to_json()
    report = {
        "status": "failed",
        "exit_code": 1,
        "planned": 1,
        "cases": [data],
        "smallest": ("moonep-validate small", str(CASE)),
    }
    run, cases = run_told("reference", "reference", report)
    checks = {c.id: {"name": c.name, "stage": c.stage, "promise": c.promise} for c in CHECKS.values()}
    return Outcome("reference", "failed", 1, [run], cases, checks, {"reference": 1.5})


def test_a_failure_has_promise_place_map_smallest_case_and_command(whole: Outcome) -> None:
    text = " ".join(seen(whole).text.split())
    for said in (
        "failed at stage prefetch: W1 slot-content in 1 case of reference",
        "promise: Each used slot holds the weights of its expert.",
        "broken part: reference: moonep_validate.reference",
        "gate weight bits at rank 1, slot 0, expert",
        "smallest failing case, tried: moonep-validate small",
        f"see it again: moonep-validate run --case '{CASE}' --fault slot-not-filled",
        "level of evidence reference",
        "exit code 1",
        "all 24 weight columns",
    ):
        assert said in text, said
    assert 'class="wrong"' in page(whole)


def test_the_page_has_no_script_and_asks_nothing_of_the_network(whole: Outcome) -> None:
    text = page(whole)
    for word in ("<script", "http:", "https:", "url(", "@import", "onload", "onclick"):
        assert word not in text, word


def test_what_ran_and_what_did_not_is_said() -> None:
    what = outcome(told(), told("d", "not_run", reason="no GPU"), planned=5, unmet=("--fail-fast: 3 of 5",))
    text = " ".join(seen(what).text.split())
    assert "failed: not all was reached" in text
    assert "1 cases: no GPU" in text
    assert "3 never judged" in text
    assert "--fail-fast: 3 of 5" in text


@pytest.mark.parametrize(
    ("status", "code", "meaning"),
    [
        ("passed", 0, "found no difference that counts. It counts as real"),
        ("vacuous", 10, "It proves nothing as it stands"),
        ("hung", 13, "It proves nothing as it stands"),
        ("incomplete", 2, "It was interrupted: what is here is what was known by then, and no pass."),
    ],
)
def test_the_answer_is_on_top(status: str, code: int, meaning: str) -> None:
    what = replace(
        outcome(told(status=status if status != "incomplete" else "passed")), status=status, exit_code=code
    )
    text = " ".join(seen(what).text.split())
    assert f"moonep-validate {what.version}: r {status} " in text
    assert meaning in text


def test_runs_stand_side_by_side() -> None:
    one = told(stages={"plan": "passed", "combine": "passed"})
    two = failed(run="s", stage="combine", check="C1")
    two = replace(two, stages={"plan": "passed", "combine": "failed"})
    what = outcome(one)
    what = replace(what, runs=[*what.runs, RunTold("s", "s", "failed", 1, 1)], cases=[one, two])
    text = " ".join(seen(what).text.split())
    assert "combine passed 1 failed 1 MoonEP adds the rows" in text
    assert "Cases that differ between runs case r s c passed failed" in text


def test_text_from_outside_is_text() -> None:
    evil = "</pre><script>alert(1)</script>\"'&"
    problem = Problem("W1", "prefetch", "base", "failed", evil)
    bad = told(evil, "failed", stage="prefetch", check="W1", problems=[problem], command=evil, more=[evil])
    bad = replace(bad, balance={name: [1, 2] for name in ("before", "rows", "moved", "slots", "padding", "bytes")})
    what = replace(outcome(bad), environment={"command": evil, "variables": {evil: evil}}, title=evil)
    assert "<script" not in page(what)
    assert evil in seen(what).text


def test_ten_thousand_cases_are_a_small_page(whole: Outcome) -> None:
    bad, good = whole.cases[0], case_told("reference", run_case(Job(), CASE)[1].to_json())
    cases = [
        replace(bad if at % 9 == 0 else good, case=f"{CASE}+seed{at}", seconds=at / 1e4) for at in range(10_000)
    ]
    what = replace(whole, cases=cases, runs=[replace(whole.runs[0], planned=10_000)])
    begin = time.process_time()
    text = page(what)
    assert len(text) < 3_000_000
    assert time.process_time() - begin < 20
    assert "8,888" in text
    assert f"{CASE}+seed9999" in text, "each case is on the page"


def test_pictures_of_plans_are_to_scale() -> None:
    picture = plots.ranks([30, 10], [20, 20], "t")
    heights = [float(h) for h in re.findall(r'<rect class="\w+"[^>]* height="([\d.]+)"', picture)]
    assert heights[0] == pytest.approx(3 * heights[2], abs=0.2)
    assert heights[1] == heights[3] == pytest.approx(2 * heights[2], abs=0.2)
    assert len(re.findall("<rect", plots.ranks([1] * 896, [1] * 896, "t"))) == 64, "many ranks are binned"
    assert plots.max_vio([30, 10]) == 0.5
    assert len(re.findall("<circle", plots.over_max_vio([(1, 1)] * 99 + [(2, 2)], "t"))) == 2
