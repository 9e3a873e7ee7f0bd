"""How far is it? One line on stderr every few seconds: answers, rate, time left."""

from __future__ import annotations

import sys
import time

_EVERY = 5.0


class Progress:
    """Told how many answers came; says so now and then."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._before = 0

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total`` answers came."""
        now = time.monotonic()
        if done <= self._before or done == 1:
            self._start = now
        self._before = done
        if now - self._last >= _EVERY and done > 1:
            self._last = now
            sys.stderr.write(line(done, total, now - self._start) + "\n")


def line(done: int, total: int, seconds: float) -> str:
    """Answers, answers per second, seconds left."""
    rate = (done - 1) / seconds if seconds > 0 else 0.0
    left = f"{(total - done) / rate:.0f} s left" if rate else "time left unknown"
    return f"{done} of at most {total} answers, {rate:.3g} a second, {left}"
