"""The command ``history``: revisions of an engine's repository, each run in a scratch worktree; what went red?"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonep_validate.cases.case import CaseError
from moonep_validate.doors.cli.options import console, takes
from moonep_validate.pipeline.options import DECLARED, REFERENCE, Options, spelled

if TYPE_CHECKING:
    from moonep_validate.doors.report.outcome import Outcome
    from moonep_validate.tools.history import Found, Seen
    from moonep_validate.tools.revisions import Revision, Scratch

_MAIN = "moonep_validate.doors.cli.main"
_NOTHING = 5
#: Left to ``run`` alone: where the engine lies, and what a gate asks for.
_TAKES = set(DECLARED) - {"engine_path", "moonep_module", "api", "policy", "relaxed", "destructive", "experts"}


@takes(*(_TAKES - {"require", "require_cases", "record"}))
def history(
    options: Options,
    revisions: Annotated[list[str], typer.Argument(metavar="REV...", help="Commits, or ranges A..B.")],
    repo: Annotated[Path, typer.Option(help="The engine's git repository; nothing in it is changed.")],
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Two REV, a good and a bad one: find the first that is bad.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=1.0, help="Time for each revision.")] = 600.0,
) -> None:
    """Judge revisions of an engine, each in a scratch worktree: what went red, and what went green?"""
    from moonep_validate.tools import history as study
    from moonep_validate.tools.revisions import scratch

    if options.subject == REFERENCE:
        raise CaseError("history goes with an engine: --subject vllm, sglang or MODULE:CLASS")
    if bisect and len(revisions) != 2:
        raise CaseError(f"--bisect takes two revisions, a good and a bad one; {len(revisions)} were given")
    with scratch(repo) as place:
        named = place.revisions(revisions)
        line = place.between(*named) if bisect and len(named) == 2 else named
        seen: list[Seen] = []

        def judge(revision: Revision) -> Seen:
            seen.append(_judged(place, revision, options, seconds))
            _print(_line(seen[-1]))
            return seen[-1]

        if bisect:
            _end_of_bisection(study.bisect(named[0], line, judge))
        for revision in line:
            judge(revision)
    _show(seen)
    raise typer.Exit(_exit_code(seen))


def _judged(scratch: Scratch, revision: Revision, options: Options, seconds: float) -> Seen:
    """What a run of one revision says, in a process of its own."""
    from moonep_validate.tools.history import Seen

    with scratch.laid_out(revision) as tree, TemporaryDirectory() as folder:
        found = _holder(tree, options.subject)
        if isinstance(found, str):
            return Seen(revision, "not_run", reason=found)
        out = Path(folder) / "out"
        code, last = _ran(_arguments(options, found, out), seconds)
        if code is None:
            return Seen(revision, "hung", reason=f"it did not end within {seconds:g} s")
        if not (out / "report.json").is_file():
            return Seen(revision, "not_run", reason=last or f"exit code {code}")
        import moonep_validate.judge.checks  # noqa: F401 - headlines say the promises of checks
        from moonep_validate.doors.report.outcome import read_outcome

        return _seen(revision, read_outcome(out))


def _holder(tree: Path, subject: str) -> Path | str:
    """The folder of a worktree that holds the engine's package, or why there is none."""
    from moonep_validate.subjects.engines.path import holder
    from moonep_validate.subjects.engines.start import declared

    package = declared(subject).package
    return holder(tree, package) or f"it holds no package {package}, neither at its root nor in a folder below"


def _arguments(options: Options, path: Path, out: Path) -> list[str]:
    """Those of ``run``."""
    given: list[str] = []
    for name in options.given:
        value: Any = getattr(options, name)
        for one in value if isinstance(value, tuple) else (value,):
            given += [spelled(name), str(one)]
    return [
        "run",
        *given,
        "--engine-path",
        str(path),
        "--out",
        str(out),
        "--keep",
        "none",
        "--shrink-seconds",
        "0",
    ]


def _ran(arguments: list[str], seconds: float) -> tuple[int | None, str]:
    """The exit code, None where time was over, and the last line that was said of an error."""
    from moonep_validate.worlds import descendants, launch

    with _process(launch.command(_MAIN, *arguments)) as process:
        try:
            error = process.communicate(timeout=seconds)[1]
            return process.returncode, (error.strip().splitlines() or [""])[-1]
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            descendants.end_group(process.pid)


@contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    streams: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.PIPE,
    }
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(command, text=True, start_new_session=True, env=environment, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def _seen(revision: Revision, outcome: Outcome) -> Seen:
    """What an outcome says of its checks."""
    from moonep_validate.judge.verdict import worst
    from moonep_validate.tools.history import Seen

    checks: dict[str, str] = {}
    for case in outcome.cases:
        told = dict.fromkeys(case.compared, "passed") | {one.check: one.status for one in case.problems}
        checks |= {check: worst([status, checks.get(check, "not_applicable")]) for check, status in told.items()}
    bad = next((case for case in outcome.cases if case.gates), None)
    idle = next((case.reason for case in outcome.cases if case.reason), "")
    status = worst([case.status for case in outcome.cases])
    return Seen(revision, status, checks, bad.headline if bad else idle if status == "not_run" else "")


def _line(seen: Seen) -> str:
    passed = sum(status == "passed" for status in seen.checks.values())
    red = f"; red: {' '.join(sorted(seen.red))}" if seen.red else ""
    reason = f": {seen.reason}" if seen.reason else ""
    return f"{seen.revision.short} {seen.status:8} {passed} checks passed{red}  {seen.revision.title}{reason}"


def _show(seen: Sequence[Seen]) -> None:
    """Revision by check, then what changed from one to the next."""
    from moonep_validate.tools.history import changes

    rows = sorted({check for one in seen for check in one.red if check in one.checks})
    if rows:
        _print("\n" + " ".join(["check".ljust(28), *(one.revision.short for one in seen)]))
    for check in rows:
        cells = [(one.checks.get(check, "-") if one.judged else "not run").ljust(10) for one in seen]
        _print(" ".join([_name(check).ljust(28), *cells]))
    for change in changes(seen):
        told = {"went red": change.red, "went green": change.green, "judged no more": change.gone}
        for what, checks in told.items():
            if checks:
                _print(
                    f"{change.after.short} after {change.before.short}, {what}: {', '.join(map(_name, checks))}"
                )


def _name(check: str) -> str:
    """A check with its name; what is none is a status, which has no more to it."""
    from moonep_validate.judge.checks import CHECKS

    return str(CHECKS.get(check, check))


def _end_of_bisection(found: Found) -> None:
    """Print it, and end: exit code 0 if the revision was found, else 1."""
    if found.first is None:
        _print(f"nothing to find: {found.why}")
        raise typer.Exit(1)
    _print(f"first bad revision: {found.first.sha} {found.first.title} ({found.why})")
    if found.suspects:
        names = " ".join(one.short for one in found.suspects)
        _print(f"or one of these before it, which were not judged: {names}")
    raise typer.Exit(0)


def _exit_code(seen: Sequence[Seen]) -> int:
    """That of the last revision, as ``run`` has it."""
    from moonep_validate.judge.verdict import EXIT_CODES

    if not any(one.judged for one in seen):
        return _NOTHING
    return EXIT_CODES[seen[-1].status] or (0 if seen[-1].judged else _NOTHING)


def _print(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
