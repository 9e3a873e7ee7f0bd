"""What does a recorded trace say, and is it what was recorded? The judge's part of ``check``."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

from moonep_validate.judge.stages import STAGES
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.judge import judge
from moonep_validate.pipeline.recheck import recheck, skipped
from moonep_validate.trace.manifest import Entry, Manifest
from moonep_validate.trace.trace import Trace, TraceError


def judge_recorded(trace: Trace, entry: Entry) -> tuple[Trace, Verdict]:
    """Judge a trace again, and hold it against its case and its first verdict.

    Raises:
        TraceError: if it cannot be judged, is not what its case makes, or passes where it did not before.
    """
    if missing := sorted(set(STAGES) - set(trace.parts)):
        raise TraceError(f"the trace of {trace.case} says nothing of the stages {', '.join(missing)}")
    try:
        verdict = judge(trace)
    except Exception as error:  # the judge of a live run has no such input; here a file may hold anything
        raise TraceError(f"the trace of {trace.case} cannot be judged: {type(error).__name__}: {error}") from None
    if entry.status == "not_exercised":
        verdict.override = entry.status
    if verdict.status != entry.status and verdict.status in ("passed", "waived", "not_run", "not_applicable"):
        raise TraceError(
            f"{trace.case} was {entry.status} when it was recorded, and is {verdict.status} now: record anew"
        )
    if verdict.ok and (difference := recheck(trace)):
        raise TraceError(f"the trace of {trace.case} is not what its case makes: {difference}")
    return trace, verdict


def show_folder(console: Console, manifest: Manifest, traces: Iterable[Trace]) -> None:
    """Say what is not judged: cases that never ran or left no trace, and traces whose data cannot be compared."""
    never = sum(entry.status is None for entry in manifest.entries)
    left = sum(entry.status is not None and entry.file is None for entry in manifest.entries)
    lines = [f"{never} of {len(manifest.entries)} planned cases never ran: the run was interrupted"] * bool(never)
    lines += [f"{left} cases left no trace (--keep {manifest.keep}) and are not judged again"] * bool(left)
    reasons = [reason for trace in traces if (reason := skipped(trace))]
    lines += [
        f"{reasons.count(reason)} traces are not compared with the data of their case: {reason}"
        for reason in dict.fromkeys(reasons)
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
