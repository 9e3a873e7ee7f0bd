"""Which known word did somebody mean? One answer for every vocabulary."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

#: How alike two spellings must be, from 0 to 1, for one to be a slip of the other.
_ALIKE = 0.5
#: So alike, they differ by one letter of a long word.
_SLIP = 0.9
#: Longer names are compared by their beginning, since comparing takes the square of the length.
_LONGEST = 100
#: Words that are named where none is nearer than the others.
_MOST = 3


def near(name: str, known: Iterable[str]) -> list[str]:
    """The known words nearest to a name: one, or a few that are equally near, or none.

    After a plain slip of a letter come words that start with the same word (``slot``: ``slot-not-filled``), then
    words that contain the name, then any that are spelled alike.
    """
    name, words = name[:_LONGEST], list(known)
    if slip := difflib.get_close_matches(name, words, n=1, cutoff=_SLIP):
        return slip
    starting = [word for word in words if name and _first(word) == _first(name)]
    containing = [word for word in words if len(name) > 1 and name.lower() in word.lower()]
    found = starting or containing
    return difflib.get_close_matches(name, found or words, n=1, cutoff=_ALIKE) or found[:_MOST]


def meant(name: str, known: Iterable[str], shown: Iterable[str] = ()) -> str:
    """``; did you mean 'zipf'?`` for the end of an error, or a list of what is known.

    Args:
        name: what was written.
        known: the words.
        shown: how each is shown, by default as it is.
    """
    words = list(known)
    usage = dict(zip(words, shown or words, strict=True))
    if found := near(name, words):
        return f"; did you mean {' or '.join(repr(usage[word]) for word in found)}?"
    return f"; known: {', '.join(usage.values()) or 'none'}"


def _first(words: str) -> str:
    """``slot`` of ``slot-not-filled``."""
    return re.split(r"[-_ ]", words.lower())[0]
