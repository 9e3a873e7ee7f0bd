"""Has every tensor of every call on every rank the promised form? One check per stage, before any value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from moonep_validate.judge.checks import Compared
from moonep_validate.judge.facts import Absent, Step
from moonep_validate.judge.forms import stage_of
from moonep_validate.judge.registry import Check, register
from moonep_validate.judge.verdict import Finding

#: Stage -> id of its check. What a caller hands to dispatch is judged at ``prepare``.
IDS = {
    "load": "O2",
    "prepare": "O3",
    "plan": "O1",
    "dispatch": "O4",
    "prefetch": "O5",
    "experts": "P3",
    "combine": "O6",
    "layer": "O7",
    "reduce": "O8",
    "router": "O9",
    "latent": "O10",
    "norm": "O11",
    "shared": "O12",
    "output": "O13",
}


def _forms_of(stage: str) -> Callable[[Step], Iterator[Compared]]:
    op = "dispatch" if stage in ("prepare", "plan") else stage

    def forms(s: Step) -> Iterator[Compared]:
        ranks = [rank for rank in range(s.case.R) if s.recorded(op, rank)]
        if not ranks:
            raise Absent(f"no rank recorded a tensor of {op} in step {s.name!r}")
        for rank in ranks:
            wrong = {name: w for name, w in s.misfits(op, rank).items() if stage_of(op, name) == stage}
            findings = [
                Finding(f"form of {op}.{name}", {"rank": rank}, misfit.expected, misfit.actual)
                for name, misfit in wrong.items()
            ]
            judged = [name for name in s.call(op, rank).info.get("forms", {}) if stage_of(op, name) == stage]
            yield Compared(len({*judged, *wrong}), tuple(findings))

    return forms


#: No result of a Buffer or of the experts is judged there.
_OF_CALLERS = ("load", "prepare", "prefetch", "layer", "reduce")
_OF = {"prepare": "what is given to dispatch", "plan": "the plan", "dispatch": "the dispatched rows"}

for _stage, _id in IDS.items():
    _promise = f"Every tensor of {_OF.get(_stage, _stage)} has the promised shape, dtype, device and layout"
    _record = Check(_id, f"{_stage}-form", _stage, "law", _promise, _forms_of(_stage), about_form=True)
    register(replace(_record, about_callers=_stage in _OF_CALLERS))
