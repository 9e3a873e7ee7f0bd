"""``moonep`` for a serving engine, where the real package is not installed: our stand-in of generation A.

An engine imports ``moonep`` by name, often before anything can be patched, so this folder's parent goes on the
import path of the worker processes of an engine, and nowhere else. Where a real ``moonep`` can be imported too,
this one refuses: which of the two ran would depend on the order of a path.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from moonep_validate import __version__

#: Read by the suite: what this module is, and that it promises upstream's exact plan and rounding.
__moonep_origin__ = "stand-in"
__moonep_policy__ = "upstream"


def _real() -> str | None:
    """The file of another ``moonep`` on the import path, or None."""
    here = Path(__file__).parents[1].resolve()
    spec = PathFinder.find_spec("moonep", [entry for entry in sys.path if Path(entry or ".").resolve() != here])
    return None if spec is None else str(spec.origin)


if (_found := _real()) is not None:
    raise ImportError(f"the stand-in for moonep is on the import path beside a real moonep ({_found}); remove one")

from moonep_validate.reference.moonep_a import Buffer, MoonEPCommPlan  # noqa: E402

__all__ = ["Buffer", "MoonEPCommPlan", "__version__"]
