"""Component tier: every case of the profile, through one subject, with our experts around it.

A consumer of the plugin like any user's own suite. Options: ``pytest --help``, group moonep-validate.
"""

from __future__ import annotations

from moonep_validate.judge.verdict import Verdict


def test_case(moonep_verdict: Verdict) -> None:
    assert moonep_verdict.ok, moonep_verdict.diagnosis
