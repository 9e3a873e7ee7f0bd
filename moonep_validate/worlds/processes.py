"""How do R ranks run as processes? Spawned workers with gloo; a text job goes in, bytes come back.

Every worker says when it enters and leaves a call, so a rank that dies or never returns still has a place. The
first sign of trouble ends the whole pool after a moment for the others to answer; the next case gets a new one.
(An autopsy of hangs is to come.)
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

#: Seconds for the other ranks to answer after one has failed; they may still wait for it in a collective.
GRACE = 2.0
START_SECONDS = 180.0
#: Seconds to clean up after a case in which a rank raised.
RESET_SECONDS = 15.0


@dataclass
class Reply:
    """How one rank answered.

    Attributes:
        data: what its worker sent, or None.
        phases: ``[step, op, done]`` of each call that it entered.
        ended: its process ended, with this exit code.
        stack: its Python stack when the deadline passed.
        last_words: the end of what its process printed, where the pool was lost.
    """

    data: bytes | None = None
    phases: list[list[Any]] = field(default_factory=list)
    ended: int | None = None
    stack: str | None = None
    last_words: str = ""


class Pool:
    """R workers that share a gloo process group.

    Args:
        size: number of ranks.
        environment: variables that the workers get on top of ours.
        start: a request that every worker answers once, before any job; the answer is kept in ``started``.

    Raises:
        RuntimeError: if a worker does not come up; its last output lines are in the message.
    """

    def __init__(self, size: int, environment: dict[str, str], start: bytes | None = None) -> None:
        self.size = size
        self.folder = tempfile.TemporaryDirectory(prefix="moonep-validate-")
        root = Path(self.folder.name)
        address = str(root / "socket")
        listener = Listener(address, family="AF_UNIX", backlog=size)
        self.workers = [self._spawn(root, address, rank, environment) for rank in range(size)]
        self.connections: list[Connection] = []
        try:
            self.connections = self._accept(listener, root)
        except BaseException:
            listener.close()
            self.close()
            raise
        listener.close()
        self.started: dict[str, Any] | None = None
        if start is not None:
            try:
                self.started = self._start(start)
            except OSError as error:
                self.close()
                raise RuntimeError(f"a worker ended while it started: {error}") from None

    def _start(self, request: bytes) -> dict[str, Any]:
        """Tell every worker what to import first; the answer of the first rank that failed, else rank 0's."""
        replies = self.run(request, START_SECONDS)
        answers = [
            json.loads(reply.data[1:]) if reply.data else _no_answer(rank, reply)
            for rank, reply in enumerate(replies)
        ]
        return next((answer for answer in answers if "error" in answer), answers[0])

    def _spawn(self, root: Path, address: str, rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "moonep_validate.worker", address, str(rank), str(self.size), str(root)]
        with (root / f"output{rank}").open("wb") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def _accept(self, listener: Listener, root: Path) -> list[Connection]:
        """One connection per rank; a worker that ends before it connects is an error at once."""
        connections: dict[int, Connection] = {}
        listener._listener._socket.settimeout(0.2)  # type: ignore[attr-defined]
        end = time.monotonic() + START_SECONDS
        while len(connections) < self.size:
            try:
                connection = listener.accept()
            except TimeoutError:
                dead = [rank for rank, worker in enumerate(self.workers) if worker.poll() is not None]
                if dead or time.monotonic() > end:
                    rank = dead[0] if dead else next(r for r in range(self.size) if r not in connections)
                    raise RuntimeError(
                        f"the worker of rank {rank} did not start: {_tail(root / f'output{rank}')}"
                    ) from None
                continue
            connections[int(connection.recv_bytes())] = connection
        return [connections[rank] for rank in range(self.size)]

    def run(self, job: bytes, deadline: float, reset: bytes | None = None) -> list[Reply]:
        """Send one job to every rank and collect the answers.

        Args:
            job: what ``moonep_validate.worker`` reads.
            deadline: seconds without any sign from any rank after which the case is over.
            reset: a request that cleans up where a rank raised but every rank answered; without it, or if a rank
                does not answer it in time, the pool is closed then.

        Returns:
            One reply per rank; the pool is closed if any of them has no data.
        """
        replies = [Reply() for _ in range(self.size)]
        for connection in self.connections:
            connection.send_bytes(job)
        open_ranks, end, hung = set(range(self.size)), time.monotonic() + deadline, False
        while open_ranks:
            left = end - time.monotonic()
            ready = wait([self.connections[rank] for rank in open_ranks], timeout=max(left, 0))
            if not ready:
                hung = not any(r.ended is not None or _failed(r) for r in replies)
                break
            for rank in [r for r in open_ranks if self.connections[r] in ready]:
                if self._read(rank, replies[rank]):
                    open_ranks.discard(rank)
            trouble = any(r.ended is not None or _failed(r) for r in replies)
            end = min(end, time.monotonic() + GRACE) if trouble else time.monotonic() + deadline
        if hung:
            for rank in open_ranks:
                replies[rank].stack = self._stack(rank)
        self._clean_up(replies, reset)
        return replies

    def _clean_up(self, replies: list[Reply], reset: bytes | None) -> None:
        """Close a pool that lost a rank; one in which ranks raised is kept if ``reset`` works on all of them."""
        if any(reply.data is None for reply in replies):
            for rank, reply in enumerate(replies):
                reply.last_words = _tail(Path(self.folder.name) / f"output{rank}")
            self.close()
        elif any(_failed(reply) for reply in replies):
            answers = self.run(reset, RESET_SECONDS) if reset else replies
            if any(answer.data is None or _failed(answer) for answer in answers):
                self.close()

    def _read(self, rank: int, reply: Reply) -> bool:
        """Take one message; True if it was the last one of this rank."""
        try:
            message = self.connections[rank].recv_bytes()
        except (EOFError, OSError):
            reply.ended = self.workers[rank].wait(timeout=10)
            return True
        if message[:1] == b"P":
            step, op, done = json.loads(message[1:])
            if done:
                next(phase for phase in reversed(reply.phases) if phase[:2] == [step, op])[2] = True
            else:
                reply.phases.append([step, op, False])
            return False
        reply.data = message[1:]
        return True

    def _stack(self, rank: int) -> str:
        """The Python stack of a worker, by its own faulthandler."""
        path = Path(self.folder.name) / f"stack{rank}"
        self.workers[rank].send_signal(signal.SIGUSR1)
        end = time.monotonic() + 2
        while time.monotonic() < end and not path.read_text():
            time.sleep(0.05)
        time.sleep(0.05)
        head, *frames = path.read_text().splitlines() or ["(no Python stack)"]
        return "\n".join([head.replace("most recent call first", "most recent call last"), *reversed(frames)])

    @property
    def alive(self) -> bool:
        """Whether every worker runs."""
        return bool(self.connections) and all(worker.poll() is None for worker in self.workers)

    def close(self) -> None:
        """End every worker, by its own process group."""
        for connection in self.connections:
            connection.close()
        self.connections = []
        for worker in self.workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        self.folder.cleanup()


