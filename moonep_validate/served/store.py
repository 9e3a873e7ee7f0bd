"""What was answered before an interruption? A file of answers that grows, and is read on the next try."""

from __future__ import annotations

from pathlib import Path
from typing import IO
from uuid import uuid4

from moonep_validate.errors import CaseError
from moonep_validate.served.answers import Answer, Answers, Who, head_line, line_of, read


class Store:
    """Answers of one side, kept as they come.

    Args:
        path: file of answers; what it holds of the same side is known.
        who: who answers now.

    Raises:
        CaseError: if it holds answers of another side, or cannot be written.
    """

    def __init__(self, path: Path, who: Who) -> None:
        self.known = _begun(path)
        if self.known is not None and _side(self.known.who) != _side(who):
            raise CaseError(
                f"{path} holds answers of {self.known.who}, {self.known.who.model}; this side is {who}, "
                f"{who.model}: choose another --save, or remove it"
            )
        self._file: IO[str] | None = None
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise CaseError(f"{path} cannot be written: {error.strerror}") from None
        self._file.write(head_line(who, self.known.recording if self.known else uuid4().hex))
        for run in (self.known.runs if self.known else {}).values():
            for answer in run.values():
                self.keep(answer)

    def keep(self, answer: Answer) -> None:
        """Keep one answer; one that failed is asked for again."""
        if not answer.error and self._file:
            self._file.write(line_of(answer))
            self._file.flush()

    def close(self) -> None:
        """No more comes."""
        if self._file:
            self._file.close()


def _side(who: Who) -> tuple[object, ...]:
    return who.engine, who.version, who.model, who.dtype, tuple(who.arguments), who.expects


def _begun(path: Path) -> Answers | None:
    """The answers of a file, without a last line that was cut; None where there is none."""
    if not path.is_file() or not path.stat().st_size:
        return None
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        path.write_bytes(data[: data.rfind(b"\n") + 1])
        if b"\n" not in data:
            return None
    return read(path)
