"""Do two steps agree where a relation says that they must? One result for each relation and stage."""

from __future__ import annotations

import numpy as np
import torch

from moonep_validate.judge.checks import Compared, differ, differ_bits, unmet
from moonep_validate.judge.facts import Absent, Missing, Step
from moonep_validate.judge.registry import Check, register
from moonep_validate.judge.stages import STAGES
from moonep_validate.judge.verdict import Result
from moonep_validate.trace.recording import Recording
from moonep_validate.trace.trace import Relation, Trace

_RELATIONS = (
    ("I10", "undefined-memory", "Undefined memory never influences a result"),
    ("I11", "healthy-after-exception", "The step after an exception in the layer equals the first step"),
    ("V1", "repeat", "A repeated step gives the same bits"),
    ("V2", "replay", "A replay of a plan sends the same rows"),
    ("V3", "zero-copy", "A zero-copy step equals one on copies"),
    ("V4", "asynchronous", "An asynchronous step equals a synchronous one"),
    ("V5", "without-weights", "Leaving out route weights changes nothing else"),
    ("V6", "plan-kept", "Later calls leave a plan as it was"),
    ("V7", "second-buffer", "A recreated Buffer, or a second one, gives the same bits"),
    ("V8", "shared-slots", "Another layer on the same slots leaves no trace"),
    ("V9", "tokens-permuted", "Tokens in another order have the same outputs"),
    ("V10", "experts-renumbered", "Experts under other numbers give the same outputs"),
    ("V11", "ranks-rotated", "Tokens on other ranks have the same outputs"),
    ("V12", "half-batch", "Half of a batch, run alone, has the outputs that it has in the whole batch"),
    ("V13", "other-tokens", "A token's output does not depend on the values of other tokens"),
    ("V14", "linear-down", "The output is linear in the down projection of an expert"),
    ("V15", "routes-split", "The outputs of the even and of the odd routes add up to the whole"),
    ("V16", "zero-weight-route", "A route of weight zero contributes nothing, wherever it goes"),
    ("V17", "expert-twice", "An expert that a token takes twice counts once, with the sum of both weights"),
    ("V18", "slot-count", "The number of slots changes nothing"),
    ("V19", "in-flight", "Batches in flight at the same time give what each gives alone"),
    ("V20", "cuda-graph", "A CUDA graph gives what eager calls give, also after other work"),
)
for _id, _name, _promise in _RELATIONS:
    register(Check(_id, _name, "layer", "relation", _promise, needs_gpu=_id == "V20", about_callers=_id == "I11"))


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
        return Result(relation.id, stage, step.name, unmet(step, base), level, reason=str(missing))
    except Exception as error:
        reason = f"the checker raised {type(error).__name__}: {error}"
        return Result(relation.id, stage, step.name, "unknown", level, reason=reason)
    examined = sum(c.examined for c in compared)
    if not examined and trace.recording == "plan":
        reason = "the recorder kept the plan only"
        return Result(relation.id, stage, step.name, "not_applicable", level, reason=reason)
    findings = tuple(finding for c in compared for finding in c.findings)
    status = "failed" if findings else "passed" if examined else "vacuous"
    return Result(relation.id, stage, step.name, status, level, examined, findings)


def _compare(step: Step, base: Step, op: str, name: str) -> Compared:
    what = f"{op}.{name} of step {step.name!r} against {base.name!r}:"
    _called_in_both(step, base, op)
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


def _called_in_both(step: Step, base: Step, op: str) -> None:
    """Raise where one of two steps lacks the call."""
    having = [op in one.ops() for one in (step, base)]
    if any(having) and not all(having):
        raise Missing(f"step {(step, base)[having.index(False)].name!r} made no {op} call")


def _compare_valid(step: Step, base: Step, name: str, what: str) -> Compared:
    """Rows of experts that were called alone; the others are undefined, and every rank has as many as it likes."""
    if not Recording.parse(step.trace.recording).full:
        raise Absent(f"it needs --record full, the recorder kept {step.trace.recording}")
    valid = [base.one("experts", rank, "valid") for rank in range(base.case.R)]
    place = [(rank, int(row)) for rank, mask in enumerate(valid) for row in mask.nonzero()[:, 0]]
    want, got = (
        torch.cat([s.one("experts", rank, name)[mask] for rank, mask in enumerate(valid)]) for s in (base, step)
    )
    return differ_bits(what, want, got, lambda i: {"rank": place[i[0]][0], "row": place[i[0]][1], "column": i[1]})


def _compare_moved(step: Step, relation: Relation, op: str, name: str) -> Compared:
    """Compare tokens with those that the relation names, or with sums of them, see ``trace.Relation``."""
    if relation.terms and not Recording.parse(step.trace.recording).reaches("columns"):
        raise Absent(f"sums need --record columns, the recorder kept {step.trace.recording}")
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
