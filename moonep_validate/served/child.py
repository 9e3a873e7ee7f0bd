"""How does an engine become a file of answers? In a process with a deadline, whose log explains a failure."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

import moonep_validate
from moonep_validate.errors import CaseError
from moonep_validate.served.answers import Answers, read
from moonep_validate.served.request import Request, out_of_rank

_LAST_LINES = 8


def answered(
    request: Request,
    deadline: float,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    ranks: int = 1,
    hide: Callable[[str], str] = str,
) -> Answers:
    """What an engine answers, in a process of its own for each rank.

    Args:
        request: what to do; its ``out`` is chosen here if it is empty.
        deadline: seconds for all of it.
        python: of the environment that has the engine; it needs no moonep-validate, ours is put on its path.
        environment: variables beside those of this process.
        log: where its output goes; by default it is kept only for the error.
        ranks: data-parallel ranks; each takes its share of the prompts, and finds its place as under torchrun.
        hide: takes secrets out of the log's last lines.

    Raises:
        CaseError: if it ends without answers or does not end in time, with the last lines of its log.
    """
    with tempfile.TemporaryDirectory(prefix="moonep-served-") as folder:
        out = request.out or str(Path(folder) / "answers.jsonl")
        asked = Path(folder) / "request.json"
        asked.write_text(json.dumps(asdict(replace(request, out=out))), encoding="utf-8")
        output = log or Path(folder) / "log"
        command = [python, "-m", "moonep_validate.served.speak", str(asked)]
        places = _places(ranks)
        codes = _run(command, deadline, [{**_variables(environment), **place} for place in places], output)
        files = [Path(out_of_rank(out, rank, ranks)) for rank in range(ranks)]
        if any(codes) or not all(file.is_file() for file in files):
            code = next((code for code in codes if code), None)
            raise CaseError(
                f"{request.engine} {request.model}: {_why(code, deadline)}\n{hide(last_lines(output))}"
            )
        return _merged([read(file) for file in files])


def _places(ranks: int) -> list[dict[str, str]]:
    if ranks == 1:
        return [{}]
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _merged(parts: Sequence[Answers]) -> Answers:
    """All ranks' answers; one that was asked of two, so that ranks keep step, counts once."""
    whole = parts[0]
    for part in parts[1:]:
        for run, answers in part.runs.items():
            for name, answer in answers.items():
                whole.runs.setdefault(run, {}).setdefault(name, answer)
    return whole


def _variables(environment: Mapping[str, str] | None) -> dict[str, str]:
    ours = str(Path(moonep_validate.__file__).parents[1])
    merged = {**os.environ, **(environment or {})}
    path = os.pathsep.join(filter(None, [merged.get("PYTHONPATH"), ours]))
    return {**merged, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _run(
    command: list[str], deadline: float, environments: Sequence[Mapping[str, str]], output: Path
) -> list[int | None]:
    """The exit code of each process, None after the deadline; nothing that they started is left."""
    processes: list[subprocess.Popen[bytes]] = []
    limit = time.monotonic() + deadline
    try:
        with output.open("wb") as file:
            for variables in environments:
                processes.append(_start(command, variables, file))
        while any(one.poll() is None for one in processes) and time.monotonic() < limit:
            if any(one.returncode for one in processes):
                break  # the others wait for it for ever
            time.sleep(0.05)
        return [one.poll() for one in processes]
    finally:
        for one in processes:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def _start(command: list[str], environment: Mapping[str, str], file: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
        )
    except OSError as error:
        raise CaseError(f"{command[0]} cannot be started: {error.strerror}") from None


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
