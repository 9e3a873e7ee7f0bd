"""Did a pytest session judge what it was asked to, to its end, with this plugin as it is? Its exit code says so.

pytest ends with exit code 0 where every test was skipped. Workers of xdist send reports to the session that
started them, which counts for all. A user's conftest, plugins and tests run in this very process: what they can do
about this is in docs/trust.md.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from moonep_validate.pipeline.options import ASKING, Options, spelled_in_pytest

#: Property of a report: the status of the verdict that its test was about.
STATUS = "moonep_status"
_PATCHED = "moonep_patched"
_INCOMPLETE, _FAILED, _NOTHING_RAN = 14, 1, 5


def add_options(add: Callable[..., None]) -> None:
    """The option of the state file."""
    add(
        "--moonep-state",
        metavar="FILE",
        help="JSON file that says incomplete, with an exit code that gates, until the session has ended",
    )


class Gate:
    """A plugin that watches one session.

    Args:
        config: of the session.
        options: of the session.
        counts: whether this process answers for the session, and is no worker or other rank of it.

    Attributes:
        judged: tests whose case was judged.
        skipped: reasons of those whose case was not run.
        patched: functions of this package that were replaced, by process.
    """

    def __init__(self, config: pytest.Config, options: Options, counts: bool) -> None:
        state = config.getoption("--moonep-state")
        self.config, self.options, self.state = config, options, Path(state) if state and counts else None
        self.judged, self.skipped, self.patched = set[str](), Counter[str](), list[str]()
        self._write("incomplete", _INCOMPLETE)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a report."""
        status = dict(report.user_properties).get(STATUS)
        if status == "not_run" and report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        elif status not in (None, "not_run"):
            self.judged.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker of xdist says at its end."""
        if names := getattr(node, "workeroutput", {}).get(_PATCHED):
            self.patched.append(f"{node.gateway.id}: {names}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Give a session that passed the exit code that it has earned; the last word is of this file."""
        from moonep_validate.worlds.integrity import replaced

        if names := replaced():
            self.patched.append(names)
        if output := getattr(self.config, "workeroutput", None):
            output[_PATCHED] = names
        elif session.exitstatus == 0 and (found := self._problem()):
            session.exitstatus = found[0]
        earned = session.exitstatus
        yield
        if session.exitstatus == 0 and self.options.given:  # a conftest may have made a failure a pass
            session.exitstatus = earned
        self._write("complete", int(session.exitstatus))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say why a session in which nothing failed is none that passed."""
        if found := self._problem():
            terminalreporter.section("moonep-validate", red=True)
            terminalreporter.write_line(found[1])

    def _problem(self) -> tuple[int, str] | None:
        """An exit code and a sentence."""
        if self.config.option.collectonly:
            return None
        if self.patched:
            return _FAILED, f"code of this suite was replaced in the session: {'; '.join(self.patched)}"
        needed, count = self.options.require_cases or 0, len(self.judged)
        if count < needed:
            return _FAILED, f"--moonep-require-cases {needed}: {count} cases were judged{self._why()}"
        if not count and (asked := [name for name in ASKING if name in self.options.given]):
            named = ", ".join(map(spelled_in_pytest, asked))
            return _NOTHING_RAN, f"no case was judged, though {named} was given{self._why()}"
        return None

    def _why(self) -> str:
        return "".join(f"; {count} were not run: {reason}" for reason, count in self.skipped.most_common(1))

    def _write(self, status: str, code: int) -> None:
        if self.state is None:
            return
        part = self.state.with_name(f"{self.state.name}.part")
        text = json.dumps({"schema": 1, "status": status, "exit_code": code, "judged": len(self.judged)})
        part.write_text(f"{text}\n")
        part.replace(self.state)
