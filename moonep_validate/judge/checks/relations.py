"""Do steps that must agree agree, after what the relation says of them? One result per promise and stage."""

from __future__ import annotations

import numpy as np
import torch

from moonep_validate.judge.checks import Compared, differ, differ_bits
from moonep_validate.judge.facts import Absent, Missing, Step
from moonep_validate.judge.verdict import STAGES, Result
from moonep_validate.trace.keep import Keep
from moonep_validate.trace.trace import Relation, Trace

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
    "V9": "Tokens in another order have the same outputs",
    "V10": "Experts under other numbers give the same outputs",
    "V11": "Tokens on other ranks have the same outputs",
    "V12": "Half of a batch alone has the same outputs",
    "V13": "A token's output does not depend on other tokens' values",
    "V14": "The output is linear in the down projection of an expert",
    "V15": "The outputs of even and of odd routes add up",
    "V16": "A route of weight zero contributes nothing, wherever it goes",
    "V17": "An expert taken twice counts as once with the sum of the weights",
    "V18": "The number of slots changes nothing",
    "V19": "Batches in flight at a time give what each gives alone",
    "V20": "A CUDA graph gives what eager calls give, also after other work",
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
                moved = relation.tokens is not None or relation.terms
                op, name = tap.split(".")
                compared.append(
                    _compare_moved(step, relation, op, name) if moved else _compare(step, base, op, name)
                )
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
    if not examined and trace.keep == "plan":
        reason = "the recorder kept the plan only"
        return Result(relation.id, stage, step.name, "not_applicable", level, reason=reason)
    findings = tuple(finding for c in compared for finding in c.findings)
    status = "failed" if findings else "passed" if examined else "vacuous"
    return Result(relation.id, stage, step.name, status, level, examined, findings)


def _compare(step: Step, base: Step, op: str, name: str) -> Compared:
    what = f"{op}.{name} of step {step.name!r} against {base.name!r}:"
    if op == "experts" and base.has("experts", "valid"):
        return _compare_valid(step, base, name, what)
    want, got = base.tap(op, name), step.tap(op, name)
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


def _compare_valid(step: Step, base: Step, name: str, what: str) -> Compared:
    """Rows of experts that were called alone; the others are undefined, and every rank has as many as it likes."""
    if base.has("experts", "sample"):
        raise Missing("only some rows of the experts are kept")
    valid = [base.one("experts", rank, "valid") for rank in range(base.case.R)]
    place = [(rank, int(row)) for rank, mask in enumerate(valid) for row in mask.nonzero()[:, 0]]
    want, got = (
        torch.cat([s.one("experts", rank, name)[mask] for rank, mask in enumerate(valid)]) for s in (base, step)
    )
    return differ_bits(what, want, got, lambda i: {"rank": place[i[0]][0], "row": place[i[0]][1], "column": i[1]})


def _compare_moved(step: Step, relation: Relation, op: str, name: str) -> Compared:
    """Compare tokens with those that the relation names, or with sums of them, see ``trace.Relation``."""
    if relation.terms and not Keep.parse(step.trace.keep).reaches("columns"):
        raise Absent(f"sums need --record columns, the recorder kept {step.trace.keep}")
    got = step.tap(op, name)
    ranks, tokens = got.shape[:2]
    here = torch.arange(ranks * tokens).view(ranks, tokens)
    there = here if relation.tokens is None else torch.tensor(relation.tokens)
    if there.shape != here.shape:
        raise Missing(f"{op}.{name} has {tokens} tokens a rank, the relation names {there.shape[1]}")
    here, there = here[there >= 0], there[there >= 0]
    if not len(here):
        raise Absent("no rank has a token to compare")

    def place(i: tuple[int, ...]) -> dict[str, int]:
        rank, token = divmod(int(here[i[0]]), tokens)
        base_rank, base_token = divmod(int(there[i[0]]), tokens)
        where = {"rank": rank, "token": token, "column": i[-1]}
        same = (rank, token) == (base_rank, base_token)
        return where if same else {**where, "base_rank": base_rank, "base_token": base_token}

    mine = got.flatten(0, 1)[here]
    if not relation.terms:
        base = step.sibling(relation.base).tap(op, name).flatten(0, 1)[there]
        return differ_bits(f"{op}.{name} of step {step.name!r} against {relation.base!r}:", base, mine, place)
    want = torch.zeros(mine.shape, dtype=torch.float64)
    for other, factor in relation.terms:
        want += factor * step.sibling(other).tap(op, name).flatten(0, 1)[there].double()
    against = " ".join(f"{factor:+d} * {other!r}" for other, factor in relation.terms)
    against = repr(relation.base) if relation.terms == ((relation.base, 1),) else against
    what = f"{op}.{name} of step {step.name!r} against {against}:"
    return differ(what, want, mine.double(), place, bad=~(want == mine.double()))
