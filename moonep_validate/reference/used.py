"""How often did this process run code of the reference? Where code from outside is judged, that must be never.

A module from outside may import the reference and hand on its results; they are then ours, and nobody else's.
"""

from __future__ import annotations

from collections import Counter

#: ``buffer`` for calls of a Buffer, ``experts`` for expert rows.
USED: Counter[str] = Counter()
