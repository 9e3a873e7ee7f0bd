"""What does docs/faults.md say? What a pass rules out: each seeded fault, and which check and case find it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from moonep_validate.cases.case import CaseError, Spec
from moonep_validate.faults import FAULTS, Fault
from moonep_validate.judge.checks import CHECKS
from moonep_validate.studies.mutate import Matrix, Trial

_HEAD = """\
| fault | what is wrong | stage | found by | case | stands for |
| --- | --- | --- | --- | --- | --- |
"""
_OPENING = """\
# What a pass rules out

Every fault of the catalogue, seeded into the embedded reference and found by the suite. Written by
`moonep-validate mutate --write docs/faults.md`; with `--fault` or `--kind` it takes the rows of these faults anew,
and the score stays that of the last whole run. Ids with K are kinds of faults, ids with B public bugs: see
[bugs.md](bugs.md). A fault of an engine's own code needs an engine: `moonep-validate mutate --subject vllm`.
"""
_WORDS = {"rank=all": "on all ranks"}


def faults_page(matrix: Matrix) -> str:
    """The whole document, after a run of the whole catalogue."""
    tried = {Spec.parse(trial.id).name for trial in matrix.trials}
    others = [fault for fault in FAULTS.values() if fault.id not in tried]
    gpu = _not_tried(
        "Not tried here, since they show on GPUs only, where a call returns before its work is done "
        "(`moonep-validate mutate --device cuda`):",
        [fault for fault in others if fault.needs_gpu],
    )
    of_engines = _not_tried(
        "Of an engine's own code, seeded around its loader, dispatch, experts and layer:",
        [fault for fault in others if fault.for_engine],
    )
    rows = _table({trial.id: _row(trial) for trial in matrix.trials})
    return "\n".join([f"{_OPENING}\n{matrix.score}.\n\n{rows}", *gpu, *of_engines, *_checks(matrix), ""])


def merged_page(page: str, matrix: Matrix) -> str:
    """The document with the rows of some faults taken anew, each in its place; all else stays.

    Args:
        page: the document as it is.
        matrix: what became of some faults.

    Raises:
        CaseError: if the document has no table of faults.
    """
    before, head, rest = page.partition(_HEAD)
    if not head:
        raise CaseError("there is no table of faults to merge into: write it once without --fault and --kind")
    table, gap, after = rest.partition("\n\n")
    rows = {line.split("`")[1]: line for line in table.splitlines()}
    rows |= {trial.id: _row(trial) for trial in matrix.trials}
    return before + _table(rows) + gap + after


def _table(rows: Mapping[str, str]) -> str:
    """Rows by fault in the order of the catalogue."""
    places = {text: place for place, text in enumerate(_texts())}
    ordered = sorted(rows, key=lambda text: places.get(text, places[Spec.parse(text).name]))
    return _HEAD + "\n".join(rows[text] for text in ordered)


def _texts() -> Iterable[str]:
    return (text for fault in FAULTS.values() for text in fault.texts)


def _row(trial: Trial) -> str:
    about, where = FAULTS[Spec.parse(trial.id).name], trial.id.partition(":")[2].split(",")
    wrong = f"The same, {' and '.join(_WORDS.get(one, f'with {one}') for one in where)}." if where[0] else ""
    found = f"{trial.check} at {trial.stage}" if trial.killed else trial.status.replace("_", " ")
    case = f"`{trial.case}`{', no other' * trial.thin}" if trial.case else ""
    return f"| `{trial.id}` | {wrong or about.summary} | {about.stage} | {found} | {case} | {about.bugs} |"


def _not_tried(why: str, faults: Sequence[Fault]) -> Sequence[str]:
    if not faults:
        return []
    rows = [f"| `{one.id}` | {one.summary} | {one.stage} | {one.bugs} |" for one in faults]
    return ["", why, "", "| fault | what is wrong | stage | stands for |", "| --- | --- | --- | --- |", *rows]


def _checks(matrix: Matrix) -> Sequence[str]:
    lines = ["", "| check | faults that it finds |", "| --- | --- |"]
    for check in matrix.needed:
        lines.append(f"| {check} | {', '.join(f'`{id}`' for id in matrix.found_by(check))} |")
    if not matrix.needed:
        return lines
    callers = [check.id for check in CHECKS.values() if check.about_callers]
    gpus = [check.id for check in CHECKS.values() if check.needs_gpu]
    return [
        *lines,
        "",
        f"No fault of a Buffer makes {', '.join(callers)} fail: they judge what an engine or a caller does.",
        f"{', '.join(gpus)} is judged on GPUs only. Corrupted traces in the tests show that these can fail.",
    ]