def _no_answer(rank: int, reply: Reply) -> dict[str, Any]:
    """What is said for a worker that ended, or was silent, while it started."""
    how = (
        f"ended with exit code {reply.ended}" if reply.ended is not None else f"was silent for {START_SECONDS:g} s"
    )
    return {"error": f"rank {rank} {how} while it imported and initialised: {reply.last_words}"}


def _tail(output: Path) -> str:
    """The last lines that a worker printed, as one."""
    return " | ".join(output.read_text(errors="replace").strip().splitlines()[-5:]) or "no output"


def _failed(reply: Reply) -> bool:
    """Whether the worker says that its rank raised; the first byte of its data tells."""
    return reply.data is not None and reply.data[:1] == b"E"


#: Workers that live at a time, over all sizes of pools; idle ones cost memory only.
MAX_WORKERS = 8
_pools: dict[tuple[Any, ...], Pool] = {}


def pool(size: int, environment: dict[str, str], start: bytes | None = None) -> Pool:
    """The living pool of this size, environment, import path and start.

    Pools of other sizes are kept beside it, the last used ones, since an engine takes long to start; those of
    another environment are closed.
    """
    where = (os.environ.get("PYTHONPATH"), start, *sorted(environment.items()))
    for other in [key for key, pool in _pools.items() if key[1:] != where or not pool.alive]:
        _pools.pop(other).close()
    key = (size, *where)
    living = _pools.pop(key, None)
    while living is None and _pools and size + sum(pool.size for pool in _pools.values()) > MAX_WORKERS:
        _pools.pop(next(iter(_pools))).close()
    _pools[key] = living or Pool(size, environment, start)  # last in the order of use
    return _pools[key]


@atexit.register
def close_pools() -> None:
    """End all workers."""
    for living in list(_pools.values()):
        living.close()
    _pools.clear()


def in_collective(stack: str, frames: Sequence[str] = ("exchange", "all_gather_object", "barrier")) -> bool:
    """Whether a stack waits for peers rather than being stuck by itself."""
    return any(f"in {frame}" in stack for frame in frames)
