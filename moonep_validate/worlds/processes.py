"""How do R ranks run as processes? Workers with gloo or NCCL; a text job goes in, bytes come back.

Every worker writes down where it is (flight.py), so a rank that dies or never returns still has a place. The first
sign of trouble ends the whole pool after a moment for the others to answer; an autopsy says what each rank was
doing, and the next case gets a new pool. What a worker sends is read within limits (wire.py), what it leaves
running is found and ended (descendants.py), and nothing outlives this process (warden.py).
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from moonep_validate.worlds import flight, launch, warden
from moonep_validate.worlds.autopsy import Rank, autopsy, how_ended
from moonep_validate.worlds.child import Child
from moonep_validate.worlds.flight import Progress, phases, read
from moonep_validate.worlds.wire import FINE, RAISED, BadFrame, Inbox, put

#: Seconds for the other ranks to answer after one has failed; they may still wait for it in a collective.
GRACE = 2.0
#: An engine imports and joins its group in half a minute on two cores; a cold disk and busy cores take longer.
START_SECONDS = 180.0
#: Seconds to clean up after a case in which a rank raised.
RESET_SECONDS = 15.0
#: A case may take this many deadlines in all, whatever signs of life its ranks give.
MOST_DEADLINES = 40
#: What a subject leaks adds up in workers that serve all cases, and a late case would be blamed for it. So
#: a pool is replaced after so many cases, or once a worker has grown by so many bytes since its tenth case.
OLD_CASES, OLD_BYTES = 2000, 2**30
#: Seconds for a process that a rank started to end by itself after the case.
LEAVE_SECONDS = 1.0
#: By the tenth case what is allocated once is there: imports, caches, the Buffer's memory.
_WARM_CASES = 10
#: How late the end of a silent process may be noticed; replies wake the pool at once.
_TICK = 0.1
#: What is read of a stack that a worker wrote.
_STACK_BYTES = 2**18


@dataclass
class Reply:
    """How one rank answered.

    Attributes:
        data: what its worker sent, or None.
        raised: whether it says that its rank raised.
        problem: what is wrong with what it sent, or with how it did; empty where that is fine, or nothing came.
        left: command lines of processes that it started and left running.
        phases: ``[step, op, done]`` of each call that it entered, where a rank failed.
        ended: its process ended, with this exit code.
        stack: its Python stack, if it had not answered when the deadline passed.
        last_words: the end of what its process printed, where the pool was lost.
    """

    data: bytes | None = None
    raised: bool = False
    problem: str = ""
    left: list[str] = field(default_factory=list)
    phases: list[list[Any]] = field(default_factory=list)
    ended: int | None = None
    stack: str | None = None
    last_words: str = ""

    @property
    def settled(self) -> bool:
        """Whether nothing more is to be expected."""
        return self.over or bool(self.problem)

    @property
    def over(self) -> bool:
        """Whether it is through with its case, or gone."""
        return self.data is not None or self.ended is not None

    @property
    def bad(self) -> bool:
        """Whether this rank failed by itself, as far as is known now."""
        return self.ended is not None or bool(self.problem) or self.raised


class Pool:
    """R workers that share a gloo process group.

    Args:
        size: number of ranks.
        environment: variables that the workers get on top of ours.
        start: a request that every worker answers once, before any job; the answer is kept in ``started``.

    Attributes:
        autopsy: what is known of the ranks of the last case, if it did not come to its end (autopsy.py).
        watched: whether somebody looks for leaks in it; then it is not replaced as it ages.

    Raises:
        RuntimeError: if a worker does not come up, or runs another copy of this package; it says why.
        OSError: if there is no room for its folder.
    """

    def __init__(self, size: int, environment: dict[str, str], start: bytes | None = None) -> None:
        self.size, self._number = size, 0
        self.autopsy: dict[str, Any] = {}
        self.cases, self._keys, self._young = 0, set[str](), 0
        self.watched = False
        self.started: dict[str, Any] | None = None
        self.folder = tempfile.TemporaryDirectory(prefix=warden.PREFIX, ignore_cleanup_errors=True)
        root = Path(self.folder.name)
        self._progress = Progress([root / f"flight{rank}" for rank in range(size)])
        self.workers: list[Child] = []
        try:
            for path in self._progress.paths:
                flight.reserve(path)
            self._spawn(root, environment)
            self._greet()
            if start is not None:
                self.started = self._start(start)
        except BaseException:
            self.close()
            raise

    def _spawn(self, root: Path, environment: dict[str, str]) -> None:
        """Start the workers, each other than rank 0 connected with rank 0."""
        pairs = [socket.socketpair() for _ in range(1, self.size)]
        try:
            for rank in range(self.size):
                peers = [near for near, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
                self.workers.append(Child(rank, self.size, root, environment, peers))
                warden.guard(root, [worker.pid for worker in self.workers])
        finally:
            for one in (one for pair in pairs for one in pair):
                one.close()

    def _greet(self) -> None:
        """Wait until every worker says what it runs; that must be what this process runs."""
        replies = [Reply() for _ in self.workers]
        self._collect(replies, START_SECONDS, patience=0.0)
        for rank, reply in enumerate(replies):
            if reply.bad or (reply.data is None and not any(other.bad for other in replies)):
                told = self.workers[rank].output.text()
                raise RuntimeError(f"the worker of rank {rank} did not start: {reply.problem or told}")
            if reply.data is not None and (reason := launch.difference(_json(reply.data))):
                raise RuntimeError(f"the worker of rank {rank} cannot be used: {reason}")

    def _start(self, request: bytes) -> dict[str, Any]:
        """Tell every worker what to import first; the answer of the first rank that failed, else rank 0's."""
        replies = self.run(request, START_SECONDS)
        answers = [
            _json(reply.data) if reply.data is not None else _no_answer(rank, reply)
            for rank, reply in enumerate(replies)
        ]
        for worker in self.workers:
            worker.know()
        return next((answer for answer in answers if "error" in answer), answers[0])

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
        # Mapping memory and compiling kernels may take longer than any call after it. A deadline that allowed for
        # it in every case would make each hang cost as much.
        limit = deadline if first is None or key in self._keys else first
        self._keys.add(key)
        self.cases, self.autopsy = self.cases + 1, {}
        replies = [Reply() for _ in range(self.size)]
        try:
            self._send(job, replies, limit)
            silent = self._collect(replies, limit)
            self._look_around(replies)
            if any(reply.data is None or reply.bad for reply in replies):
                self._examine(replies, limit if silent else None)
            self._clean_up(replies, reset)
        except BaseException:  # Ctrl-C: what the workers would answer belongs to nobody
            self.close()
            raise
        if self.cases == _WARM_CASES:
            self._young = self._bytes()
        return replies

    def reject(self, problems: Mapping[int, str], replies: Sequence[Reply]) -> None:
        """What these ranks sent cannot be read after all: their replies say so, and the pool is closed."""
        for rank, problem in problems.items():
            replies[rank].data, replies[rank].problem = None, problem
        if self.workers:
            self._examine(replies, None)
            self._clean_up(replies, None)

    def _send(self, job: bytes, replies: Sequence[Reply], limit: float) -> None:
        self._number += 1
        for worker, reply in zip(self.workers, replies, strict=True):
            try:
                put(worker.socket, self._number, FINE, job, limit)
            except TimeoutError as error:
                reply.problem = str(error)
            except OSError:
                self._gone(worker, reply)

    def _collect(self, replies: Sequence[Reply], limit: float, patience: float = GRACE) -> bool:
        """Take the answers until all are there; True if no rank gave a sign for ``limit`` seconds before.

        Args:
            replies: to fill.
            limit: seconds.
            patience: for the others, once a rank has failed.
        """
        inboxes, counts = [Inbox(self._number) for _ in replies], self._progress.counts()
        begin = sign = time.monotonic()
        end: float | None = None
        while not all(reply.settled for reply in replies):
            waiting = [one.socket for one, reply in zip(self.workers, replies, strict=True) if not reply.settled]
            self._wait(waiting, min(_TICK, limit / 4))
            came = [self._take(*one) for one in zip(self.workers, inboxes, replies, strict=True)]
            now, latest = time.monotonic(), self._progress.counts()
            if any(came) or latest != counts:
                sign, counts = now, latest
            # Two ends. Once a rank has failed, the others, which may wait for it, get ``patience``. While none has
            # failed, silence of all ends the case, or more time than any may take: an endless loop gives signs.
            if any(reply.bad for reply in replies) and (end is None or any(came)):
                end = now + patience
            if end is not None and now >= end:
                break
            if now - begin > MOST_DEADLINES * limit or (end is None and now - sign > limit):
                _unfinished(inboxes, replies)
                return not any(reply.problem for reply in replies)
        return False

    def _wait(self, sockets: Sequence[socket.socket], seconds: float) -> None:
        """Until a worker sends or prints something; what it prints is taken, lest it waits for that."""
        wait([*sockets, *(one.output.pipe for one in self.workers if one.output.open)], timeout=seconds)
        for worker in self.workers:
            worker.output.take()

    def _take(self, worker: Child, inbox: Inbox, reply: Reply) -> int:
        """Read what one rank sent, and note whether its process ended; how many bytes that were."""
        if reply.settled:
            return 0
        ended, came = worker.ended(), 0  # asked first: what it sent before it ended is there then
        try:
            came = inbox.take(worker.socket)
        except BadFrame as error:
            reply.problem = f"its reply cannot be read: {error}"
        except (EOFError, OSError):
            self._gone(worker, reply)
        if not reply.settled and inbox.whole:
            reply.data, reply.raised = inbox.body, inbox.kind == RAISED
        elif not reply.settled and ended is not None and not came:
            reply.ended = ended
        return came

    def _gone(self, worker: Child, reply: Reply) -> None:
        """The connection is closed: the process is about to end, or somebody closed it."""
        reply.ended = worker.closed()
        if reply.ended is None:
            reply.problem = "it closed its connection and goes on"

    def _look_around(self, replies: Sequence[Reply]) -> None:
        """Note which processes the ranks that are done started and left running; they end with the pool."""
        end = time.monotonic() + LEAVE_SECONDS
        pairs = [pair for pair in zip(self.workers, replies, strict=True) if pair[1].over]
        while any(found := [worker.started() for worker, _ in pairs]) and time.monotonic() < end:
            time.sleep(0.02)
        for (_, reply), left in zip(pairs, found, strict=True):
            reply.left = [f"{pid} ({text or 'no command line'})" for pid, text in left.items()]

    def _examine(self, replies: Sequence[Reply], silent: float | None) -> None:
        """Take what can be known of the ranks while they are there, and what those that sent nothing have done."""
        there = [rank for rank, reply in enumerate(replies) if reply.data is None and reply.ended is None]
        stacks, native = self._stacks(there), self._native(there) if silent else {}
        ranks = []
        for rank, (reply, path) in enumerate(zip(replies, self._progress.paths, strict=True)):
            records = read(path)
            reply.phases = phases(records)
            if silent and rank in stacks:
                reply.stack = stacks[rank]
            ranks.append(Rank(records, reply.ended, stacks.get(rank), native.get(rank), reply.problem))
        self.autopsy = autopsy(ranks, silent)
        for worker, told in zip(self.workers, self.autopsy["ranks"], strict=True):
            told["output"] = worker.output.text()

    def _clean_up(self, replies: Sequence[Reply], reset: bytes | None) -> None:
        """Close a pool that lost a rank; one in which ranks raised is kept if ``reset`` works on all of them."""
        # Peers of a lost rank are inside collectives of the same group: nothing they say from now on is in step.
        if any(reply.data is None or reply.left for reply in replies):
            for worker, reply in zip(self.workers, replies, strict=True):
                reply.last_words = worker.output.text()
            self.close()
        elif any(reply.raised for reply in replies):
            answers = self.run(reset, RESET_SECONDS) if reset else replies
            if any(answer.data is None or answer.raised for answer in answers):
                self.close()

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """The Python stacks of some workers, by their own faulthandlers."""
        for rank in ranks:
            # Its faulthandler writes the stack from the signal: no thread of the worker has to be free for it.
            self.workers[rank].signal(signal.SIGUSR1)
        paths = {rank: Path(self.folder.name) / f"stack{rank}" for rank in ranks}
        end = time.monotonic() + 2
        while time.monotonic() < end and not all(map(_beginning, paths.values())):
            self._wait([], 0.02)
        time.sleep(0.05 * bool(ranks))  # the beginning of a stack is there: let its writer come to the end
        return {rank: _oldest_first(_beginning(path)) for rank, path in paths.items()}

    def _native(self, ranks: Sequence[int]) -> dict[int, str]:
        """Stacks with native frames, where py-spy is installed and may look; why not, where it may not."""
        tool, found = shutil.which("py-spy"), {}
        for rank in ranks if tool else ():
            # Not blocking: a process inside the kernel cannot be stopped, and py-spy would wait for it.
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
        return max(pages, default=0) * os.sysconf("SC_PAGE_SIZE")

    @property
    def aged(self) -> bool:
        """Whether it has served long enough, or has grown too much, to be replaced."""
        if self.watched:
            return False
        if self.cases >= OLD_CASES:
            return True
        return bool(self._young and self.cases % _WARM_CASES == 0 and self._bytes() - self._young > OLD_BYTES)

    @property
    def alive(self) -> bool:
        """Whether every worker runs."""
        return bool(self.workers) and all(worker.ended() is None for worker in self.workers)

    def close(self) -> None:
        """End every worker and whatever runs in its process group."""
        for worker in self.workers:
            worker.end()
        self.workers = []
        self.folder.cleanup()
        warden.release(Path(self.folder.name))


