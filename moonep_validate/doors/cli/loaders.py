"""What ``run --loader`` prints: each checkpoint that went through an engine's loader, and what became of it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moonep_validate import __version__
from moonep_validate.cases.case import CaseError
from moonep_validate.doors.cli.options import console
from moonep_validate.pipeline.kinds import kind_name
from moonep_validate.pipeline.options import Options, spelled

if TYPE_CHECKING:
    from moonep_validate.tools.loaders import Report, Told

#: Options that say something about loaders.
_TAKES = ("subject", "engine_path", "waivers", "case", "fault")
#: Lines of one variant that are printed; ``--out`` has all.
_SHOWN = 4


def judge_loader(options: Options, out: Path | None) -> None:
    """Judge an engine's loaders, print the answers, and end with the exit code.

    Raises:
        CaseError: for options that do not go with ``--loader``; else see ``tools.loaders.inspect``.
    """
    if kind_name(options) != "engine":
        raise CaseError("--loader goes with an engine: --subject vllm, sglang or MODULE:CLASS of a Loader")
    if other := [name for name in options.given if name not in _TAKES]:
        raise CaseError(
            f"{spelled(other[0])} goes without --loader, which takes {', '.join(map(spelled, _TAKES))}"
        )
    if len(options.case) > 1 or len(options.fault) > 1:
        raise CaseError("--loader takes one --case, a glob of its variants' names, and one --fault")
    from moonep_validate.judge.waivers import waivers_of
    from moonep_validate.tools.loaders import inspect

    waivers = waivers_of("" if options.waivers == "none" else options.waivers)
    begin = time.monotonic()
    chosen, fault = next(iter(options.case), "*"), next(iter(options.fault), "")
    with console.status("loading"):
        report = inspect(options.subject, options.engine_path, chosen, fault, waivers)
    _print(f"moonep-validate {__version__}: loaders of {options.subject}")
    _show(report, options, time.monotonic() - begin)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "loaders.json").write_text(dumps(asdict(report), indent=1) + "\n")
    raise typer.Exit(report.exit_code)


def _show(report: Report, options: Options, seconds: float) -> None:
    if report.part:
        seams = f"; replaced: {'; '.join(report.part.seams)}" if report.part.seams else ""
        _print(f"evidence: {report.part.level} {report.part.package} {report.part.version}{seams}")
    for told in report.told:
        _show_one(told)
    for told in [one for one in report.told if one.status == "failed"][:1]:
        _print(f"reproduce: {_command(options, told.name)}")
    if report.not_run:
        _print(f"not run: {report.not_run}")
    counts = Counter(told.status for told in report.told)
    seen = sum(len(told.faults) for told in report.told)
    if report.exit_code == 0:
        _print(
            f"proves: the loaders of {options.subject} bring every byte of every expert to its place in the "
            f"{counts['passed']} variants that passed; {seen} seeded faults were seen"
        )
        _print("leaves open: what a backend makes of the bytes afterwards; ranks were stated, not run")
    word = {0: "waived" if counts["waived"] else "passed", 1: "failed"}.get(report.exit_code, "not_run")
    what = ", ".join(f"{count} {status}" for status, count in counts.items()) or "none"
    _print(f"{word}: {len(report.told)} variants ({what}) in {seconds:.1f} s, exit code {report.exit_code}")


def _show_one(told: Told) -> None:
    faults = f"; {len(told.faults)} seeded faults were seen" if told.faults else ""
    _print(f"{told.status:8} {told.check:4} {told.name}{faults}")
    shown = 2 if told.status == "waived" else _SHOWN
    for line in told.lines[:shown]:
        _print(f"           {line}")
    if len(told.lines) > shown and told.status != "waived":
        _print(f"           and {len(told.lines) - shown} more lines")


def _command(options: Options, name: str) -> str:
    path = f" --engine-path {options.engine_path}" if options.engine_path else ""
    fault = "".join(f" --fault {fault}" for fault in options.fault)
    return f"moonep-validate run --subject {options.subject}{path} --loader --case '{name}'{fault}"


def _print(text: str) -> None:
    if text:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
