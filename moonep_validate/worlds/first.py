"""How do the process that judges under torchrun, and its child that is rank 0, talk to each other?

Code from outside runs in the child, so what it sends may be anything, or nothing: it is read within limits, by a
thread that also takes the child's signs of life. Without a sign for too long, or where the child is gone, the job
is lost, whatever exit code the child had.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from select import select
from types import FrameType
from typing import Any

from moonep_validate.cases.case import CaseError
from moonep_validate.worlds import launch, wire
from moonep_validate.worlds.autopsy import Rank
from moonep_validate.worlds.flight import Record, read
from moonep_validate.worlds.torchrun import TOLD

FINE, ALIVE, LOST, REFUSED = b"F", b"A", b"L", b"R"
#: Exit code of a rank of which no verdict is known; that of a hang.
NEVER = 13
#: For a rank that says where all are to end by itself.
_END_SECONDS = 10.0
#: What a case gets on top of its own limit; its peers wait twice as long for rank 0 before they end it.
_PATIENCE = 10.0
#: The longest silence between cases; signs come every second, so this is a stopped process.
SILENCE = 20.0
START_SECONDS = 180.0
_TICK = 0.1
_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_CODE = struct.Struct("<i")


class Near:
    """The child's end.

    Args:
        descriptors: of the connection, and of the one that brings the exit code of a lost job.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)  # what a module starts shall not hold our connections
        self._talk, self._codes = (socket.socket(fileno=descriptor) for descriptor in descriptors)
        self._turn = threading.Lock()

    def receive(self) -> bytes:
        """The next request; ends this process if the leader is gone."""
        try:
            return wire.receive(self._talk)[2]
        except (EOFError, OSError):
            os._exit(NEVER)

    def send(self, kind: bytes, body: bytes) -> None:
        """Send a frame; one thread at a time."""
        with self._turn:
            wire.send(self._talk, 0, kind, body)

    def lost(self, ranks: Sequence[dict[str, Any]], silent: float | None, why: str) -> int:
        """Tell the leader that the ranks are lost; returns the exit code that it gives."""
        try:
            self.send(LOST, json.dumps([ranks, silent, why]).encode())
            return int(_CODE.unpack(self._codes.recv(_CODE.size))[0])
        except (OSError, struct.error):
            return NEVER


