"""Weights as bytes: codes, layouts, who a byte says it is, and the faults of all three (docs/formats.md)."""

from __future__ import annotations

from moonep_validate.errors import CaseError


class FormatError(CaseError):
    """Bytes that are not what they are said to be: the message names the tensor, the place and the rule."""
