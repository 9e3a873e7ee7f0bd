"""What does a process hold? Memory, files, threads, shared memory: as the kernel tells, and by its own word."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_SHARED = Path("/dev/shm")
#: What has a length that may grow; text and arrays are memory.
_CONTAINERS = (list, dict, set)
#: Modules of ours that remember data of past cases; what fills up is no leak, but looks like one until it is full.
_REMEMBER = "moonep_validate.data."
#: Names of one kind that are kept of a sample.
_MOST_NAMES = 2000

#: Subject of a series -> its value, and the names of what it counts (empty where it counts bytes).
Held = dict[str, tuple[int, list[str]]]


def seen(pid: int) -> Held:
    """What the kernel tells of a process; nothing of one that is gone, or where there is no /proc.

    Returns:
        ``open files``, ``threads`` (counts) and ``memory`` (bytes that are the process's own).
    """
    found: Held = {}
    root = Path(f"/proc/{pid}")
    with suppress(OSError, ValueError):
        files = [_target(link) for link in (root / "fd").iterdir()]
        found["open files"] = len(files), files[:_MOST_NAMES]
        found["threads"] = len(list((root / "task").iterdir())), []
        lines = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines() if ":" in line)
        found["memory"] = int(lines["RssAnon"].split()[0]) * 1024, []
    return found


def shared() -> Held:
    """The segments in /dev/shm, whoever made them, and their bytes."""
    sizes: dict[str, int] = {}
    with suppress(OSError):
        for path in _SHARED.iterdir():
            with suppress(OSError):
                sizes[str(path)] = path.stat().st_size
    return {"shared memory segments": (len(sizes), sorted(sizes)), "shared memory": (sum(sizes.values()), [])}


def own(packages: Sequence[str]) -> dict[str, Any]:
    """What this process says of itself, once it has freed what it can.

    Args:
        packages: importable names; the lists, dicts and sets of their modules and classes are counted.
    """
    _forget()
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc only: memory that is free, and not yet the system's again
        ctypes.CDLL(None).malloc_trim(0)
    found: dict[str, Any] = {"threads": [thread.name for thread in threading.enumerate()]}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        free, whole = torch.cuda.mem_get_info()
        found["gpu"] = whole - free
    return {**found, "containers": _containers(packages)}


def told(answer: Mapping[str, Any], held: Held) -> Held:
    """What the kernel told, with what the process says (``own``), which came over a wire and is read with care."""
    found = dict(held)
    names = answer.get("threads")
    if isinstance(names, list) and "threads" in found:
        found["threads"] = found["threads"][0], [str(name) for name in names[:_MOST_NAMES]]
    if isinstance(answer.get("gpu"), int):
        found["GPU memory"] = answer["gpu"], []
    containers = answer.get("containers")
    for name, length in containers.items() if isinstance(containers, dict) else ():
        if isinstance(length, int):
            found[f"length of {name}"] = length, []
    return found


def newer(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Names that a later sample has more often."""
    return list((Counter(after) - Counter(before)).elements())


def _forget() -> None:
    for name, module in list(sys.modules.items()):
        for function in vars(module).values() if name.startswith(_REMEMBER) else ():
            if clear := getattr(function, "cache_clear", None):
                clear()


def _target(link: Path) -> str:
    """What a descriptor is open on; the number of a socket or pipe says nothing."""
    with suppress(OSError):
        return str(link.readlink()).partition(":[")[0]
    return "closed"


def _containers(packages: Sequence[str]) -> dict[str, int]:
    """Name -> length, of what the modules of some packages and their classes hold by name."""
    found: dict[str, int] = {}
    for name, module in list(sys.modules.items()):
        if not any(name == one or name.startswith(f"{one}.") for one in packages):
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if isinstance(value, _CONTAINERS) and not key.startswith("__"):
                found[f"{name}.{key}"] = len(value)
            elif isinstance(value, type) and value.__module__ == name:
                mine = {f"{name}.{key}.{inner}": held for inner, held in list(vars(value).items())}
                found |= {where: len(one) for where, one in mine.items() if isinstance(one, _CONTAINERS)}
    return found
