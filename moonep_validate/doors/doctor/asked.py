"""What do a package and the driver say of themselves? Each is asked in a process of its own, with a deadline.

Importing a package can do anything: raise, exit, crash or never return. Here each of these is one sentence, and
the others are asked meanwhile. Of the driver only attributes are read: nothing is allocated, and no multicast
object is made.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from moonep_validate.trace.provenance import describe, provenance
from moonep_validate.worlds import launch
from moonep_validate.worlds.ask import Answer
from moonep_validate.worlds.ask import answer as answer_through
from moonep_validate.worlds.ask import ask as ask_process

DRIVER = "driver"
#: Attributes of cuDeviceGetAttribute, by their number in cuda.h.
_ATTRIBUTES = {
    "major": 75,
    "minor": 76,
    "virtual_memory": 102,
    "fabric_handles": 128,
    "multicast": 132,
}


@dataclass(frozen=True)
class Said:
    """An answer.

    Attributes:
        problem: why there is none, in words, or empty.
        late: whether the time was over, so that nothing is known.
        data: the answer.
    """

    problem: str = ""
    late: bool = False
    data: dict[str, Any] = field(default_factory=dict)


def asked(names: Sequence[str], seconds: float, path: str | None = None) -> dict[str, Said]:
    """Ask several at once.

    Args:
        names: importable packages, or ``DRIVER``.
        seconds: for all of them together.
        path: a folder that comes first on the import path.
    """
    paths = [*([path] if path else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"PYTHONPATH": os.pathsep.join(paths)} if path else {}

    def one(name: str) -> Said:
        return _said(ask_process(__name__, [name, str(seconds)], more, seconds), seconds)

    with ThreadPoolExecutor(max(1, len(names))) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def _said(answer: Answer, seconds: float) -> Said:
    last = answer.last_words.rpartition(" | ")[2]
    if answer.data is None and answer.ended is None:
        return Said(f"no answer within {seconds:g} s: it hangs or is slow", late=True)
    if answer.data is None:
        return Said(f"importing it ends the process with code {answer.ended}" + (f": {last}" if last else ""))
    if error := answer.data.get("error"):
        return Said(str(error))
    return Said(data=answer.data)


def main() -> None:
    """In that process: what to ask, for how long, and where to answer."""
    name, seconds, descriptor = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)
    signal.alarm(int(float(seconds)) + 2)  # where nobody waits any more
    launch.adopt_orphans()
    try:
        said = _driver() if name == DRIVER else _package(name)
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {str(error).strip() or 'no message'}"}
    except SystemExit as error:
        said = {"error": f"importing it ends the process: SystemExit: {error}"}
    answer_through(said, descriptor)
    os._exit(0)  # what the import started need not end


def _package(name: str) -> dict[str, Any]:
    module = importlib.import_module(name)
    found = provenance(module)
    said: dict[str, Any] = {"text": describe(found), "version": found.version, "file": found.file}
    if name == "moonep":
        said |= _moonep(module)
    return said


def _moonep(module: Any) -> dict[str, Any]:
    """Its generation; where it has no Buffer it is a stub."""
    if not inspect.isclass(getattr(module, "Buffer", None)):
        public = [name for name in dir(module) if not name.startswith("_")][:6]
        return {"stub": f"it has no class Buffer; it offers {', '.join(public) or 'nothing'}"}
    from moonep_validate.subjects.buffer.api import detect_generation
    from moonep_validate.subjects.vouch import part_of

    part = part_of(module, module.Buffer)
    return {"generation": detect_generation(module.Buffer), "level": part.level, "doubts": list(part.doubts)}


def _driver() -> dict[str, Any]:
    """Attributes of each GPU, and which pairs reach each other's memory."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"error": "libcuda.so.1 is not here"}
    if code := cuda.cuInit(0):
        return {"error": f"cuInit answers {code} ({_CODES.get(code, 'see cuda.h')})"}
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    all_of_them = range(count.value)
    gpus = [{name: _attribute(cuda, number, at) for name, number in _ATTRIBUTES.items()} for at in all_of_them]
    apart = [(a, b) for a in all_of_them for b in all_of_them if a != b and not _reaches(cuda, a, b)]
    cuda_version = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return {"cuda": cuda_version, "gpus": gpus, "apart": apart}


_CODES = {
    100: "no GPU",
    101: "no such GPU",
    802: "system not ready: is the fabric manager running?",
}


def _attribute(cuda: Any, number: int, device: int) -> int | None:
    value = ctypes.c_int()
    return None if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device) else value.value


def _reaches(cuda: Any, one: int, other: int) -> bool:
    value = ctypes.c_int()
    return not cuda.cuDeviceCanAccessPeer(ctypes.byref(value), one, other) and bool(value.value)
