"""What if nobody reads on, or the disk is full? The run goes on to its end, and to its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any, TextIO


class Patient:
    """A text stream that stops to write, and to complain, once its reader has gone or its disk is full.

    Attributes:
        lost: why what was written is not whole, or empty; a reader who went (``| head``) wanted no more.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.lost = stream, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """As a stream does; what cannot be written is dropped."""
        with self._patience():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As a stream does."""
        with self._patience():
            self.stream.flush()

    @contextmanager
    def _patience(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.lost = f"standard output cannot be written: {error.strerror}"
            self._drop()

    def _drop(self) -> None:
        """Send all that comes, and what is still buffered, to nowhere."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)


@contextmanager
def patient_output() -> Iterator[Patient]:
    """Standard output that forgives."""
    before = sys.stdout
    if isinstance(before, TextIOWrapper):  # text from a file may hold what this terminal cannot show
        before.reconfigure(errors="backslashreplace")
    patient = Patient(before)
    sys.stdout = patient
    try:
        yield patient
    finally:
        patient.flush()
        sys.stdout = before
