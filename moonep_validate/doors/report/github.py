"""What does GitHub show of a gate? A job summary in Markdown, and annotations at the part that broke."""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moonep_validate.doors.report.outcome import CaseTold, Outcome, RunTold

#: GitHub shows ten annotations a step.
_MOST, _ROWS = 10, 50


def error_lines(outcome: Outcome, tolerated: frozenset[tuple[str, str]], workspace: Path | None) -> list[str]:
    """Lines for standard output, ``::error ...``: one a failure, at the file of the part that owns its stage.

    Args:
        outcome: of a gate.
        tolerated: keys of cases whose failure the baseline has too.
        workspace: the checkout; files outside it are not named.
    """
    runs = {run.name: run for run in outcome.runs}
    lines = [_error(line, "moonep-validate gate") for run in outcome.runs for line in run.unmet]
    gone = outcome.baseline.get("gone", [])
    lines += [_error(line, "moonep-validate gate: against the baseline") for line in gone]
    seen: dict[str, CaseTold] = {}
    for case in outcome.cases:
        if case.gates and case.key not in tolerated:
            seen.setdefault(f"{case.run} {case.headline}", case)
    lines += [
        _error("\n".join(case.diagnosis), f"{case.run}: {case.headline}", *_place(runs[case.run], case, workspace))
        for case in seen.values()
    ]
    return lines[:_MOST]


@contextmanager
def unheard(say: Callable[[str], None]) -> Iterator[None]:
    """On GitHub no printed line is a command meanwhile: messages of what is judged may look like one."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        yield
        return
    token = secrets.token_hex(16)  # who does not know it cannot end this
    say(f"::stop-commands::{token}")
    try:
        yield
    finally:
        say(f"::{token}::")


def usage(message: str) -> str:
    """The line of a gate that could not begin."""
    return _error(message, "moonep-validate gate")


def _place(run: RunTold, case: CaseTold, workspace: Path | None) -> tuple[str, str]:
    """The file of the part that owns the broken stage, and the line that raised; empty outside the checkout."""
    files = [one.file for one in run.evidence if case.stage in one.stages and one.file]
    if not files or workspace is None:
        return "", ""
    raised = re.search(rf"\({re.escape(Path(files[0]).name)}:(\d+) in ", "\n".join(case.diagnosis))
    try:
        file = Path(files[0]).resolve().relative_to(workspace.resolve()).as_posix()
    except ValueError:
        return "", ""
    return file, raised[1] if raised else "1"


def _error(message: str, title: str, file: str = "", line: str = "") -> str:
    where = f"file={_property(file)},line={line}," if file else ""
    return f"::error {where}title={_property(title[:200])}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def summary(outcome: Outcome) -> str:
    """The job summary: one screen of Markdown."""
    return "\n".join(_summary(outcome)) + "\n"


def _summary(outcome: Outcome) -> Iterator[str]:
    yield f"## moonep-validate: {outcome.word}, exit code {outcome.exit_code}"
    yield "\n| run | verdict | level | cases | seconds |\n| --- | --- | --- | --- | --- |"
    for run in outcome.runs:
        counts = Counter(case.status for case in outcome.cases if case.run == run.name)
        cases = ", ".join(f"{count} {status}" for status, count in counts.items()) or "none"
        yield f"| {_cell(run.name)} | {run.status} | {run.level} | {cases} of {run.planned} | {run.seconds:.1f} |"
    for run in outcome.runs:
        yield from (f"\n**{_cell(line)}**" for line in run.unmet)
    for kind, lines in outcome.baseline.items():
        yield from (f"\n{kind} against the baseline: {_cell(line)}" for line in lines[:_ROWS])
    if bad := [case for case in outcome.cases if case.gates]:
        yield "\n| case | what is wrong |\n| --- | --- |"
        yield from (f"| `{case.case}` | {_cell(case.headline)} |" for case in bad[:_ROWS])
        yield f"\n{len(bad)} of {len(outcome.cases)} cases" + ", the first ones above" * (len(bad) > _ROWS)
        yield f"\n```\n{bad[0].command}\n```"


def _cell(text: str) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return escaped.replace("`", "'").replace("\n", " ")