def _oldest_first(stack: str) -> str:
    """A stack of faulthandler in the order of tracebacks."""
    head, *frames = stack.splitlines() or ["(no Python stack)"]
    return "\n".join([head.replace("most recent call first", "most recent call last"), *reversed(frames)])


def _beginning(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_STACK_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _json(data: bytes) -> dict[str, Any]:
    """An object that a worker sent as JSON; what is none is its error."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        return {"error": f"its answer is no JSON: {error}"}
    return found if isinstance(found, dict) else {"error": f"its answer is {found!r:.100}, and no object"}


def answer_of(reply: Reply) -> dict[str, Any]:
    """What a worker sent as JSON; empty where it sent nothing."""
    return {} if reply.data is None else _json(reply.data)


def _no_answer(rank: int, reply: Reply) -> dict[str, Any]:
    """What is said for a worker that ended, or was silent, while it started."""
    how = reply.problem or f"was silent for {START_SECONDS:g} s"
    how = how if reply.ended is None else how_ended(reply.ended)
    return {"error": f"rank {rank} {how} while it imported and initialised: {reply.last_words}"}


def _unfinished(inboxes: Sequence[Inbox], replies: Sequence[Reply]) -> None:
    """A reply that began and never came to its end is one that cannot be read."""
    for inbox, reply in zip(inboxes, replies, strict=True):
        if not reply.settled:
            reply.problem = inbox.problem


#: Workers that live at a time, over all sizes of pools; idle ones cost memory only.
MAX_WORKERS = 8
_pools: dict[tuple[Any, ...], Pool] = {}


def pool(size: int, environment: dict[str, str], start: bytes | None = None) -> Pool:
    """The living pool of this size, environment, import path and start.

    Pools of other sizes are kept beside it, the last used ones, since an engine takes long to start; those of
    another environment are closed, as are aged ones.
    """
    # Workers read these once, when they start: with other values they would judge another package on other GPUs.
    seen = (os.environ.get("PYTHONPATH"), os.environ.get("CUDA_VISIBLE_DEVICES"), launch.current_folder())
    where = (*seen, start, *sorted(environment.items()))
    for other in [key for key, pool in _pools.items() if key[1:] != where or not pool.alive or pool.aged]:
        _pools.pop(other).close()
    key = (size, *where)
    living = _pools.pop(key, None)
    while living is None and _pools and size + sum(pool.size for pool in _pools.values()) > MAX_WORKERS:
        _pools.pop(next(iter(_pools))).close()
    _pools[key] = living or Pool(size, environment, start)  # last in the order of use
    return _pools[key]


def living(size: int) -> list[Pool]:
    """The pools of so many ranks whose workers run now."""
    return [one for one in _pools.values() if one.size == size and one.alive]


@atexit.register
def _at_exit() -> None:
    if threading.current_thread() is threading.main_thread():  # a signal now would leave a traceback, and workers
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    close_pools()


def close_pools() -> None:
    """End all workers."""
    for living in list(_pools.values()):
        living.close()
    _pools.clear()


def in_collective(stack: str, frames: Sequence[str] = ("exchange", "all_gather_object", "barrier")) -> bool:
    """Whether a stack waits for peers rather than being stuck by itself."""
    return any(f"in {frame}" in stack for frame in frames)
