"""Is this package, as it is loaded in this process, what its source says? Code from outside may have patched it.

Each function and method that a module's source defines must still be found under its name, and come from that
file. Who patches with care can hide it (docs/trust.md).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import cache, cached_property
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import moonep_validate

_PACKAGE = "moonep_validate."
#: What taps of engines are put around: our stand-in in a real package's place.
_TAPPED = "moonep_validate.reference."
_FOLDER = str(Path(moonep_validate.__path__[0]))
_SHOWN = 3
#: Where a decorator keeps the function that it took: classmethod, property, cached_property, partial, fixtures.
_INSIDE = ("__func__", "fget", "func", "__wrapped__", "_fixture_function")


def replaced() -> str:
    """Names of functions of this package that were replaced here, in one phrase; empty if none were."""
    names = [name for module in _loaded() for name in _differences(module)]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _loaded() -> list[ModuleType]:
    known = [(name, module) for name, module in list(sys.modules.items()) if name.startswith(_PACKAGE)]
    return [m for name, m in known if isinstance(m, ModuleType) and not name.startswith(_TAPPED)]


def _differences(module: ModuleType) -> Iterator[str]:
    file = getattr(module, "__file__", None) or ""
    for path in _defined(module.__name__, file):
        code = _code(_found(module, path))
        if code is None or (code.co_filename == file and code.co_name == path[-1]):
            continue
        if code.co_filename == file or not code.co_filename.startswith(_FOLDER):  # else a decorator of ours
            yield ".".join((module.__name__, *path))


@cache
def _defined(name: str, file: str) -> tuple[tuple[str, ...], ...]:
    """The paths of names of the functions that a file defines."""
    try:
        return tuple(_paths(SourceFileLoader(name, file).get_code(name), ()))
    except (ImportError, OSError, SyntaxError):
        return ()


def _paths(code: CodeType | None, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for inner in code.co_consts if code else ():
        if not isinstance(inner, CodeType) or inner.co_name.startswith("<"):
            continue
        here = (*path, inner.co_name)
        if inner.co_flags & inspect.CO_OPTIMIZED:
            yield here
        else:  # the body of a class
            yield from _paths(inner, here)


def _found(module: ModuleType, path: tuple[str, ...]) -> Any:
    value: Any = module
    for name in path:
        value = vars(value).get(name) if isinstance(value, ModuleType | type) else None
    return value


def _code(value: Any) -> CodeType | None:
    """The code of a function, inside of what decorators put around it; None where there is none to be seen."""
    for _ in range(8):
        inner = next((vars_of[n] for n in _INSIDE for vars_of in [_attributes(value)] if n in vars_of), None)
        if inner is None:
            return getattr(value, "__code__", None) if inspect.isfunction(value) else None
        value = inner
    return None


def _attributes(value: Any) -> dict[str, Any]:
    if isinstance(value, classmethod | staticmethod):
        return {"__func__": value.__func__}
    if isinstance(value, property):
        return {"fget": value.fget}
    if isinstance(value, cached_property):
        return {"func": value.func}
    return dict(getattr(value, "__dict__", {}))