class First:
    """The leader's end: starts rank 0.

    Args:
        module: whose ``main`` is rank 0.
        hello: the first request.
        size: number of ranks.
        lost: says what is known of lost ranks, and returns the exit code.

    Raises:
        CaseError: if the ranks were started differently.
        RuntimeError: if it does not come up.
    """

    def __init__(
        self,
        module: str,
        hello: dict[str, Any],
        size: int,
        lost: Callable[[list[Rank], float | None, str], int],
    ) -> None:
        self.size, self._lost, self._folder = size, lost, Path()
        self._up = self._over = self._forwarded = False
        self._answers: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
        self._since, self._limit = time.monotonic(), START_SECONDS
        (self._talk, talk), (self._codes, codes) = socket.socketpair(), socket.socketpair()
        ends = [talk.fileno(), codes.fileno()]
        command = launch.command(module, ",".join(map(str, ends)))
        self._process = subprocess.Popen(command, pass_fds=ends, stdin=subprocess.DEVNULL)
        talk.close()
        codes.close()
        threading.Thread(target=self._listen, daemon=True).start()
        self._send(json.dumps(hello).encode())
        kind, body = self._answers.get()
        if kind != FINE:
            usage, text = json.loads(body)
            raise (CaseError if usage else RuntimeError)(text)
        self._folder, self._limit, self._up = Path(body.decode()), SILENCE, True
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._forward)
        # The agent may be killed: then the rank says where all are, as it does where it is told to end.
        launch.end_with(os.getppid(), signal.SIGTERM)

    def share(self, *value: Any) -> None:
        """Tell all ranks something."""
        self._ask(value, SILENCE)

    def record(self, job: dict[str, Any], case: str, limit: float) -> list[bytes]:
        """What each rank recorded of a case.

        Args:
            job: as it travels.
            case: its line.
            limit: seconds without a sign after which its rank would have given up by itself.
        """
        parts = unpacked(self._ask(("record", job, case), limit + _PATIENCE))
        if len(parts) != self.size:
            self._bury(f"rank 0 answered for {len(parts)} ranks; {self.size} are due")
        return parts

    def end(self) -> None:
        """Wait until all ranks have come to the end."""
        self._over = True
        with suppress(OSError):
            self._send(pickle.dumps(("end",)))
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2 * SILENCE)
        self._process.kill()

    def _ask(self, request: tuple[Any, ...], limit: float) -> bytes:
        self._since, self._limit = time.monotonic(), limit
        try:
            self._send(pickle.dumps(request))
        except OSError:
            threading.Event().wait()  # the thread that listens ends this process
        answer = self._answers.get()[1]
        self._since, self._limit = time.monotonic(), SILENCE
        return answer

    def _send(self, body: bytes) -> None:
        wire.send(self._talk, 0, FINE, body)

    def _listen(self) -> None:
        """Take what the rank sends, until it or the job is over."""
        while True:
            try:
                kind, body = self._frame()
            except (OSError, EOFError, wire.BadFrame) as error:
                if self._over:
                    return
                if not self._up:
                    self._answers.put((REFUSED, json.dumps([False, f"rank 0 did not start: {error}"]).encode()))
                    return
                silent = self._limit if isinstance(error, TimeoutError) else None
                self._bury("" if silent else f"rank 0: {error}", silent)
                return
            if kind == LOST:
                self._told(body)
            elif kind != ALIVE:
                self._answers.put((kind, body))

    def _frame(self) -> tuple[bytes, bytes]:
        """Kind and body of the next frame.

        Raises:
            TimeoutError: if none came within the limit, which may change meanwhile, or one stopped in the middle.
        """
        self._since = time.monotonic()
        while not select([self._talk], [], [], _TICK)[0]:
            if not self._over and time.monotonic() - self._since > self._limit:
                raise TimeoutError(f"no sign for {self._limit:g} s")
        self._talk.settimeout(SILENCE)
        try:
            return wire.receive(self._talk)[1:]
        finally:
            self._talk.settimeout(None)

    def _told(self, body: bytes) -> None:
        """Its last words: end with what all ranks said."""
        code = NEVER
        try:
            said, silent, why = json.loads(body)
            ranks = [_rank(**told) for told in said]
            if why == TOLD and not self._forwarded:  # torchrun tells this process, and that tells its child
                ranks[0].problem, why = (
                    "it was told to end (SIGTERM), and not by torchrun",
                    "a rank was told to end",
                )
            code = self._lost(ranks, silent, why)
        except (ValueError, TypeError, RecursionError) as error:
            self._bury(f"what rank 0 said of the ranks cannot be read: {error}")
        finally:
            with suppress(OSError):
                self._codes.sendall(_CODE.pack(code))
            self._leave(code)

    def _bury(self, why: str, silent: float | None = None) -> None:
        """The rank is gone or gives no sign: end with what all ranks of this host wrote down."""
        code = NEVER
        try:
            ended = None
            if silent is None:
                with suppress(subprocess.TimeoutExpired):
                    ended = self._process.wait(timeout=_END_SECONDS)
            ranks = [Rank(read(self._folder / f"flight{rank}")) for rank in range(self.size)]
            problem = f"it sent what it may not: {why}" if ended is None and not silent else ""
            ranks[0] = Rank(ranks[0].records, ended=ended, problem=problem)
            code = self._lost(ranks, silent, why)
        finally:
            self._leave(code)

    def _leave(self, code: int) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_SECONDS)
        self._process.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or NEVER)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._forwarded = True
        self._process.send_signal(number)


def packed(parts: Sequence[bytes]) -> bytes:
    """Byte strings as one."""
    return _COUNT.pack(len(parts)) + b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def unpacked(data: bytes) -> list[bytes]:
    """The reverse of ``packed``; as many as can be read."""
    parts, at = list[bytes](), _COUNT.size
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        parts.append(data[at : at + length])
        at += length
    return parts


def _rank(records: list[list[Any]], **known: Any) -> Rank:
    return Rank([Record(*record) for record in records], **known)
