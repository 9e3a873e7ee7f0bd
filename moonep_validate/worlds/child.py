"""What is one worker process, as its pool sees it? A process group, a socket, a pipe of what it prints."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from moonep_validate.worlds import descendants, launch, warden
from moonep_validate.worlds.wire import Tail

WORKER = "moonep_validate.pipeline.worker"
#: Seconds for a process that closed its connection, or was killed, to be gone.
_END_SECONDS = 2.0


class Child:
    """The process of one rank.

    Args:
        rank, size: which, of how many.
        folder: for its flight record and stack.
        environment: variables on top of ours.
        peers: connections to other ranks, which it takes over.
    """

    def __init__(
        self, rank: int, size: int, folder: Path, environment: dict[str, str], peers: Sequence[socket.socket]
    ) -> None:
        self.socket, theirs = socket.socketpair()
        reader, writer = os.pipe()
        self.output = Tail(reader)
        numbers = [one.fileno() for one in (theirs, *peers)]
        command = launch.command(WORKER, str(rank), str(size), str(folder), ",".join(map(str, numbers)))
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C is for the pool, which ends its workers in order
                pass_fds=numbers,
            )
        finally:
            os.close(writer)
            theirs.close()
        self.socket.setblocking(False)
        self.pid, self.known = self.process.pid, set[int]()

    def ended(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self.process.poll()

    def closed(self) -> int | None:
        """The same where its connection is closed, so that it is about to end."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout=_END_SECONDS)
        return None

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        self.process.send_signal(number)

    def know(self) -> None:
        """What it has started so far is its own, and stays until it ends."""
        self.known = set(descendants.children(self.pid))

    def started(self) -> dict[int, str]:
        """What it started since then and what still runs, with command lines; of a dead one, its session."""
        found = descendants.session(self.pid) if self.ended() is not None else descendants.children(self.pid)
        return {pid: text for pid, text in found.items() if pid not in self.known}

    def end(self) -> None:
        """Kill it and its process group, also if it is dead and only others are left."""
        descendants.end_group(self.pid)
        with suppress(OSError):
            self.process.send_signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # the kernel may keep a process that waits for a device
            self.process.wait(timeout=_END_SECONDS)
        self.socket.close()
        self.output.close()
        warden.forget_memory(self.pid)
