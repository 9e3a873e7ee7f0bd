"""How is a server started, watched and stopped? In a process group of its own, whose log explains a failure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moonep_validate.errors import CaseError
from moonep_validate.served.child import last_lines
from moonep_validate.served.recipe import Recipe

#: Seconds for a server to end by itself after SIGTERM.
_GRACE = 10.0


class Server:
    """A process that serves.

    Args:
        recipe: how it was started.
        process: its parent process, leader of its group.
        url: of its root.
        log: its output.
    """

    def __init__(self, recipe: Recipe, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.recipe, self.process, self.url, self.log = recipe, process, url, log

    def died(self) -> str | None:
        """How it ended with the last lines of its log, or None while it lives."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the server of {self.recipe.engine} {how}. The end of its log:\n{self.end_of_log()}"

    def end_of_log(self) -> str:
        """The last lines of its log, without secrets."""
        return self.recipe.hide(last_lines(self.log))


@contextmanager
def running(recipe: Recipe, answers: Callable[[str], bool]) -> Iterator[Server]:
    """A server that is ready; nothing that it started is left afterwards.

    Args:
        recipe: with a command or an engine.
        answers: whether a server at this URL is ready.

    Raises:
        CaseError: if its port is taken, it cannot be started, ends, or is not ready in time.
    """
    port = _port(recipe.port)
    with tempfile.TemporaryDirectory(prefix="moonep-server-") as folder:
        log = Path(recipe.log) if recipe.log else Path(folder) / "log"
        process = _start(recipe, recipe.started_by(port), log)
        server = Server(recipe, process, f"http://127.0.0.1:{port}", log)
        try:
            _await(server, answers)
            yield server
        finally:
            _stop(process)


def _port(wanted: int) -> int:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", wanted))
        except OSError as error:
            raise CaseError(
                f"port {wanted} is taken ({error.strerror}): end what listens there, or use port = 0"
            ) from None
        return int(one.getsockname()[1])


def _start(recipe: Recipe, command: list[str], log: Path) -> subprocess.Popen[bytes]:
    try:
        with log.open("wb") as file:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **recipe.environment},
                start_new_session=True,
            )
    except OSError as error:
        where = error.filename or command[0]
        raise CaseError(f"{recipe.hide(str(where))} cannot be started or written: {error.strerror}") from None


def _await(server: Server, answers: Callable[[str], bool]) -> None:
    limit = time.monotonic() + server.recipe.ready
    while not answers(server.url):
        if why := server.died():
            raise CaseError(why)
        if time.monotonic() > limit:
            raise CaseError(
                f"the server of {server.recipe.engine} is not ready after {server.recipe.ready:g} s (ready = …). "
                f"The end of its log:\n{server.end_of_log()}"
            )
        time.sleep(min(0.5, server.recipe.ready / 20))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """First the polite way, so that an engine can end its workers; then the whole group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
