"""Only an engine is judged by the cases here; without one they would repeat the component tier."""

from __future__ import annotations

from pathlib import Path

import pytest


def _no_engine(config: pytest.Config) -> bool:
    return config.getoption("--moonep-subject") in (None, "reference")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.name == "test_integration.py" and _no_engine(config) else None


def pytest_report_header(config: pytest.Config) -> str | None:
    if _no_engine(config):
        return "tests/integration: its cases are not collected; they need --moonep-subject vllm or sglang"
    return None
