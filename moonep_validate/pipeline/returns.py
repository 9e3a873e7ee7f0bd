"""Did every call return on every rank? That is F1."""

from __future__ import annotations

from dataclasses import replace

from moonep_validate.judge.checks.adapter import capacities, disagree
from moonep_validate.judge.checks.life import RETURNS
from moonep_validate.judge.facts import Step
from moonep_validate.judge.stages import PLACE, STAGES
from moonep_validate.judge.verdict import Finding, Result
from moonep_validate.trace.trace import Call, Trace


def returned(trace: Trace, step: Step) -> list[Result]:
    """F1: every call of the step returned on every rank; one result per stage."""
    results = []
    split = disagree(capacities(step))  # then no Buffer is to blame, but who chose the sizes: I4 says so
    mine = [[call for call in calls if call.step == step.name] for calls in trace.calls]
    for op in step.ops():
        stage = op if op in STAGES else "layer" if op == "construct" and split else "life"
        calls = [(rank, call) for rank, calls in enumerate(mine) for call in calls if call.op == op]
        if op == "layer":  # it ends with whatever ended inside it; only what it raised by itself is its own
            calls = [(r, c) for r, c in calls if all(i.done and not i.error for i in mine[r] if i is not c)]
        findings = [finding for rank, call in calls if (finding := _broken(trace, rank, call))]
        hung = any(not call.done or (call.error or {}).get("type") == "Deadlock" for _, call in calls)
        status = "hung" if hung else "failed" if findings else "passed"
        level = trace.parts[stage].level
        results.append(Result(RETURNS.id, stage, step.name, status, level, len(calls), tuple(findings)))
    return results


def explained(results: list[Result], diagnosis: str) -> list[Result]:
    """The autopsy's sentence is the first finding at the earliest stage that did not return."""
    broken = [result for result in results if result.check == RETURNS.id and result.findings]
    if not broken:
        return results
    first = min((r for r in broken if r.step == broken[0].step), key=lambda r: PLACE[r.stage])
    told = Finding("autopsy", {}, "every rank goes on", diagnosis)
    return [replace(r, findings=(told, *r.findings)) if r is first else r for r in results]


def _broken(trace: Trace, rank: int, call: Call) -> Finding | None:
    """Why a call did not return, or None; a rank that only stopped for a peer has no finding."""
    what = f"{call.op} call of step {call.step}"
    if not call.done:
        hung = next((h for h in trace.hung if h["rank"] == rank), {"deadline": "?", "stack": ""})
        where = hung["stack"].strip().splitlines()[-2:]
        text = f"no return after {hung['deadline']} s; it is in {' '.join(' '.join(where).split())}"
        return Finding(what, {"rank": rank}, "return", text)
    if call.error and not call.error["peer"]:
        text = f"{call.error['type']}: {call.error['message']} ({call.error['where']})"
        return Finding(what, {"rank": rank}, "return", text)
    return None
