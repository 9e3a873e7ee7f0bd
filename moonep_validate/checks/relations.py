"""Do two steps that must agree agree bit for bit? One result per promise and stage."""

from __future__ import annotations

import numpy as np
import torch

from moonep_validate.checks import Compared, differ_bits
from moonep_validate.facts import Absent, Missing, Step
from moonep_validate.trace import Relation, Trace
from moonep_validate.verdict import STAGES, Result

PROMISES = {
    "I10": "Undefined memory never influences a result",
    "I11": "A step after an exception in the layer is healthy",
    "V1": "A repeat gives the same bits",
    "V2": "A replay of a plan sends the same rows",
    "V3": "Zero-copy equals copy",
    "V4": "Asynchronous equals synchronous",
    "V5": "Leaving out route weights changes nothing else",
    "V6": "A plan is untouched by later calls",
    "V7": "A recreated or second Buffer gives the same bits",
    "V8": "Another layer on the same slots leaves no trace",
}


def relation_results(step: Step, trace: Trace) -> list[Result]:
    """Judge every promise that a step makes, tap by tap; a tap's operation is its stage."""
    results = []
    for relation, base in step.relations():
        by_stage: dict[str, list[str]] = {}
        for tap in relation.taps:
            op = tap.split(".")[0]
            by_stage.setdefault(op if op in STAGES else "life", []).append(tap)
        results += [_judge(step, base, relation, stage, taps, trace) for stage, taps in by_stage.items()]
    return results


def _judge(step: Step, base: Step, relation: Relation, stage: str, taps: list[str], trace: Trace) -> Result:
    level = trace.parts[stage].level
    compared, reason = [], ""
    try:
        for tap in taps:
            try:
                compared.append(_compare(step, base, *tap.split(".")))
            except Absent as absent:
                reason = str(absent)
        if not compared:
            return Result(relation.id, stage, step.name, "not_applicable", level, reason=reason)
    except Missing as missing:
        return Result(relation.id, stage, step.name, "not_run", level, reason=str(missing))
    except Exception as error:
        reason = f"the checker raised {type(error).__name__}: {error}"
        return Result(relation.id, stage, step.name, "unknown", level, reason=reason)
    examined = sum(c.examined for c in compared)
    findings = tuple(finding for c in compared for finding in c.findings)
    status = "failed" if findings else "passed" if examined else "vacuous"
    return Result(relation.id, stage, step.name, status, level, examined, findings)


def _compare(step: Step, base: Step, op: str, name: str) -> Compared:
    want, got = base.tap(op, name), step.tap(op, name)
    what = f"{op}.{name} of step {step.name!r} against {base.name!r}:"
    if op == "dispatch" and name in ("rows", "row_weights"):
        index = np.nonzero(base.in_group)
        inside = tuple(torch.from_numpy(axis) for axis in index)
        place = lambda i: {"rank": int(index[0][i[0]]), "row": int(index[1][i[0]])}  # noqa: E731
        return differ_bits(what, want[inside], got[inside], place)
    if op == "prefetch":
        used = torch.from_numpy(base.copies >= 0)
        if not used.any():
            raise Absent("the plan uses no slot")
        want, got = want[used], got[used]
    return differ_bits(what, want, got, lambda i: {"rank": i[0], "element": i[-1]})
