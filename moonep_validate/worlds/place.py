"""Did torchrun start this process, and as which rank? Told from the environment alone, without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from moonep_validate.cases.case import CaseError

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
