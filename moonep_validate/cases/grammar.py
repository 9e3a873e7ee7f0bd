"""How is a case written? ``+``-separated tokens; ``name:arg,arg`` is the one form of everything that has a name.

Reading a typo names the nearest word; printing has one spelling for each value.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from moonep_validate.cases.near import meant
from moonep_validate.cases.vocabulary import VOCABULARY
from moonep_validate.errors import CaseError

NUMBERS = ("R", "E", "K", "S", "H", "I", "slots", "pad", "seed")
REQUIRED = ("generation", "R", "E", "K", "S")
#: Words of before 0.1.0 and what they are now; they leave with 0.2.0.
OLD_WORDS = {"nemesis": "in_flight", "answers": "configurations"}
SPECS = ("routing", "fill", "model", "format", "scenario")
#: Characters of a case line, of a number, and of what an error repeats.
MAX_LINE, MAX_NUMBER, _SHOWN = 2**20, 19, 100


@dataclass(frozen=True, order=True)
class Spec:
    """``name:arg,arg``: the one grammar for routing, fill, model, format, scenario and fault ids."""

    name: str
    args: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name + (":" + ",".join(self.args) if self.args else "")

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Split ``name:arg,arg``; the name and the arguments are not checked here."""
        name, colon, args = text.partition(":")
        if not name or (colon and not args):
            raise CaseError(f"{shown(text)} is not a name or name:arg,arg")
        return cls(name, tuple(args.split(",")) if colon else ())


def renewed(text: str) -> str:
    """A case line, or a pattern of case lines, in the words of today; stderr is told once of each old word."""
    for old, new in OLD_WORDS.items():
        text, found = re.subn(rf"(?<!\w){old}(?!\w)", new, text)
        if found:
            _note(old, new)
    return text


@cache
def _note(old: str, new: str) -> None:
    sys.stderr.write(
        f"moonep-validate: the case word {old!r} is now {new!r}; the old one goes with version 0.2.0\n"
    )


def shown(text: str) -> str:
    """A text as an error repeats it: one line, not too long."""
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def read_token(token: str) -> tuple[str, Any]:
    """One token as (field, value)."""
    if match := re.fullmatch(r"gen(\w+)", token):
        return "generation", match[1]
    if match := re.fullmatch(rf"({'|'.join(NUMBERS)})(-?\d+)", token):
        if len(match[2]) > MAX_NUMBER:
            raise CaseError(f"{match[1]} has a number of {len(match[2])} digits")
        return match[1], int(match[2])
    if token.startswith("@"):
        return "witnesses", token[1:]
    if token.startswith("tokens:"):
        try:
            return "tokens", tuple(_number(int, count) for count in token[len("tokens:") :].split(","))
        except ValueError:
            raise CaseError(f"{shown(token)} is not tokens:COUNT,COUNT,... with one number a rank") from None
    if token.startswith("fill:"):
        return "fill", Spec.parse(token[len("fill:") :])
    return _read_spec(token)


def _read_spec(token: str) -> tuple[str, Spec]:
    spec = Spec.parse(token) if token else Spec("")
    word = VOCABULARY.get(spec.name)
    if word is not None and word.field in SPECS:
        return word.field, spec
    usages = [word.usage for word in VOCABULARY.values()]
    numbers = [f"{name}NUMBER" for name in NUMBERS]
    raise CaseError(
        f"unknown part {shown(token)} of a case{_suggestion(spec.name, [*usages, *numbers, 'tokens:COUNT,...'])}"
    )


def _suggestion(name: str, known: Sequence[str]) -> str:
    """``; did you mean 'zipf:EXPONENT'?`` or the list of what is known."""
    stems = {re.split(r"[:,]|NUMBER", usage)[0].lstrip("@"): usage for usage in known}
    stems.pop("", None)
    sized = [stem for stem in stems if re.fullmatch(rf"{stem}-?\d+", name, re.IGNORECASE)]
    return f"; did you mean {stems[sized[0]]!r}?" if sized else meant(name, stems, stems.values())


def normalised(spec: Spec, field: str) -> Spec:
    """The one spelling of a spec, e.g. ``zipf:2`` becomes ``zipf:2.0``."""
    word = VOCABULARY.get(spec.name)
    if word is None or word.field != field:
        known = [name for name, word in VOCABULARY.items() if word.field == field]
        raise CaseError(f"unknown {field} {shown(spec.name)}{_suggestion(spec.name, known)}")
    kinds: tuple[Callable[[str], Any], ...] = word.args or (int,) * len(spec.args) * (word.args is None)
    if len(kinds) != len(spec.args) or (word.args is None and not spec.args):
        raise CaseError(f"{shown(str(spec))} has {len(spec.args)} arguments; usage: {word.usage}")
    try:
        return Spec(spec.name, tuple(repr(_number(kind, arg)) for kind, arg in zip(kinds, spec.args, strict=True)))
    except ValueError:
        raise CaseError(f"{shown(str(spec))} has an argument that is not a number; usage: {word.usage}") from None


def _number(kind: Callable[[str], Any], text: str) -> Any:
    if len(text) > 2 * MAX_NUMBER:  # Python takes quadratic time, or refuses above 4,300 digits
        raise ValueError("too long")
    return kind(text)


def printed(name: str, value: Any) -> list[str]:
    """The tokens that set one field."""
    if name == "tokens":
        return ["tokens:" + ",".join(map(str, value))]
    if name == "witnesses":
        return ["@" + witness for witness in value]
    if name == "fill":
        return [f"fill:{value}"]
    return [str(value) if name in SPECS else f"{name}{value}"]
