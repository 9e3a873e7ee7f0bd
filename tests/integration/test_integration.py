"""Integration tier: every case of the engine profile, through a serving engine's own factory, loader and layer.

``pytest tests/integration --moonep-subject vllm``; a consumer of the plugin like any user's own suite.
"""

from __future__ import annotations

from moonep_validate.judge.verdict import Verdict


def test_case(moonep_verdict: Verdict) -> None:
    assert moonep_verdict.ok, moonep_verdict.diagnosis
