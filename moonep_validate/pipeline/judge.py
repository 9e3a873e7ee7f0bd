"""What is the verdict on a trace? Needs no subject, no world and no data of the case."""

from __future__ import annotations

from collections.abc import Sequence

from moonep_validate.judge.checks import Check, run_check
from moonep_validate.judge.checks.relations import relation_results
from moonep_validate.judge.coverage import bare
from moonep_validate.judge.facts import steps_of
from moonep_validate.judge.measures import balance, measures
from moonep_validate.judge.registry import step_checks
from moonep_validate.judge.verdict import NO_CHECK, Result, Verdict
from moonep_validate.judge.witnesses import absent_events, count_witnesses, vacuous_reasons
from moonep_validate.pipeline.lost import BEGIN, END
from moonep_validate.pipeline.returns import explained, returned
from moonep_validate.trace.recording import Recording
from moonep_validate.trace.trace import Trace

_NO_STEP = ("open", "close", "load", BEGIN[1], END[1])


def judge(trace: Trace, checks: Sequence[Check] | None = None) -> Verdict:
    """Judge a trace; needs no subject, no world and no data of the case.

    Args:
        trace: what happened.
        checks: which checks to run, all by default.
    """
    if trace.not_run:
        neutral = Result(NO_CHECK, "life", "-", "not_run", "none", reason=trace.not_run)
        return Verdict(trace.case, trace.parts, [neutral], reproducer=trace.reproducer)
    results, steps = [], steps_of(trace)
    for step in steps.values():
        results += returned(trace, step)
        if any(op not in _NO_STEP for op in step.ops()):
            results += [run_check(c, step, trace) for c in (step_checks() if checks is None else checks)]
            results += relation_results(step, trace)
    if trace.autopsy:
        results = explained(results, trace.autopsy["diagnosis"])
    counts = count_witnesses(trace.case, steps.values())
    vacuous, absent = vacuous_reasons(trace.case, steps.values(), counts), absent_events(trace.case, counts)
    if checks is None:
        stages = bare(trace.case, results, Recording.parse(trace.recording))
        idle = [f"stage {stage} was called, and no check compared anything there" for stage in stages]
        vacuous, absent = vacuous + idle, absent + idle
    return Verdict(
        case=trace.case,
        parts=trace.parts,
        results=results,
        witnesses=counts,
        vacuous=vacuous,
        absent=absent,
        measures=measures(steps.values()),
        balance=balance(steps.values()),
        errors=trace.errors,
        autopsy=trace.autopsy,
        reproducer=trace.reproducer,
        recording=trace.recording,
    )
