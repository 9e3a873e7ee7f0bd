"""What does a process of ours answer? One JSON object through a pipe.

Nothing else that it does or starts is waited for. The process and its group end with the answer: a module may
leave threads, children or daemons that never end.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from moonep_validate.worlds import descendants, launch
from moonep_validate.worlds.wire import Tail

_TICK = 0.1
#: Bytes of an answer.
_LONGEST = 2**20


@dataclass(frozen=True)
class Answer:
    """How it went.

    Attributes:
        data: the object, or None where nothing came; its key ``error`` says why it is no object.
        ended: its exit code where it ended without one; None if it ran until its time was over.
        last_words: the end of what it printed.
    """

    data: dict[str, Any] | None
    ended: int | None
    last_words: str


def ask(module: str, arguments: list[str], environment: dict[str, str], seconds: float) -> Answer:
    """Run ``main`` of one of our modules, whose last argument is the descriptor to ``answer`` to.

    Args:
        module: of this package.
        arguments: for it.
        environment: variables on top of ours.
        seconds: to answer in.
    """
    (reader, writer), (printed, output) = os.pipe(), os.pipe()
    tail = Tail(printed)
    os.set_blocking(reader, False)
    try:
        process = subprocess.Popen(
            launch.command(module, *arguments, str(writer)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
            pass_fds=[writer],
        )
    finally:
        os.close(writer)
        os.close(output)
    try:
        text, ended = _read(process, reader, tail, time.monotonic() + seconds)
        return Answer(_object(text), ended, tail.text())
    finally:
        descendants.end_group(process.pid)
        process.kill()
        process.wait()
        tail.close()
        os.close(reader)


def answer(data: dict[str, Any], descriptor: str) -> None:
    """Say it, in that process."""
    with os.fdopen(int(descriptor), "wb") as pipe:
        pipe.write(json.dumps(data).encode() + b"\n")


def _read(process: subprocess.Popen[bytes], reader: int, tail: Tail, end: float) -> tuple[bytes, int | None]:
    """The bytes of the answer up to the end of its line, and the exit code where there is none."""
    text = b""
    while time.monotonic() < end and len(text) < _LONGEST:
        ended = process.poll()  # asked first: what it said before it ended is there then
        wait([reader, *([tail.pipe] if tail.open else [])], timeout=_TICK)
        tail.take()
        more = _some(reader)
        text += more
        if text.endswith(b"\n") or (ended is not None and not more):
            return text, ended
    return text, None


def _some(reader: int) -> bytes:
    try:
        return os.read(reader, _LONGEST)
    except BlockingIOError:
        return b""


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if isinstance(data, dict):
        return data
    return {"error": f"it answers {text[:80]!r}, which is no JSON object"} if text else None
