"""Only an engine is judged here; without one these tests would repeat the component tier."""

from __future__ import annotations

import pytest


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return True if config.getoption("--moonep-subject") == "reference" else None


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("--moonep-subject") == "reference":
        return "tests/integration: not collected; it needs --moonep-subject vllm or sglang"
    return None
