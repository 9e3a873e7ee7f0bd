"""Who cleans up if this process is killed? A small process beside it that waits for a pipe to close.

It is told which process groups and folders are ours. When its parent is gone, by whatever signal, it kills those
groups and removes those folders. Run as a file, without this package: it needs nothing and starts in no time.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from select import select
from typing import Any

#: Where workers put memory that they map, see mapped.py; a file there may be left by a rank that was killed.
SHARED = Path("/dev/shm")
PREFIX = "moonep-validate-"
_running: list[subprocess.Popen[bytes]] = []


def guard(folder: Path, pids: list[int]) -> None:
    """From now on, clean this up if the process is killed."""
    _tell({"folder": str(folder), "pids": pids})


def release(folder: Path) -> None:
    """It was cleaned up."""
    if _running:
        _tell({"folder": str(folder), "pids": None})


def forget_memory(pid: int, shared: Path = SHARED) -> None:
    """Remove files for mapped memory that a rank made and had no time to remove."""
    for path in shared.glob(f"{PREFIX}{pid}-*"):
        path.unlink(missing_ok=True)


def _tell(message: dict[str, Any]) -> None:
    if not _running or _running[0].poll() is not None:
        _running[:] = [_start()]
    pipe = _running[0].stdin
    assert pipe is not None
    with suppress(OSError):  # somebody killed it; workers see by themselves that we are gone
        pipe.write(json.dumps(message).encode() + b"\n")
        pipe.flush()


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


@atexit.register
def _end() -> None:
    for one in _running:
        assert one.stdin is not None
        with suppress(OSError):
            one.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            one.wait(timeout=5)
    _running.clear()


def main() -> None:
    """Read what is ours until the parent is gone, then end it."""
    parent, source, ours, rest = int(sys.argv[1]), sys.stdin.fileno(), dict[str, list[int]](), b""
    while os.getppid() == parent:  # a forked copy of the parent may hold the pipe open
        if not select([source], [], [], 0.5)[0]:
            continue
        more = os.read(source, 65536)
        if not more:
            break
        *lines, rest = (rest + more).split(b"\n")
        for message in map(json.loads, lines):
            if message["pids"] is None:
                ours.pop(message["folder"], None)
            else:
                ours[message["folder"]] = message["pids"]
    for folder, pids in ours.items():
        _clean(folder, pids)


def _clean(folder: str, pids: list[int]) -> None:
    for _ in range(20):  # a group may fork while it is killed
        for pid in pids:
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)
    for pid in pids:
        forget_memory(pid)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
