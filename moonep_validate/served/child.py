"""How does an engine become a file of answers? In a process with a deadline, whose log explains a failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import moonep_validate
from moonep_validate.errors import CaseError
from moonep_validate.served.answers import Answers, read
from moonep_validate.served.request import Request

_LAST_LINES = 8


def answered(
    request: Request,
    deadline: float,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Answers:
    """What an engine answers, in a process of its own.

    Args:
        request: what to do; its ``out`` is chosen here if it is empty.
        deadline: seconds for all of it.
        python: of the environment that has the engine; it needs no moonep-validate, ours is put on its path.
        environment: variables beside those of this process.
        log: where its output goes; by default it is kept only for the error.

    Raises:
        CaseError: if it ends without answers or does not end in time, with the last lines of its log.
    """
    with tempfile.TemporaryDirectory(prefix="moonep-served-") as folder:
        out = request.out or str(Path(folder) / "answers.jsonl")
        asked = Path(folder) / "request.json"
        asked.write_text(json.dumps(asdict(replace(request, out=out))), encoding="utf-8")
        output = log or Path(folder) / "log"
        command = [python, "-m", "moonep_validate.served.speak", str(asked)]
        code = _run(command, deadline, _variables(environment), output)
        if code != 0 or not Path(out).is_file():
            raise CaseError(f"{request.engine} {request.model}: {_why(code, deadline)}\n{last_lines(output)}")
        return read(Path(out))


def _variables(environment: Mapping[str, str] | None) -> dict[str, str]:
    ours = str(Path(moonep_validate.__file__).parents[1])
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, [ours, before]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **(environment or {})}


def _run(command: list[str], deadline: float, environment: Mapping[str, str], output: Path) -> int | None:
    """The exit code, or None after the deadline; nothing that it started is left."""
    with output.open("wb") as file:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise CaseError(f"{command[0]} cannot be started: {error.strerror}") from None
        try:
            return process.wait(deadline)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _why(code: int | None, deadline: float) -> str:
    if code is None:
        return f"no answers within {deadline:g} s, so it was ended; see --deadline. The end of its log:"
    return f"it ended with exit code {code} and left no answers. The end of its log:"


def last_lines(log: Path, count: int = _LAST_LINES) -> str:
    """The end of a log, each line cut to a width that a terminal shows."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 65536))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return "\n".join(f"  {line[:300]}" for line in lines[-count:])
