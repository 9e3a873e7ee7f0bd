"""What do a pool and its workers say to each other? Frames with a mark, a number and a length, read within limits.

Code from outside runs in a worker, so whatever comes from one may be anything: the pool's end never waits for
bytes, never makes room before they are there, and says what is wrong with them.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from select import select

#: Mark, number of the request, kind, bytes of the body.
HEAD = struct.Struct("<4sIcQ")
MARK = b"MEV1"
FINE, RAISED = b"F", b"E"
#: Bytes of one reply: far above a trace of K3's sizes recorded in full.
LONGEST = 2**35
_CHUNK = 2**20
#: Bytes taken at a time, so that a reply without end leaves its reader time for the others.
_TURN = 64 * _CHUNK
#: What is kept of the end of a process's output.
_KEPT = 2**16


class BadFrame(ValueError):
    """Bytes that are no frame, or not the one that is due."""


def send(to: socket.socket, number: int, kind: bytes, body: bytes) -> None:
    """Send one frame from a worker; waits for its pool as long as that takes."""
    to.sendall(HEAD.pack(MARK, number, kind, len(body)))
    to.sendall(body)


def receive(source: socket.socket) -> tuple[int, bytes, bytes]:
    """Number, kind and body of the next frame, by an end that waits.

    Raises:
        BadFrame: if it is none.
        EOFError, OSError: if the other end is gone.
    """
    mark, number, kind, length = HEAD.unpack(_exactly(source, HEAD.size))
    if mark != MARK or length > LONGEST:
        raise BadFrame(f"it begins with {mark!r} and {length} bytes, and is no frame")
    return number, kind, _exactly(source, length)


def _exactly(source: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        more = source.recv(min(length - len(data), _CHUNK))
        if not more:
            raise EOFError("the connection was closed")
        data += more
    return bytes(data)


def put(to: socket.socket, number: int, kind: bytes, body: bytes, seconds: float) -> None:
    """Send one frame from the pool's end, whose sockets do not wait.

    Raises:
        TimeoutError: if the worker does not take it in time.
        OSError: if it is gone.
    """
    rest, end = memoryview(HEAD.pack(MARK, number, kind, len(body)) + body), time.monotonic() + seconds
    while rest:
        if not select([], [to], [], max(0.0, end - time.monotonic()))[1]:
            raise TimeoutError(f"it did not read its request within {seconds:g} s")
        rest = rest[to.send(rest) :]


class Inbox:
    """One reply as it comes.

    Args:
        number: of the request that it answers.
    """

    def __init__(self, number: int) -> None:
        self.number, self.data = number, bytearray()

    def take(self, source: socket.socket) -> int:
        """Take what is there, without waiting; returns how many bytes that were.

        Raises:
            BadFrame: if it is no reply to the request.
            EOFError, OSError: if the connection is closed.
        """
        before = len(self.data)
        while len(self.data) - before < _TURN:
            try:
                more = source.recv(_CHUNK)
            except (BlockingIOError, InterruptedError):
                break
            if not more:
                raise EOFError("the connection was closed")
            self.data += more
            self._check()
        return len(self.data) - before

    def _check(self) -> None:
        if MARK[: len(self.data)] != self.data[: len(MARK)]:
            raise BadFrame(f"it begins with {bytes(self.data[:16])!r}, and is no frame")
        if len(self.data) < HEAD.size:
            return
        _, number, _, length = HEAD.unpack_from(self.data)
        if number != self.number:
            raise BadFrame(f"it answers request {number}, and request {self.number} is due")
        if length > LONGEST:
            raise BadFrame(f"it would have {length} bytes; at most {LONGEST} are read")
        if (excess := len(self.data) - HEAD.size - length) > 0:
            raise BadFrame(f"{excess} bytes follow on its {length}")

    @property
    def whole(self) -> bool:
        """Whether all of it is there."""
        return len(self.data) >= HEAD.size and len(self.data) == HEAD.size + self._length

    @property
    def _length(self) -> int:
        return int(HEAD.unpack_from(self.data)[3])

    @property
    def kind(self) -> bytes:
        """``FINE`` or ``RAISED``."""
        return bytes(HEAD.unpack_from(self.data)[2])

    @property
    def body(self) -> bytes:
        """What it says."""
        return bytes(memoryview(self.data)[HEAD.size :])

    @property
    def problem(self) -> str:
        """What is wrong with a reply of which nothing more comes; empty where nothing came."""
        if not self.data or self.whole:
            return ""
        if len(self.data) < HEAD.size:
            return f"its reply stops after {len(self.data)} bytes"
        return f"its reply stops after {len(self.data) - HEAD.size} of {self._length} bytes"


class Tail:
    """The end of what a process prints, however much that is.

    Args:
        pipe: the reading end; closed by ``close``.
    """

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self.pipe, self.open, self._data = pipe, True, bytearray()

    def take(self) -> None:
        """Read what is there, at most so much that others get their turn."""
        for _ in range(_TURN // _KEPT if self.open else 0):
            try:
                more = os.read(self.pipe, _KEPT)
            except BlockingIOError:
                return
            if not more:
                self.open = False
                return
            self._data = (self._data + more)[-_KEPT:]

    def text(self) -> str:
        """The last lines, as one."""
        self.take()
        lines = self._data.decode(errors="replace").strip().splitlines()[-5:]
        return " | ".join(lines) or "no output"

    def close(self) -> None:
        """Whatever the process prints from now on has no reader."""
        if self.pipe >= 0:
            os.close(self.pipe)
        self.pipe, self.open = -1, False
