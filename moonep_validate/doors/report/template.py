"""How does a page become a file of its own? Templates beside this one, in one style; torch is not needed."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

_FOLDER = Path(__file__).parent


def rendered(name: str, **values: Any) -> str:
    """A template with its values, which are text unless they are markup."""
    return _template(name).render(style=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")), **values)


@lru_cache(maxsize=2)
def _template(name: str) -> Template:
    surroundings = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return surroundings.from_string((_FOLDER / name).read_text(encoding="utf-8"))
