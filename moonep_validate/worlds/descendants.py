"""Which processes did a worker start, and which of them still run? Told from /proc; elsewhere none are seen."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: Helpers that Python and torch start by themselves and keep; they end with the worker.
HELPERS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "torch/_inductor/compile_worker",
)
_PROC = Path("/proc")


def children(pid: int) -> dict[int, str]:
    """The living children of a process, with their command lines; helpers of Python's and torch's are left out."""
    found = {child: command(child) for child in _children(pid) if lives(child)}
    return {child: text for child, text in found.items() if not any(helper in text for helper in HELPERS)}


def session(pid: int) -> dict[int, str]:
    """The living processes of the session that a process leads or led, it itself left out."""
    return {one: command(one) for one in _all() if one != pid and _stat(one)[1:] == (str(pid),) and lives(one)}


def lives(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    return _stat(pid)[:1] not in ((), ("Z",), ("X",))


def stopped(pid: int) -> bool:
    """Whether a process was stopped (SIGSTOP), and goes on only if somebody lets it."""
    return _stat(pid)[:1] == ("T",)


def command(pid: int) -> str:
    """The beginning of a command line."""
    with suppress(OSError):
        return (
            (_PROC / str(pid) / "cmdline").read_bytes()[:300].replace(b"\0", b" ").decode(errors="replace").strip()
        )
    return ""


def end_group(pid: int) -> None:
    """Kill the process group of a worker, and what it started outside of that, as far as it can be seen."""
    below = list(_below(pid))
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for one in below:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(one, signal.SIGKILL)


def _below(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _below(child)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def _all() -> list[int]:
    with suppress(OSError):
        return [int(path.name) for path in _PROC.iterdir() if path.name.isdigit()]
    return []


def _stat(pid: int) -> tuple[str, ...]:
    """State and session of a process; nothing if there is none."""
    with suppress(OSError, IndexError):
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rsplit(")", 1)[-1].split()
        return fields[0], fields[3]
    return ()
