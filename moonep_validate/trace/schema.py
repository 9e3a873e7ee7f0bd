"""Is this data what it must be? The one checker of what comes from files: JSON and TOML against dataclasses.

A file is opened only if it is a regular one, and read with a bound. A value is checked against type hints:
missing and unknown keys, wrong types, numbers out of range and deep nesting are one ``SchemaError``, which says
where, what was expected and what is there. Nothing is allocated beyond the data itself.
"""

from __future__ import annotations

import json
import os
import stat
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
#: Levels of nesting in data of free form, and the length of a value that is shown in an error.
MAX_DEPTH, MAX_MESSAGE = 32, 1000
_SHOWN = 60
_INT64 = 2**63


class SchemaError(ValueError):
    """Data that is not of the promised form; the message is one printable line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@dataclass(frozen=True)
class Within:
    """Bounds of a whole number, for ``Annotated[int, Within(0, 9)]``; without it, 64 bits."""

    low: int = -_INT64
    high: int = _INT64 - 1


def one_line(text: str) -> str:
    """A text of unknown origin as one printable line of bounded length."""
    line = text[:MAX_MESSAGE]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a regular file.

    Raises:
        SchemaError: for a folder, pipe or device, which are not opened for long, and for a file above the limit.
        OSError: if it cannot be read.
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer that never comes.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:  # noqa: PTH123
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise SchemaError("is no regular file (a folder, pipe or device)")
        if status.st_size > limit:
            raise SchemaError(f"has {status.st_size} bytes, the limit is {limit}")
        return opened.read(status.st_size)


def decoded(data: bytes) -> str:
    """Text from UTF-8.

    Raises:
        SchemaError: for anything else.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SchemaError(f"is not UTF-8: byte 0x{data[error.start]:02x} at {error.start}") from None


