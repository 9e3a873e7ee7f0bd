"""The pytest plugin: options, a header, one item per case, and a summary. It only wires.

It loads without importing torch, so that it costs nothing in a session that does not use it.

Fixtures:
    moonep_case: one case of the profile (or of ``--moonep-case``); parametrises the test.
    moonep_gpus: a function that leases GPUs for a test.
    moonep_verdict: that case recorded and judged; a case that the subject cannot run is skipped with the reason.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints

import pytest

from moonep_validate import __version__
from moonep_validate.cases.case import Case, CaseError
from moonep_validate.cases.profiles import for_generations, profile
from moonep_validate.doors import plugin_gate, plugin_worlds
from moonep_validate.pipeline.kinds import kind_of, refuse
from moonep_validate.pipeline.options import DECLARED, Options, read
from moonep_validate.pipeline.options import spelled_in_pytest as spelled

if TYPE_CHECKING:
    from moonep_validate.judge.verdict import Verdict
    from moonep_validate.pipeline.job import Job

_LEVEL = "moonep_level"
_COMMAND = "moonep_command"
_NUMBERS: dict[Any, type] = {float: float, int | None: int}
_OPTIONS = pytest.StashKey[Options]()
_CASES = pytest.StashKey[list[Case]]()
_JOB: pytest.StashKey[Job] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suite, all with the prefix ``--moonep``."""
    group = parser.getgroup("moonep-validate", "MoonEP validation")
    hints = get_type_hints(Options)
    for name, (one, declared) in DECLARED.items():
        more: dict[str, Any] = {"default": None}
        if isinstance(one.default, bool):
            more = {"default": False, "action": "store_true"}
        elif isinstance(one.default, tuple):
            more = {"default": [], "action": "append"}
        elif declared.choices:
            more["choices"] = declared.choices
        elif hints[name] in _NUMBERS:
            more["type"] = _NUMBERS[hints[name]]
        group.addoption(spelled(name), help=declared.help, **more)
        if declared.old:
            group.addoption(spelled(declared.old), help=argparse.SUPPRESS)
    plugin_worlds.add_options(group.addoption)
    plugin_gate.add_options(group.addoption)


def _options(config: pytest.Config) -> Options:
    """What the command line of pytest says."""
    names = [*DECLARED, *(declared.old for _, declared in DECLARED.values() if declared.old)]
    return read({name: config.getoption(spelled(name)) for name in names}, partial(_note, config), spelled)


def _note(config: pytest.Config, text: str) -> None:
    if not hasattr(config, "workerinput"):  # what started the workers of xdist says it
        sys.stderr.write(f"moonep-validate: {text}\n")


def pytest_configure(config: pytest.Config) -> None:
    """Read the options now, so that a typo is a usage error and not a failing test."""
    try:
        plugin_worlds.configure(config)
        options = config.stash[_OPTIONS] = _options(config)
        refuse(options)
        cases = [Case.parse(line) for line in options.case]
        listed = profile(options.profile or kind_of(options).profile)
        config.stash[_CASES] = _of_ranks(options.ranks, cases or for_generations(listed, _generations(config)))
    except CaseError as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(plugin_gate.Gate(config, options, plugin_worlds.counts(config)))


def _generations(config: pytest.Config) -> tuple[str, ...]:
    """Those of the target; it is imported only where an option names one that may be wrong."""
    options = config.stash[_OPTIONS]
    if kind_of(options).own_ranks:  # started by the first test that needs it, not by every worker of xdist
        from moonep_validate.subjects.engines.start import declared

        return declared(options.subject).generations
    if options.fault or options.moonep_module:
        return _job(config).target.generations
    return ("A", "B")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Under torchrun only rank 0 prints."""
    plugin_worlds.quiet(session.config)


def _of_ranks(ranks: int | None, cases: list[Case]) -> list[Case]:
    chosen = [case for case in cases if ranks in (None, case.R)]
    if not chosen:
        known = ", ".join(map(str, sorted({case.R for case in cases}))) or "none"
        raise CaseError(f"--moonep-ranks {ranks}: no case has R={ranks}; there are cases of R = {known}")
    return chosen


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under torchrun, leave out cases of another number of ranks."""
    plugin_worlds.deselect(config, items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are."""
    plugin_worlds.check_gpus(item)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Under torchrun, end together."""
    plugin_worlds.finish(config)


def pytest_report_header(config: pytest.Config) -> str:
    """Version and subject."""
    options = config.stash[_OPTIONS]
    faults = "".join(f", fault {fault}" for fault in options.fault)
    return f"moonep-validate: {__version__}, subject {options.moonep_module or options.subject}{faults}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item per case, named by the case."""
    if "moonep_case" in metafunc.fixturenames:
        cases = metafunc.config.stash[_CASES]
        metafunc.parametrize("moonep_case", cases, ids=[str(case) for case in cases])


@pytest.fixture
def moonep_gpus(request: pytest.FixtureRequest) -> Iterator[Callable[[int], list[str]]]:
    """A function: ``moonep_gpus(n)`` are the names of n GPUs that no other pytest worker uses during this test."""
    with plugin_worlds.leases(request.config) as lease:
        yield lease


@pytest.fixture
def moonep_verdict(
    moonep_case: Case, request: pytest.FixtureRequest, moonep_gpus: Callable[[int], list[str]]
) -> Verdict:
    """The verdict of one case, with its evidence level and reproducer as properties of the report."""
    from moonep_validate.pipeline.require import unmet, unmet_by

    job = _job(request.config)
    if missing := unmet(job, request.config.stash[_OPTIONS].require):
        pytest.fail("\n".join(missing), pytrace=False)
    cases = request.config.stash[_CASES]
    verdict = plugin_worlds.judged(request.config, job, moonep_case, cases, moonep_gpus)
    request.node.user_properties += [
        (_LEVEL, verdict.level),
        (_COMMAND, verdict.command),
        (plugin_gate.STATUS, verdict.status),
    ]
    if verdict.status != "not_run" and (
        missing := unmet_by(verdict.parts, request.config.stash[_OPTIONS].require)
    ):
        pytest.fail("\n".join(missing), pytrace=False)
    if verdict.status == "not_run":
        pytest.skip(verdict.results[0].reason)
    if verdict.status == "waived":
        pytest.xfail(next(result.reason for result in verdict.results if result.status == "waived"))
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
    """The job of this session; a module is asked only once what it is."""
    from moonep_validate.pipeline.make import make_job

    if _JOB not in config.stash:
        config.stash[_JOB] = make_job(config.stash[_OPTIONS])
    return config.stash[_JOB]
