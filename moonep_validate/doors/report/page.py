"""What does a reviewer read? report.html: one file without scripts, which asks nothing of the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from markupsafe import Markup

from moonep_validate.doors.report import plots
from moonep_validate.doors.report.baseline import BROKEN, KINDS
from moonep_validate.doors.report.outcome import CaseTold, Outcome, RunTold
from moonep_validate.doors.report.template import rendered
from moonep_validate.judge.stages import STAGES
from moonep_validate.judge.verdict import worst

#: Failures that are shown whole, maps of each, pictures of routings, and slowest cases.
_GROUPS, _MAPS, _PICTURES, _SLOW = 20, 6, 6, 12
_TONES = {
    "passed": "good",
    **dict.fromkeys(("failed", "hung", "error", "unknown", "incomplete"), "bad"),
    **dict.fromkeys(("not_run", "not_applicable"), "soft"),
}


def page(outcome: Outcome) -> str:
    """The whole page."""
    bad = [case for case in outcome.cases if case.gates]
    groups = _groups(outcome, bad)
    plans = _plans([case for case in outcome.cases if sum(case.balance.get("before", []))])
    differing = _differing(outcome)
    return rendered(
        "page.html.j2",
        outcome=outcome,
        title=f"{outcome.word}: {outcome.title}",
        tone=_tone,
        meaning=_meaning(outcome),
        kinds=KINDS,
        broken=BROKEN,
        counts=Counter(case.status for case in outcome.cases),
        unjudged=sum(run.planned for run in outcome.runs) - len(outcome.cases),
        compared=sum(sum(case.compared.values()) for case in outcome.cases),
        judged=Counter(case.run for case in outcome.cases),
        bad=len(bad),
        groups=groups[:_GROUPS],
        more_groups=len(groups[_GROUPS:]),
        skipped=Counter(case.reason for case in outcome.cases if case.status == "not_run"),
        waived=Counter(one.reason for case in outcome.cases for one in case.problems if one.status == "waived"),
        stages=list(_stages(outcome)),
        differing=differing,
        plans=plans,
        checks=_checks(outcome),
        idle=sorted(set(outcome.checks) - {check for case in outcome.cases for check in case.compared}),
        times=_bars(list(outcome.times.items())),
        slowest=_bars(_slowest(outcome)),
        not_passed=[case for case in outcome.cases if case.status != "passed"],
        passing=[case for case in outcome.cases if case.status == "passed"],
        environment=[(name.replace("_", " "), value) for name, value in outcome.environment.items()],
        sections=_sections(outcome, bool(groups), bool(differing), bool(plans)),
    )


def _sections(outcome: Outcome, failed: bool, differs: bool, planned: bool) -> list[tuple[str, str]]:
    every = [
        ("baseline", "Baseline", bool(outcome.baseline)),
        ("failures", "What went wrong", failed),
        ("ran", "What ran", True),
        ("stages", "Stages", True),
        ("differ", "Differences", differs),
        ("plans", "Plans", planned),
        ("checks", "Checks", True),
        ("times", "Times", True),
        ("cases", "Cases", True),
        ("manifest", "Manifest", bool(outcome.environment)),
    ]
    return [(id, name) for id, name, there in every if there]


def _tone(word: str) -> str:
    return _TONES.get(word.partition(":")[0], "warn")


def _meaning(outcome: Outcome) -> str:
    """One sentence under the answer."""
    whole = f"It counts as {outcome.level}: the weakest part that ran is {outcome.level}."
    if outcome.status == "incomplete":
        return "It was interrupted: what is here is what was known by then, and no pass."
    if outcome.exit_code:
        return f"It proves nothing as it stands. {whole}" if outcome.cases else "Nothing was judged."
    return f"The checks compared what is listed here, and found no difference that counts. {whole}"


def _groups(outcome: Outcome, bad: Sequence[CaseTold]) -> list[dict[str, Any]]:
    """Failures that say the same of one run, those of the most cases first; each by its shortest case."""
    runs = {run.name: run for run in outcome.runs}
    alike: dict[tuple[str, str], list[CaseTold]] = {}
    for case in bad:
        alike.setdefault((case.run, case.headline), []).append(case)
    ordered = sorted(alike.values(), key=len, reverse=True)
    return [_group(outcome, runs.get(cases[0].run), cases) for cases in ordered]


def _group(outcome: Outcome, run: RunTold | None, cases: list[CaseTold]) -> dict[str, Any]:
    case = min(cases, key=lambda one: (len(one.case), one.case))
    first = case.first
    about = outcome.checks.get(first.check, {}) if first else {}
    maps = [finding for finding in (first.findings if first else []) if finding.get("spread")][:_MAPS]
    owner = [part for part in (run.evidence if run else []) if case.stage in part.stages]
    smallest = run.smallest if run and run.smallest_of in {one.case for one in cases} else ""
    return {
        "case": case,
        "cases": cases,
        "first": first,
        "name": about.get("name", ""),
        "promise": about.get("promise", ""),
        "owner": f"{owner[0].level}: {owner[0].text}" if owner else "",
        "lines": [*(first.lines if first else []), *case.more, *_others(case)],
        "maps": [_map(one) for one in maps],
        "axes": "Lines and columns are the last two axes, panels the others." if maps else "",
        "smallest": smallest,
    }


def _others(case: CaseTold) -> list[str]:
    """What else differs in the case, one line each."""
    rest = [one for one in case.problems if one is not case.first and one.status != "waived"]
    what = [f"also {one.status} at {one.stage}, {one.check} in step {one.step}: " for one in rest]
    return [start + "; ".join(one.lines[:1]) for start, one in zip(what, rest, strict=True)]


def _map(finding: dict[str, Any]) -> dict[str, Any]:
    spread = finding["spread"]
    fixed = [f"{name.replace('_', ' ')} {finding['place'][name]}" for name in finding["place"]]
    axes = [axis["text"] for axis in spread["axes"]]
    named = {axis["name"] for axis in spread["axes"]}
    outside = [text for text in fixed if text.partition(" ")[0] in {"rank", "slot", "expert"} - named]
    text = f"{finding['what']}: {', '.join([*outside, *axes])}"
    return {"text": text, "svg": Markup(plots.heat(spread, text))}


def _stages(outcome: Outcome) -> Iterable[dict[str, Any]]:
    """A row for each stage that any run reached."""
    for name, stage in STAGES.items():
        cells = [_cell(name, [case for case in outcome.cases if case.run == run.name]) for run in outcome.runs]
        if any(cells):
            yield {"stage": name, "does": stage.does, "cells": cells}


def _cell(stage: str, cases: Sequence[CaseTold]) -> tuple[str, int] | None:
    found = [case.stages[stage] for case in cases if stage in case.stages]
    counted = [one for one in found if one not in ("not_applicable", "not_run")]
    return (worst(counted), len(counted)) if counted else None


def _differing(outcome: Outcome) -> list[tuple[str, list[str]]]:
    """Cases that two runs or more have, with different answers."""
    names = [run.name for run in outcome.runs]
    found: dict[str, dict[str, str]] = {}
    for case in outcome.cases:
        found.setdefault(case.case, {})[case.run] = case.status
    rows = [(line, [found[line].get(name, "-") for name in names]) for line in found]
    return [(line, words) for line, words in rows if len(set(words) - {"-"}) > 1]


_DOTS: dict[str, Callable[[CaseTold], float]] = {
    "rows moved, share of all": lambda case: sum(case.balance["moved"]) / sum(case.balance["rows"]),
    "slots used": lambda case: sum(case.balance["slots"]),
    "padding, rows for each row": lambda case: sum(case.balance["padding"]) / sum(case.balance["rows"]),
    "bytes prefetched, all ranks": lambda case: sum(case.balance["bytes"]),
    "MaxVio that is left": lambda case: (
        max(case.balance["rows"]) * len(case.balance["rows"]) / sum(case.balance["rows"]) - 1
    ),
}


def _plans(cases: Sequence[CaseTold]) -> dict[str, Any] | None:
    """Figures of plans over MaxVio, and the least even routings rank by rank."""
    if not cases:
        return None
    at = [(case, plots.max_vio(case.balance["before"])) for case in cases if sum(case.balance["rows"])]
    dots = [
        {"text": name, "svg": Markup(plots.over_max_vio([(x, of(case)) for case, x in at], name))}
        for name, of in _DOTS.items()
    ]
    shown: dict[str, CaseTold] = {}
    for case, _ in sorted(at, key=lambda one: -one[1]):
        shown.setdefault(_drawn(case), case)
    ranks = [
        {"text": one.case, "svg": Markup(plots.ranks(one.balance["before"], one.balance["rows"], one.case))}
        for one in list(shown.values())[:_PICTURES]
    ]
    return {"dots": dots, "ranks": ranks}


def _drawn(case: CaseTold) -> str:
    """What makes two pictures the same."""
    return repr((case.balance["before"], case.balance["rows"]))


def _checks(outcome: Outcome) -> list[dict[str, Any]]:
    """The checks that compared something, in the order of the pipeline."""
    cases, compared = Counter[str](), Counter[str]()
    for case in outcome.cases:
        cases.update(case.compared.keys())
        compared.update(case.compared)
    return [
        {"id": id, **about, "cases": cases[id], "compared": compared[id]}
        for id, about in outcome.checks.items()
        if cases[id]
    ]


def _slowest(outcome: Outcome) -> list[tuple[str, float]]:
    ordered = sorted(outcome.cases, key=lambda case: -case.seconds)[:_SLOW]
    return [(case.case, case.seconds) for case in ordered if case.seconds]


def _bars(rows: Sequence[tuple[str, float]]) -> list[tuple[str, float, float]]:
    """Names, seconds, and the share of the longest in percent."""
    most = max([1e-9, *(value for _, value in rows)])
    return [(name, value, 100 * value / most) for name, value in rows]
