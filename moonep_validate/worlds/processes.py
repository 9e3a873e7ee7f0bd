"""How do R ranks run as processes? Spawned workers with gloo or NCCL; a text job goes in, bytes come back.

Every worker writes down where it is (flight.py), so a rank that dies or never returns still has a place. The first
sign of trouble ends the whole pool after a moment for the others to answer; an autopsy says what each rank was
doing, and the next case gets a new pool.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
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

from moonep_validate.worlds.autopsy import Rank, autopsy
from moonep_validate.worlds.flight import Progress, phases, read

#: Seconds for the other ranks to answer after one has failed; they may still wait for it in a collective.
GRACE = 2.0
START_SECONDS = 180.0
#: Seconds to clean up after a case in which a rank raised.
RESET_SECONDS = 15.0
#: A case may take this many deadlines in all, whatever signs of life its ranks give.
MOST_DEADLINES = 40
#: A pool is replaced after so many cases, or once a worker has grown by so many bytes since its tenth case.
OLD_CASES, OLD_BYTES = 2000, 2**30
_WARM_CASES = 10
_TICK = 0.1


@dataclass
class Reply:
    """How one rank answered.

    Attributes:
        data: what its worker sent, or None.
        phases: ``[step, op, done]`` of each call that it entered, where it sent no data.
        ended: its process ended, with this exit code.
        stack: its Python stack, if it had not answered when the deadline passed.
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

    Attributes:
        autopsy: what is known of the ranks of the last case, if it did not come to its end (autopsy.py).

    Raises:
        RuntimeError: if a worker does not come up; its last output lines are in the message.
    """

    def __init__(self, size: int, environment: dict[str, str], start: bytes | None = None) -> None:
        self.size = size
        self.autopsy: dict[str, Any] = {}
        self.cases, self._keys, self._young = 0, set[str](), 0
        self.folder = tempfile.TemporaryDirectory(prefix="moonep-validate-")
        root = Path(self.folder.name)
        address = str(root / "socket")
        self._progress = Progress([root / f"flight{rank}" for rank in range(size)])
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
        command = [
            sys.executable,
            "-m",
            "moonep_validate.pipeline.worker",
            address,
            str(rank),
            str(self.size),
            str(root),
        ]
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

    def run(
        self,
        job: bytes,
        deadline: float,
        reset: bytes | None = None,
        key: str = "",
        first: float | None = None,
    ) -> list[Reply]:
        """Send one job to every rank and collect the answers.

        Args:
            job: what ``moonep_validate.pipeline.worker`` reads.
            deadline: seconds without any sign from any rank after which the case is over.
            reset: a request that cleans up where a rank raised but every rank answered; without it, or if a rank
                does not answer it in time, the pool is closed then.
            key: what the workers build and compile once for all cases that have the same.
            first: the deadline of the first case with a key, by default ``deadline``.

        Returns:
            One reply per rank; the pool is closed if any of them has no data.
        """
        replies = [Reply() for _ in range(self.size)]
        limit = deadline if first is None or key in self._keys else first
        self._keys.add(key)
        self.cases, self.autopsy = self.cases + 1, {}
        for connection in self.connections:
            connection.send_bytes(job)
        silent = self._collect(replies, limit)
        if any(reply.data is None or _failed(reply) for reply in replies):
            self._examine(replies, limit if silent else None)
        self._clean_up(replies, reset)
        if self.cases == _WARM_CASES:
            self._young = self._bytes()
        return replies

    def _collect(self, replies: list[Reply], limit: float) -> bool:
        """Take the answers until all are there; True if no rank gave a sign for ``limit`` seconds before."""
        open_ranks, counts = set(range(self.size)), self._progress.counts()
        begin = sign = time.monotonic()
        end: float | None = None
        while open_ranks:
            ready = wait([self.connections[rank] for rank in open_ranks], timeout=min(_TICK, limit / 4))
            for rank in [r for r in open_ranks if self.connections[r] in ready]:
                self._read(rank, replies[rank])
                open_ranks.discard(rank)
            now = time.monotonic()
            if end is None and any(reply.ended is not None or _failed(reply) for reply in replies):
                end = now + GRACE
            if end is not None and now > end:
                return False
            latest = counts if ready else self._progress.counts()
            if ready or latest != counts:
                sign, counts = now, latest
            if end is None and (now - sign > limit or now - begin > MOST_DEADLINES * limit):
                return True
        return False

    def _examine(self, replies: list[Reply], silent: float | None) -> None:
        """Take what can be known of the ranks while they are there, and what those that sent nothing have done."""
        there = [rank for rank, reply in enumerate(replies) if reply.data is None and reply.ended is None]
        stacks, native = self._stacks(there), self._native(there) if silent else {}
        ranks = []
        for rank, (reply, path) in enumerate(zip(replies, self._progress.paths, strict=True)):
            records = read(path)
            if reply.data is None:
                reply.phases = phases(records)
            if silent and rank in stacks:
                reply.stack = stacks[rank]
            ranks.append(Rank(records, reply.ended, stacks.get(rank), native.get(rank)))
        self.autopsy = autopsy(ranks, silent)
        for rank, told in enumerate(self.autopsy["ranks"]):
            told["output"] = _tail(Path(self.folder.name) / f"output{rank}")

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

    def _read(self, rank: int, reply: Reply) -> None:
        """Take the answer of a rank, or note that its process ended."""
        try:
            reply.data = self.connections[rank].recv_bytes()[1:]
        except (EOFError, OSError):
            reply.ended = self.workers[rank].wait(timeout=10)

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """The Python stacks of some workers, by their own faulthandlers."""
        for rank in ranks:
            self.workers[rank].send_signal(signal.SIGUSR1)
        paths = {rank: Path(self.folder.name) / f"stack{rank}" for rank in ranks}
        end = time.monotonic() + 2
        while time.monotonic() < end and not all(path.read_text() for path in paths.values()):
            time.sleep(0.02)
        time.sleep(0.05 * bool(ranks))
        return {rank: _oldest_first(path.read_text()) for rank, path in paths.items()}

    def _native(self, ranks: Sequence[int]) -> dict[int, str]:
        """Stacks with native frames, where py-spy is installed and may look; why not, where it may not."""
        tool, found = shutil.which("py-spy"), {}
        for rank in ranks if tool else ():
            command = [str(tool), "dump", "--native", "--nonblocking", "--pid", str(self.workers[rank].pid)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
            except subprocess.TimeoutExpired:
                found[rank] = "py-spy did not answer in 10 s"
                continue
            found[rank] = done.stdout if done.returncode == 0 else f"py-spy: {done.stderr.strip()}"
        return found

    def _bytes(self) -> int:
        """Resident memory of the largest worker; 0 where the system does not tell."""
        try:
            pages = [int(Path(f"/proc/{worker.pid}/statm").read_text().split()[1]) for worker in self.workers]
        except (OSError, ValueError, IndexError):
            return 0
        return max(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def aged(self) -> bool:
        """Whether it has served long enough, or has grown too much, to be replaced."""
        if self.cases >= OLD_CASES:
            return True
        return bool(self._young and self.cases % _WARM_CASES == 0 and self._bytes() - self._young > OLD_BYTES)

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


def _oldest_first(stack: str) -> str:
    """A stack of faulthandler in the order of tracebacks."""
    head, *frames = stack.splitlines() or ["(no Python stack)"]
    return "\n".join([head.replace("most recent call first", "most recent call last"), *reversed(frames)])


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
    another environment are closed, as are aged ones.
    """
    seen = (os.environ.get("PYTHONPATH"), os.environ.get("CUDA_VISIBLE_DEVICES"))
    where = (*seen, start, *sorted(environment.items()))
    for other in [key for key, pool in _pools.items() if key[1:] != where or not pool.alive or pool.aged]:
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
