"""Did torchrun start this process, and as which rank? Told from the environment alone, without torch."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from moonep_validate.cases.case import CaseError
from moonep_validate.worlds.launch import end_with

_STORE_SECONDS = 60.0
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """What torchrun says about this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place in a job of torchrun, or None if it is in none.

    Raises:
        CaseError: if a number among the variables is none.
    """
    if any(name not in environment for name in VARIABLES):
        return None

    def number(name: str, default: str | None = None) -> int:
        text = environment.get(name, default or "")
        if not text.isdigit():
            raise CaseError(f"{name} is {text!r}, a whole number is needed; start with torchrun")
        return int(text)

    local_rank = number("LOCAL_RANK")
    return Place(
        number("RANK"),
        number("WORLD_SIZE"),
        local_rank,
        number("LOCAL_WORLD_SIZE", str(local_rank + 1)),
        environment["MASTER_ADDR"],
        number("MASTER_PORT"),
    )


def tie(environment: Mapping[str, str] = os.environ) -> None:
    """Let this rank end with torchrun's agent, which started it; until all ranks are up, at once.

    While they meet, Python's own handlers do not run: a signal ends the process as it does any other.

    Raises:
        CaseError: if the agent is gone already; the ranks would wait for its store for a quarter of an hour.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with(os.getppid())
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return  # rank 0 is going to keep the store
    here = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    try:
        socket.create_connection(here, _STORE_SECONDS).close()
    except OSError as error:
        raise CaseError(
            f"torchrun's agent does not listen at {here[0]}:{here[1]}: {error}; it was ended"
        ) from None
