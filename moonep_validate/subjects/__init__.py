"""Who is judged? A subject says what it supports, opens sessions and declares its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moonep_validate.case import Case
from moonep_validate.rig import Rig, Session
from moonep_validate.subjects import composed
from moonep_validate.trace import Part


@dataclass(frozen=True)
class Subject:
    """One thing under test.

    Attributes:
        supports: case -> reason why it cannot run, or None.
        open: makes a session on one rank; collective.
        parts: stage -> what stands behind it.
        proves, leaves_open: the two halves of the line that says what a pass means.
    """

    name: str
    supports: Callable[[Case], str | None]
    open: Callable[[Rig], Session]
    parts: Mapping[str, Part]
    proves: str
    leaves_open: str


SUBJECTS = {
    "reference": Subject(
        name="reference",
        supports=composed.supports,
        open=composed.ReferenceSession,
        parts=composed.PARTS,
        proves="the suite's own reference transport and experts keep the contract on these cases",
        leaves_open="nothing outside this project ran: no MoonEP build, no GPU kernel, no serving engine",
    )
}