def parsed(text: str, parse: Callable[[str], Any] = json.loads) -> Any:
    """Parse JSON (or TOML), whose parsers fail in many ways.

    Raises:
        SchemaError: for bad syntax, nesting that is too deep, or a number of thousands of digits.
    """
    try:
        return parse(text)
    except RecursionError:
        raise SchemaError(f"is nested too deep, the limit is {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise SchemaError(str(error).partition("\n")[0]) from None


def build(kind: type[T], data: Any, where: str = "") -> T:
    """An instance of a dataclass (or of another hint) from parsed data.

    Args:
        kind: a dataclass whose fields have type hints.
        data: what the parser gave.
        where: how errors call the data.

    Raises:
        SchemaError: naming the place, what is needed there and what is there.
    """
    return _value(kind, data, where)  # type: ignore[no-any-return]


def build_known(kind: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """What a dataclass knows of some data, as ``build``; what else is there may be anything."""
    return build(kind, {one.name: data[one.name] for one in fields(kind) if one.name in data}, where)  # type: ignore[arg-type]


def _value(hint: Any, data: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin is Annotated:
        whole, bounds = get_args(hint)
        return _bounded(whole, bounds, data, where)
    if is_dataclass(hint):
        return _record(hint, data, where)
    return _BUILDERS.get(origin or hint, _plain)(hint, data, where)


def _record(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise _wrong(where, "an object", data)
    known = {one.name: one for one in fields(kind) if one.init}
    needed = {n for n, one in known.items() if one.default is MISSING and one.default_factory is MISSING}
    if unknown := sorted(map(str, set(data) - set(known))):
        raise SchemaError(f"{where} has {_short(', '.join(unknown))}; known: {', '.join(sorted(known))}".strip())
    if missing := sorted(needed - set(data)):
        raise SchemaError(f"{where} lacks {', '.join(missing)}".strip())
    hints = _hints(kind)
    return kind(**{name: _value(hints[name], value, _inside(where, name)) for name, value in data.items()})


@lru_cache(maxsize=64)
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _plain(hint: Any, data: Any, where: str) -> Any:
    if type(data) is hint or (hint is float and type(data) is int and abs(data) < _INT64):
        return data
    raise _wrong(where, _NAMES.get(hint, getattr(hint, "__name__", str(hint))), data)


def _bounded(hint: Any, bounds: Within, data: Any, where: str) -> int:
    if type(data) is not hint or not bounds.low <= data <= bounds.high:
        raise _wrong(where, f"a whole number from {bounds.low} to {bounds.high}", data)
    return data  # type: ignore[no-any-return]


def _whole(hint: Any, data: Any, where: str) -> int:
    if type(data) is not int or not -_INT64 <= data < _INT64:
        raise _wrong(where, "a whole number" + " of 64 bits" * (type(data) is int), data)
    return data


def _union(hint: Any, data: Any, where: str) -> Any:
    """The first member that fits; an object's own error says more than that no member fits."""
    members = get_args(hint)
    if data is None and types.NoneType in members:
        return None
    rest = [member for member in members if member is not types.NoneType]
    if len(rest) == 1:
        return _value(rest[0], data, where)
    for member in rest:
        try:
            return _value(member, data, where)
        except SchemaError:
            continue
    raise _wrong(where, " or ".join(_NAMES.get(m, getattr(m, "__name__", str(m))) for m in rest), data)


def _sequence(hint: Any, data: Any, where: str) -> Any:
    if not isinstance(data, list | tuple):
        raise _wrong(where, "a list", data)
    make, args = get_origin(hint), get_args(hint)
    if make is tuple and args[-1] is not Ellipsis:
        if len(data) != len(args):
            raise _wrong(where, f"a list of {len(args)}", data)
        return tuple(
            _value(arg, one, f"{where}[{i}]") for i, (arg, one) in enumerate(zip(args, data, strict=True))
        )
    if args[0] is int and set(map(type, data)) <= {int}:  # thousands of tokens: no loop in Python
        if data and (min(data) < -_INT64 or max(data) >= _INT64):
            raise _wrong(where, "whole numbers of 64 bits", data)
        return make(data)
    return make(_value(args[0], one, f"{where}[{i}]") for i, one in enumerate(data))


def _mapping(hint: Any, data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _wrong(where, "an object", data)
    return {key: _value(get_args(hint)[1], value, _inside(where, key)) for key, value in data.items()}


def _literal(hint: Any, data: Any, where: str) -> Any:
    if not isinstance(data, str | int) or data not in get_args(hint):
        raise _wrong(where, f"one of {', '.join(map(str, get_args(hint)))}", data)
    return data


def _free(hint: Any, data: Any, where: str) -> Any:
    """Data of free form: what JSON can hold, no deeper than ``MAX_DEPTH``, whole numbers of 64 bits."""
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        if any(type(one) is int and not -_INT64 <= one < _INT64 for one in level):
            raise SchemaError(f"{where} holds a whole number of more than 64 bits")
        level = [inner for one in level for inner in _contents(one)]
        if not level:
            return data
    raise SchemaError(f"{where} is nested deeper than {MAX_DEPTH} levels")


def _contents(value: Any) -> Sequence[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()


def _wrong(where: str, needed: str, data: Any) -> SchemaError:
    return SchemaError(f"{where or 'it'} is {shown(data)}, {needed} is needed")


def shown(data: Any) -> str:
    """A value as an error shows it: one short line, whatever it is."""
    if isinstance(data, int) and abs(data) >= _INT64:
        return f"a number of {data.bit_length()} bits"
    if isinstance(data, Mapping):
        return "an object" if data else "an empty object"
    if isinstance(data, list | tuple):
        return f"a list of {len(data)}"
    return "null" if data is None else _short(repr(data))


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _inside(where: str, name: str) -> str:
    return f"{where}.{_short(name)}" if where else _short(name)


_NAMES = {
    str: "a text",
    bool: "true or false",
    float: "a number",
    date: "a date such as 2027-06-30",
    int: "a number",
}
_BUILDERS: dict[Any, Callable[[Any, Any, str], Any]] = {
    int: _whole,
    Any: _free,
    list: _sequence,
    tuple: _sequence,
    dict: _mapping,
    Literal: _literal,
    Union: _union,
    types.UnionType: _union,
}
