"""The smallest pairs: one process of vLLM against MoonEP on two ranks, in process and behind vLLM's server.

They serve the tiny model, which is made here. In an environment with vLLM and moonep-validate; options of pytest
replace the pairs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))


def main() -> int:
    """The exit code of pytest."""
    from tests.e2e.tiny import make

    make(Path("tiny"))
    recipes = HERE / "recipes"
    pairs = [
        word
        for candidate in ("moonep.toml", "http-moonep.toml")
        for word in ("--moonep-pair", str(recipes / "one.toml"), str(recipes / candidate))
    ]
    chosen = sys.argv[1:] or ["--moonep-reference", str(recipes / "reference.toml"), *pairs]
    config = [
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(ROOT),
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
    ]
    return int(pytest.main([*config, str(HERE), "-v", *chosen]))


if __name__ == "__main__":
    sys.exit(main())
