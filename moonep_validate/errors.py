"""What is said to a user whose input cannot be judged? One exception, which every command prints as it is."""

from __future__ import annotations


class CaseError(ValueError):
    """Input that cannot run: the message names the value, the limit and the fix."""
