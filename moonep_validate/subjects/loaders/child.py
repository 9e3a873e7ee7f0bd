"""An engine's loader in a process of its own: what became of each checkpoint, and the parameters as files.

Code from outside never runs in the process that judges: this one loads and writes, ``tools/loaders.py`` compares.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file

from moonep_validate.cases.case import CaseError
from moonep_validate.subjects.loaders import Loader, loader
from moonep_validate.subjects.loaders.variants import Variant, checkpoint, faults_of, variants_of
from moonep_validate.subjects.vouch import part_of
from moonep_validate.worlds import launch
from moonep_validate.worlds.ask import answer

_LONGEST = 200


def run(name: str, folder: Path, chosen: str, fault: str) -> dict[str, Any]:
    """Start an engine and load what is chosen, each variant also with the faults that must show on it.

    Args:
        name: of the engine.
        folder: for the parameters.
        chosen: a glob of variants' names.
        fault: one that is seeded everywhere, in place of the controls; or empty.

    Returns:
        JSON data: ``part``, ``paths`` and ``loads``, or ``error``.
    """
    mine = loader(name)
    with ExitStack() as kept:
        place = kept.enter_context(TemporaryDirectory())
        try:
            begun = mine.start(Path(place), kept)
        except (Exception, SystemExit) as error:
            return {"error": f"{name} cannot run here: {_told(error)}"}
        loads = [
            _load(mine, variant, one, folder / f"{number}-{which}.safetensors")
            for number, variant in enumerate(v for path, how in mine.paths.items() for v in variants_of(path, how))
            if fnmatchcase(variant.name, chosen)
            for which, one in enumerate([fault, *(faults_of(variant) if variant.controlled and not fault else ())])
        ]
        part = asdict(part_of(begun.module, seams=begun.seams))
    return {"part": part, "paths": {path: asdict(how) for path, how in mine.paths.items()}, "loads": loads}


def _load(mine: Loader, variant: Variant, fault: str, file: Path) -> dict[str, Any]:
    """What became of one checkpoint."""
    said: dict[str, Any] = {
        "name": variant.name,
        "fault": fault,
        "at": "",
        "raised": "",
        "taken": None,
        "file": "",
    }
    try:
        layer = mine.make(variant)
    except Exception as error:
        return said | {"at": "make", "raised": _told(error)}
    try:
        said["taken"] = mine.load(variant, layer, checkpoint(variant, fault))
    except Exception as error:
        return said | {"at": "load", "raised": _told(error)}
    found = mine.parameters(layer)
    if lacks := [parameter for parameter in variant.how.names.values() if parameter not in found]:
        return said | {"at": "parameters", "raised": f"there is no parameter {lacks[0]}"}
    _save(variant.how.names, found, file)
    return said | {"file": file.name}


def _save(names: Mapping[str, str], found: Mapping[str, Any], file: Path) -> None:
    save_file({slot: found[name].detach().to("cpu", copy=True).contiguous() for slot, name in names.items()}, file)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error) or 'no message'}"[:_LONGEST]


def main() -> None:
    """The arguments as JSON, and where to answer."""
    arguments, descriptor = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)
    launch.adopt_orphans()
    given = json.loads(arguments)
    try:
        said = run(given["name"], Path(given["folder"]), given["chosen"], given["fault"])
    except CaseError as error:
        said = {"usage": str(error)}
    answer(said | {"identity": launch.identity()}, descriptor)
    os._exit(0)  # what the engine started need not end


if __name__ == "__main__":
    main()
