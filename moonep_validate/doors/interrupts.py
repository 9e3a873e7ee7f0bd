"""How does a run end when it is told to? Ctrl-C, SIGTERM and SIGHUP are one thing, and it happens once.

Each raises ``KeyboardInterrupt`` until somebody says that the end has begun: from then on they change nothing, so
that the report is written and the workers are ended in peace.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _State:
    told = False
    ending = False


@contextmanager
def as_one() -> Iterator[None]:
    """Take the signals while this lasts; one that is ignored, as under nohup, stays so."""
    _State.told = _State.ending = False
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _tell)
    try:
        yield
    finally:
        if _State.told:
            _end_workers()
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def told() -> bool:
    """Whether a signal came, even if some code has swallowed what it raised."""
    return _State.told


def ending() -> None:
    """The end has begun: signals change nothing from now on."""
    _State.ending = True


def check() -> None:
    """Raise what some code has swallowed."""
    if _State.told and not _State.ending:
        raise KeyboardInterrupt


def _tell(number: int, frame: FrameType | None) -> None:
    _State.told = True
    check()


def _end_workers() -> None:
    ending()
    if processes := sys.modules.get("moonep_validate.worlds.processes"):
        processes.close_pools()
