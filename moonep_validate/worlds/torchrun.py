"""How is this process one rank of a job that torchrun started? A world in which rank 0 leads and the others serve.

Beside the group of the subject there is one of our own, over gloo, for what the ranks tell each other about a
case. A thread in every rank watches it: after a deadline without a sign from any rank, or where a peer is gone,
every rank says where it is, rank 0 writes down what it knows, and all processes end.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from moonep_validate.cases.case import CaseError
from moonep_validate.worlds import launch, warden
from moonep_validate.worlds.autopsy import GONE, Rank
from moonep_validate.worlds.descendants import lives
from moonep_validate.worlds.flight import Flight, Record, read, watch_torch
from moonep_validate.worlds.place import Place
from moonep_validate.worlds.processes import GRACE

#: Longer than any deadline of a case, as in worker.py: the watchdog decides, and says where.
_SECONDS = 3600
#: For the other ranks to say where they are, and for rank 0 to write that down.
_PATIENCE = 10.0
#: For all ranks to come to the end, once the report is written.
_END_SECONDS = 30.0
TOLD = "torchrun ends all ranks (SIGTERM)"
_TICK = 0.1


class World:
    """All ranks of the job; collective.

    Args:
        place: of this process.
        device: ``cpu`` or ``cuda``.

    Attributes:
        on_lost: what rank 0 does with (ranks, seconds of silence or None, why) at the end; returns the exit code.
    """

    def __init__(self, place: Place, device: str) -> None:
        self.rank, self.size = place.rank, place.size
        self.on_lost: Callable[[list[Rank], float | None, str], int] = lambda ranks, silent, why: 13
        if device == "cuda":
            torch.cuda.set_device(place.local_rank)
        timeout = timedelta(seconds=_SECONDS)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=timeout)
        self.control = dist.new_group(backend="gloo", timeout=timeout)
        client = TCPStore(place.address, place.port, None, False, timedelta(seconds=60), wait_for_workers=False)
        self.store = PrefixStore("moonep-validate", client)
        folder = self.share(tempfile.mkdtemp(prefix="moonep-validate-") if self.rank == 0 else None)
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)  # on another host it is not there
        if place.local_rank == 0:
            warden.guard(self.folder, [])  # the ranks may be killed
        self.flight = Flight(self.folder / f"flight{self.rank}")
        self.homes = self.everybody((socket.gethostname(), os.getpid()))
        watch_torch(self.flight)
        self._limit: float | None = None
        self._since = time.monotonic()
        self._ending = threading.Lock()
        self._main = threading.main_thread().ident
        self._listen()
        launch.end_with(os.getppid(), signal.SIGTERM)  # where the agent is killed, rank 0 still says what it knows
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        atexit.register(self._rest)

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        told = [value]
        with self._hushed():
            dist.broadcast_object_list(told, src=0, group=self.control)
        return told[0]

    def everybody(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        values: list[Any] = [None] * self.size
        with self._hushed():
            dist.all_gather_object(values, value, group=self.control)
        return values

    def gather(self, value: bytes) -> list[bytes]:
        """The values of all ranks, on rank 0; nothing elsewhere."""
        values: list[Any] | None = [b""] * self.size if self.rank == 0 else None
        with self._hushed():
            dist.gather_object(value, values, dst=0, group=self.control)
        return values or []

    def same(self, what: str, value: Any) -> None:
        """Make sure that all ranks were started alike.

        Raises:
            CaseError: on every rank, if they have different values.
        """
        values = self.everybody(value)
        if other := [rank for rank, one in enumerate(values) if one != values[0]]:
            raise CaseError(
                f"rank {other[0]} has another {what} than rank 0: start all ranks with the same command"
            )

    @contextmanager
    def watched(self, limit: float) -> Iterator[None]:
        """A case: after ``limit`` seconds without a sign from any rank it is lost, as it is if a peer is gone."""
        self._since, self._limit = time.monotonic(), limit
        try:
            yield
        except RuntimeError as error:  # the control group: a peer's process has ended
            self.lost(None, str(error).splitlines()[0])
        finally:
            self._limit = None

    @contextmanager
    def hurried(self, failed: bool) -> Iterator[None]:
        """Where this rank raised, and its peers cannot know, they get a moment only to come out of collectives."""
        if failed:
            self.store.add("raised", 1)
        yield
        if failed:
            self.store.add("raised", -1)

    def end(self, folder_too: bool = True) -> None:
        """Wait for all ranks, so that none exits while another is at work: torchrun kills at the first failure."""
        with suppress(RuntimeError), self._hushed(), self.watched(_END_SECONDS):
            dist.barrier(group=self.control)
        self._over.set()  # from here on torchrun ends whoever is last, and that is no loss
        warden.release(self.folder)
        (self.folder / f"flight{self.rank}").unlink(missing_ok=True)
        if folder_too:
            with suppress(OSError):
                self.folder.rmdir()

    def lost(self, silent: float | None, why: str) -> None:
        """The end of all processes: say where this rank is; rank 0 collects that and writes it down.

        Args:
            silent: seconds without a sign, where that is the reason.
            why: the reason otherwise.
        """
        if not self._ending.acquire(blocking=False):
            time.sleep(_SECONDS)  # another thread of this process is at it, and will end the process
        code = 13
        try:
            frame = sys._current_frames().get(self._main or 0)
            stack = "".join(traceback.format_stack(frame)) if frame else None
            records = [astuple(record) for record in read(self.folder / f"flight{self.rank}")]
            with suppress(Exception):
                told = {"records": records, "stack": stack, "told": why == TOLD}
                self.store.set(f"where/{self.rank}", json.dumps(told))
                self.store.add("leaving", int(why == TOLD))
            if self.rank == 0:
                ranks = [self._where(rank, alone=why != TOLD) for rank in range(self.size)]
                code = self.on_lost(ranks, silent, why)
                with suppress(Exception):
                    self.store.set("over", str(code))
                time.sleep(0.5)  # the others read it before torchrun sees that this rank ended
                self._end_others()
            else:
                code = self._told_code()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _told_code(self) -> int:
        try:
            self.store.wait(["over"], timedelta(seconds=2 * _PATIENCE))
            return int(self.store.get("over"))
        except Exception:
            state = Rank(read(self.folder / f"flight{self.rank}")).state
            sys.stderr.write(f"moonep-validate: rank 0 does not answer; rank {self.rank} {state}\n")
            self._end_others()
            return 13

    def _end_others(self) -> None:
        """Kill the ranks on this host that do not end by themselves: without an agent nobody else does."""
        others = [pid for host, pid in self.homes if host == socket.gethostname() and pid != os.getpid()]
        end = time.monotonic() + _PATIENCE / 2
        while any(map(lives, others)) and time.monotonic() < end:
            time.sleep(_TICK)
        for pid in filter(lives, others):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _where(self, rank: int, alone: bool) -> Rank:
        """What a rank said about itself, or else what its log says.

        Args:
            rank: which.
            alone: whether this rank was not told to end, so that one that was has ended by itself.
        """
        name, (host, pid) = f"where/{rank}", self.homes[rank]
        here = host == socket.gethostname()
        if here and not lives(pid):
            return Rank(read(self.folder / f"flight{rank}"), ended=GONE)
        try:
            self.store.wait([name], timedelta(seconds=_PATIENCE))
            said = json.loads(self.store.get(name))
        except Exception:
            return Rank(read(self.folder / f"flight{rank}"), ended=GONE if here and not lives(pid) else None)
        problem = "it was told to end (SIGTERM)" if alone and said["told"] else ""
        return Rank([Record(*record) for record in said["records"]], stack=said["stack"], problem=problem)

    def _watch(self) -> None:
        """Look for signs of life of any rank, on all hosts."""
        mine, total = self.flight.count, 0
        while not self._over.wait(_TICK):
            if self._told_to_end():
                self.lost(None, TOLD)
            fresh = int(self.flight.count != mine)
            mine = self.flight.count
            try:
                latest = self.store.add("signs", fresh)
                leaving = self.store.add("leaving", 0)
            except Exception:  # the store went with the agent, rank 0 or its host
                if not self._over.wait(_PATIENCE):
                    self.lost(None, TOLD if self._told_to_end() else "torchrun's store is gone")
                return
            if leaving and self.rank == 0:
                time.sleep(_PATIENCE / 20)  # whoever ends all ranks tells this one too
                self.lost(None, TOLD if self._told_to_end() else "a rank was told to end")
            if latest != total:
                total, self._since = latest, time.monotonic()
            limit = self._limit
            # The second deadline: a rank raised, and peers that wait for it have a moment to come out.
            if limit is not None and self.store.add("raised", 0):
                limit = min(limit, GRACE)
            if limit is not None and time.monotonic() - self._since > limit:
                self.lost(limit, "")

    def _rest(self) -> None:
        """End the watch before the interpreter ends: a thread that it stops in the store aborts the process."""
        self._over.set()
        self._watcher.join(_PATIENCE)

    def _listen(self) -> None:
        """A handler of SIGTERM that works while the main thread waits in a collective."""
        self._signals, waker = os.pipe()
        os.set_blocking(self._signals, False)
        os.set_blocking(waker, False)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda number, frame: None)
            signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

    def _told_to_end(self) -> bool:
        try:
            return signal.SIGTERM in os.read(self._signals, 64)
        except BlockingIOError:
            return False

    @contextmanager
    def _hushed(self) -> Iterator[None]:
        """What the ranks tell each other is no collective of the subject."""
        flight = getattr(self, "flight", None)
        if flight is None:
            yield
            return
        with flight.hushed():
            yield
