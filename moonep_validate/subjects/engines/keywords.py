"""Which keyword arguments does some code pass? Read from its source, so nothing has to be called.

Two generations of MoonEP differ in the names of their arguments, and an engine's call fails only when it is made.
The names in the engine's own source tell it before anything runs.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Collection


def passed_keywords(source: str, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Keyword arguments of all calls of some names.

    Args:
        source: of a module, a class or a function, indented or not.
        names: last names of what is called: ``combine`` finds ``combine(...)`` and ``x.buffer.combine(...)``.

    Returns:
        name -> sorted keywords that at least one call passes; a name that is never called is left out, and what
        ``**kwargs`` expands to cannot be seen.

    Raises:
        SyntaxError: if the source is not Python.
    """
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Call) and (name := _last_name(node.func)) in names:
            found.setdefault(name, set()).update(word.arg for word in node.keywords if word.arg is not None)
    return {name: tuple(sorted(keywords)) for name, keywords in sorted(found.items())}


def _last_name(node: ast.expr) -> str:
    """``c`` of ``a.b.c``, ``c`` of ``c``; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
