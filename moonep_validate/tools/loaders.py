"""Do an engine's loaders bring every byte to its place? Small checkpoints go through them, and are compared.

The engine loads in a process of its own (``subjects/loaders``). Each variant whose bytes must arrive is loaded
again with seeded faults, all of which must show: a comparison that cannot fail proves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from moonep_validate.cases.case import CaseError
from moonep_validate.judge.waivers import Waiver, known
from moonep_validate.subjects.engines import path as paths
from moonep_validate.subjects.loaders import KNOWN
from moonep_validate.subjects.loaders.variants import (
    FAULTS,
    REFUSED,
    TOLD,
    LoadPath,
    Variant,
    checkpoint,
    differences,
    variants_of,
)
from moonep_validate.trace.schema import SchemaError, build
from moonep_validate.trace.trace import Part
from moonep_validate.worlds import launch
from moonep_validate.worlds.ask import ask

#: Seconds for all of it; an engine's import takes half a minute on two cores.
SECONDS = 300
_CHILD = "moonep_validate.subjects.loaders.child"
#: Exceptions that refuse nothing: something is missing, or its name is wrong.
_ACCIDENTS = ("AttributeError", "ImportError", "ModuleNotFoundError", "NameError")


@dataclass(frozen=True)
class Load:
    """What became of one checkpoint, as the engine's process says it.

    Attributes:
        name: of the variant.
        fault: that was seeded, or empty.
        at, raised: where and what it raised, or empty.
        taken: how many tensors the loader says that it took.
        file: of the parameters, in the folder; empty where there are none.
    """

    name: str
    fault: str
    at: str
    raised: str
    taken: int | None
    file: str


@dataclass(frozen=True)
class Told:
    """The answer on one variant.

    Attributes:
        name: of the variant; check: the invariant of docs/formats.md.
        status: ``passed``, ``failed``, ``waived`` or ``not_run``.
        lines: what is wrong, or why it did not run.
        faults: seeded ones that were seen.
    """

    name: str
    check: str
    status: str
    lines: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """The answers on all variants, and what was judged; ``not_run`` says why nothing was."""

    part: Part | None
    told: tuple[Told, ...]
    not_run: str = ""

    @property
    def exit_code(self) -> int:
        """As ``run`` has them: 1 failed, 5 nothing ran."""
        statuses = [one.status for one in self.told]
        if "failed" in statuses:
            return 1
        return 0 if {"passed", "waived"} & set(statuses) else 5


def inspect(
    subject: str, path: str | None, chosen: str = "*", fault: str = "", waivers: Sequence[Waiver] = ()
) -> Report:
    """Load every variant that is chosen, and compare.

    Args:
        subject: ``vllm``, ``sglang``, or MODULE:CLASS of a ``Loader``.
        path: a folder that goes first on the import path, or None.
        chosen: a glob of variants' names.
        fault: of ``FAULTS``, seeded into every variant; or empty.
        waivers: known defects.

    Raises:
        CaseError: for a subject, path, fault or glob that names nothing, or an engine that lies elsewhere.
    """
    if fault and fault not in FAULTS:
        raise CaseError(f"--fault {fault}: a loader's faults are {', '.join(FAULTS)}")
    if path and subject in KNOWN and (wrong := paths.misses(path, subject)):
        raise CaseError(wrong)
    with TemporaryDirectory() as folder:
        said = _asked({"name": subject, "folder": folder, "chosen": chosen, "fault": fault}, path)
        if isinstance(said, str):
            return Report(None, (), said)
        part, variants, loads = _read(said)
        if path and (wrong := paths.outside(path, part.package, part.file)):
            raise CaseError(wrong)
        told = tuple(_judged(variants, loads, Path(folder)))
    if not told:
        raise CaseError(f"--case {chosen} names no variant; known: {', '.join(variants)}")
    return Report(part, tuple(_waived(one, part, waivers) for one in told))


def _asked(arguments: dict[str, Any], path: str | None) -> dict[str, Any] | str:
    """What the engine's process says, or why it says nothing.

    Raises:
        CaseError: if the subject cannot be made, or the process runs another copy of this package.
    """
    python = [*([path] if path else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    answer = ask(_CHILD, [dumps(arguments)], {"PYTHONPATH": os.pathsep.join(python)}, SECONDS)
    if answer.data is None:
        last = answer.last_words.rpartition(" | ")[2]
        over = f"did not end within {SECONDS} s" if answer.ended is None else f"ended with code {answer.ended}"
        return f"{arguments['name']}: its process {over}: {last}"
    if usage := answer.data.get("usage") or launch.difference(answer.data.get("identity")):
        raise CaseError(str(usage))
    return str(answer.data["error"]) if "error" in answer.data else answer.data


def _read(said: dict[str, Any]) -> tuple[Part, dict[str, Variant], list[Load]]:
    """The engine's part, its variants by name, and what became of each checkpoint.

    Raises:
        CaseError: if the answer has another form.
    """
    try:
        ways = {name: build(LoadPath, how, name) for name, how in said["paths"].items()}
        loads = [build(Load, one, "a load") for one in said["loads"]]
        part = Part.from_json(said["part"])
    except (SchemaError, KeyError, TypeError, AttributeError) as error:
        raise CaseError(f"what the engine's process says cannot be read: {error}") from None
    variants = {variant.name: variant for path, how in ways.items() for variant in variants_of(path, how)}
    return part, variants, [load for load in loads if load.name in variants]


def _judged(variants: dict[str, Variant], loads: list[Load], folder: Path) -> Iterator[Told]:
    """One answer a variant: on the checkpoint itself, then whether its seeded faults show."""
    for name, variant in variants.items():
        mine = [load for load in loads if load.name == name]
        if not mine:
            continue
        told = _answer(variant, mine[0], folder)
        controls = {load.fault: _answer(variant, load, folder) for load in mine[1:] if not load.raised}
        seen = tuple(fault for fault, one in controls.items() if one.status == "failed")
        unseen = tuple(
            f"the seeded fault {load.fault} does not show" for load in mine[1:] if load.fault not in seen
        )
        if told.status == "passed" and unseen:
            told = replace(told, status="failed", lines=unseen)
        yield replace(told, faults=seen)


def _answer(variant: Variant, load: Load, folder: Path) -> Told:
    """What one load says."""
    made = Told(variant.name, variant.check, "passed")
    if load.raised:
        return _raised(variant, load, made)
    if variant.wanted == REFUSED:
        what = {"short": "half of the rows of a tensor are missing"}.get(
            variant.word, "a scale is no power of two"
        )
        return replace(made, status="failed", lines=(f"{what}: expected an exception, got none",))
    if variant.wanted == TOLD:
        return _left_out(variant, load, made)
    try:
        got: dict[str, Tensor] = load_file(folder / load.file)
        lines = differences(variant, got)
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError, IndexError) as error:
        lines = [f"its parameters cannot be compared: {type(error).__name__}: {error}"]
    return replace(made, status="failed" if lines else "passed", lines=tuple(lines))


def _raised(variant: Variant, load: Load, made: Told) -> Told:
    """A refusal is an answer where it may be one; an accident never is."""
    accident = load.raised.partition(":")[0] in _ACCIDENTS or load.at == "parameters"
    if variant.controlled or accident:
        status = "not_run" if load.at == "make" else "failed"
        return replace(made, status=status, lines=(f"it raised at {load.at}: {load.raised}",))
    return made


def _left_out(variant: Variant, load: Load, made: Told) -> Told:
    """A tensor is missing: a loader that says how many it took lets its model see that."""
    if load.taken is None:
        said = "a tensor is missing, and this loader counts none: its model has to"
        return replace(made, status="not_run", lines=(said,))
    whole = len(checkpoint(replace(variant, word="tp0of1")))
    if load.taken < whole:
        return made
    line = f"a tensor is missing: expected an exception, or fewer than {whole} tensors taken; it says {load.taken}"
    return replace(made, status="failed", lines=(line,))


def _waived(told: Told, part: Part, waivers: Sequence[Waiver]) -> Told:
    """A known defect, or a waiver that expects one where nothing fails."""
    found = known(waivers, part, told.name, told.check, date.today())
    if found is None or told.status == "not_run":
        return told
    if told.status == "failed":
        return replace(told, status="waived", lines=(f"known: {found.link}", *told.lines))
    line = f"a waiver expects a failure here ({found.link}), and nothing failed: remove the waiver"
    return replace(told, status="failed", lines=(line,))
