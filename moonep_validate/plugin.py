"""The pytest plugin: options, a header, one item per case, and a summary. It only wires.

It loads without importing torch, so that it costs nothing in a session that does not use it.

Fixtures:
    moonep_case: one case of the profile (or of ``--moonep-case``); parametrises the test.
    moonep_verdict: that case recorded and judged; a case that the subject cannot run is skipped with the reason.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from moonep_validate import __version__
from moonep_validate.case import Case, CaseError
from moonep_validate.profiles import PROFILES, profile

if TYPE_CHECKING:
    from moonep_validate.engine import Job
    from moonep_validate.verdict import Verdict

_LEVEL = "moonep_level"
_COMMAND = "moonep_command"
_CASES = pytest.StashKey[list[Case]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suite, all with the prefix ``--moonep``."""
    group = parser.getgroup("moonep-validate", "MoonEP validation")
    add = group.addoption
    add("--moonep-profile", default="default", help=f"case list: {', '.join(PROFILES)}")
    add("--moonep-case", action="append", default=[], help="a case line in place of the profile; repeatable")
    add("--moonep-subject", default="reference", help="what is judged")
    add("--moonep-fault", action="append", default=[], help="seed a fault; repeatable")
    add("--moonep-deadline", type=float, default=30.0, help="seconds a rank may run between collectives")


def pytest_configure(config: pytest.Config) -> None:
    """Read the options now, so that a typo is a usage error and not a failing test."""
    option = config.getoption
    try:
        cases = [Case.parse(line) for line in option("--moonep-case")] or profile(option("--moonep-profile"))
        config.stash[_CASES] = cases
        if option("--moonep-fault") or option("--moonep-subject") != "reference":
            _job(config)
    except CaseError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_header(config: pytest.Config) -> str:
    """Version and subject."""
    faults = "".join(f", fault {fault}" for fault in config.getoption("--moonep-fault"))
    return f"moonep-validate: {__version__}, subject {config.getoption('--moonep-subject')}{faults}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item per case, named by the case."""
    if "moonep_case" in metafunc.fixturenames:
        cases = metafunc.config.stash[_CASES]
        metafunc.parametrize("moonep_case", cases, ids=[str(case) for case in cases])


@pytest.fixture
def moonep_verdict(moonep_case: Case, request: pytest.FixtureRequest) -> Verdict:
    """The verdict of one case, with its evidence level and reproducer as properties of the report."""
    from moonep_validate.engine import run_case

    _, verdict = run_case(_job(request.config), moonep_case)
    request.node.user_properties += [(_LEVEL, verdict.level), (_COMMAND, verdict.command)]
    if verdict.status == "not_run":
        pytest.skip(verdict.results[0].reason)
    return verdict


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many cases passed at which level of evidence, and a line to reproduce each that did not."""
    stats = terminalreporter.stats
    reports = [r for name in ("passed", "failed") for r in stats.get(name, []) if hasattr(r, "user_properties")]
    judged = [(r, dict(r.user_properties)) for r in reports if _LEVEL in dict(r.user_properties)]
    if not judged:
        return
    terminalreporter.section("moonep-validate")
    for level, count in Counter(p[_LEVEL] for r, p in judged if r.passed).items():
        terminalreporter.write_line(f"{count} cases passed with evidence level: {level}")
    for report, properties in judged:
        if report.failed:
            terminalreporter.write_line(f"reproduce: {properties[_COMMAND]}")


def _job(config: pytest.Config) -> Job:
    from moonep_validate.engine import make_job

    option = config.getoption
    return make_job(option("--moonep-subject"), option("--moonep-fault"), option("--moonep-deadline"))
