"""Which GPUs may this process use now? Disjoint sets for processes that run side by side, by locks on files.

One file for each GPU, in a folder of the user; the kernel drops the lock of a killed process. A GPU goes by
its name in CUDA_VISIBLE_DEVICES, so sessions that see overlapping sets keep apart too.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

VISIBLE = "CUDA_VISIBLE_DEVICES"
#: A number of GPUs to pretend, for tests of this module.
PRETEND = "MOONEP_VALIDATE_PRETEND_GPUS"
WAIT_SECONDS = 600.0
_last: list[str] = []


class TooFewGpus(RuntimeError):
    """There are fewer GPUs than needed, whoever uses them."""


def visible(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The names of the GPUs that this process sees; torch is asked how many there are."""
    if PRETEND in environment:
        count = int(environment[PRETEND])
    else:
        import torch

        count = torch.cuda.device_count()
    listed = environment.get(VISIBLE)
    names = [name.strip() for name in listed.split(",")] if listed else [str(index) for index in range(count)]
    return names[:count]


def missing(count: int, names: Sequence[str]) -> str | None:
    """Why so many GPUs cannot be had here, or None."""
    if count <= len(names):
        return None
    return f"{count} GPU{'s are' if count > 1 else ' is'} needed, torch sees {len(names)}"


@contextmanager
def leased(
    count: int, seconds: float = WAIT_SECONDS, environment: MutableMapping[str, str] = os.environ
) -> Iterator[list[str]]:
    """Hold so many GPUs, and make them the only ones that processes started meanwhile see.

    Those held last come first, so that a pool of workers on them is used again.

    Args:
        count: how many.
        seconds: to wait for others to release theirs.
        environment: whose CUDA_VISIBLE_DEVICES is read, and set while they are held.

    Raises:
        TooFewGpus: if there are not so many.
        TimeoutError: if they are not free in time.
    """
    names = visible(environment)
    if reason := missing(count, names):
        raise TooFewGpus(reason)
    end, before = time.monotonic() + seconds, environment.get(VISIBLE)
    with ExitStack() as held:
        while not (mine := _try(count, names, held)):
            if time.monotonic() > end:
                raise TimeoutError(f"{count} of {len(names)} GPUs were not free within {seconds:g} s: {_folder()}")
            time.sleep(0.1)
        _last[:] = mine
        environment[VISIBLE] = ",".join(mine)
        try:
            yield mine
        finally:
            if before is None:
                environment.pop(VISIBLE, None)
            else:
                environment[VISIBLE] = before


def _try(count: int, names: Sequence[str], held: ExitStack) -> list[str]:
    """Take ``count`` free GPUs or none; one process tries at a time, so two never hold half of what each needs."""
    found: dict[str, IO[bytes]] = {}
    with _file("broker") as broker:
        fcntl.flock(broker, fcntl.LOCK_EX)
        for name in sorted(names, key=lambda name: name not in _last):
            file = _file(f"gpu-{re.sub('[^A-Za-z0-9]', '-', name)}")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                continue
            found[name] = file
            if len(found) == count:
                break
        if len(found) < count:
            for file in found.values():
                file.close()
            return []
    for file in found.values():
        held.enter_context(file)
    return [name for name in names if name in found]


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"moonep-validate-gpus-{os.getuid()}"


def _file(name: str) -> IO[bytes]:
    """A lock file; workers do not inherit it, else they would keep the lock of a killed parent."""
    _folder().mkdir(mode=0o700, exist_ok=True)
    return (_folder() / name).open("ab")
