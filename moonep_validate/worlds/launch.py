"""How does a process of ours start, so that it runs this package and no other, and ends with its parent?

``python -m`` looks into the current folder first, where a changed copy of this package may be. So the package is
loaded from the folder that the parent runs, and the current folder comes last on the import path: modules of
users there are found, and hide nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import signal
import sys
import threading
from functools import lru_cache
from pathlib import Path

import moonep_validate

_PACKAGE = "moonep_validate"
_BOOT = Path(__file__).with_name("boot.py")
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_SET_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def command(module: str, *arguments: str) -> list[str]:
    """The command line of a process that runs ``main`` of one of our modules."""
    return [sys.executable, str(_BOOT), str(folder()), current_folder(), parent(), module, *arguments]


def begin(parent: str, module: str, *arguments: str) -> None:
    """What such a process does first."""
    end_with(int(parent))
    sys.argv[:] = [module, *arguments]
    importlib.import_module(module).main()


def parent() -> str:
    """Who a child shall end with: this process; 0 from a thread, since the signal comes when that ends."""
    return str(os.getpid() if threading.current_thread() is threading.main_thread() else 0)


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Get a signal when the parent dies, however it does; ends at once if it is dead already.

    Args:
        parent: its process id; 0 leaves it.
        number: the signal.
    """
    if not parent or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it died between our start and the call
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents end, so that they can be found."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_SET_SUBREAPER, 1, 0, 0, 0)


def current_folder() -> str:
    """The current folder, or empty if it was deleted."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def folder() -> Path:
    """Where this package is."""
    return Path(moonep_validate.__path__[0]).resolve()


@lru_cache(maxsize=1)
def identity() -> dict[str, str]:
    """Version, folder and a hash of all files of the package that this process runs."""
    here, digest = folder(), hashlib.sha256()
    for path in sorted(path for path in here.rglob("*") if path.suffix in (".py", ".toml")):
        digest.update(str(path.relative_to(here)).encode() + b"\0" + path.read_bytes() + b"\0")
    return {"version": moonep_validate.__version__, "folder": str(here), "files": digest.hexdigest()[:16]}


def difference(theirs: object) -> str | None:
    """Why another process runs another package than this one, or None."""
    ours = identity()
    if theirs == ours:
        return None
    told = theirs if isinstance(theirs, dict) else {}
    return f"it runs {_described(told)}, and this process runs {_described(ours)}: start again, in one environment"


def _described(one: dict[str, str]) -> str:
    version, where, files = (one.get(name, "?") for name in ("version", "folder", "files"))
    return f"{_PACKAGE} {version} of {where} (files {files})"
