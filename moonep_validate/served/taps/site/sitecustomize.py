"""Python imports this at the start of every process whose PYTHONPATH names this folder: a served engine's."""

import importlib
import os
import sys

if os.environ.get("MOONEP_VALIDATE_TAPS"):
    from moonep_validate.served.taps.hooks import install

    install()

# There may be another sitecustomize behind this one, which must run as before.
_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]  # noqa: PTH100
_mine = sys.modules.pop("sitecustomize", None)
try:
    importlib.import_module("sitecustomize")
except ImportError:
    if _mine is not None:
        sys.modules["sitecustomize"] = _mine
