"""What vLLM asks before it builds a Buffer; the stand-in needs no NVLink multicast."""

from __future__ import annotations


def nvl_multicast_supported() -> bool:
    """Whether the machine can run this package."""
    return True
