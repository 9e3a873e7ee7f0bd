"""The pytest plugin: options, a header, one item per case, and a summary. It only wires.

It loads without importing torch, so that it costs nothing in a session that does not use it.

Fixtures:
    moonep_case: one case of the profile (or of ``--moonep-case``); parametrises the test.
    moonep_gpus: a function that leases GPUs for a test.
    moonep_verdict: that case recorded and judged; a case that the subject cannot run is skipped with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from moonep_validate import __version__
from moonep_validate.cases.case import Case, CaseError
from moonep_validate.cases.profiles import PROFILES, default_profile, for_generations, profile
from moonep_validate.doors import plugin_worlds

if TYPE_CHECKING:
    from moonep_validate.judge.verdict import Verdict
    from moonep_validate.pipeline.job import Job

_LEVEL = "moonep_level"
_COMMAND = "moonep_command"
_CASES = pytest.StashKey[list[Case]]()
_JOB: pytest.StashKey[Job] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suite, all with the prefix ``--moonep``."""
    group = parser.getgroup("moonep-validate", "MoonEP validation")
    add = group.addoption
    add("--moonep-profile", help=f"case list: {', '.join(PROFILES)}; by default engine for engines, else default")
    add("--moonep-case", action="append", default=[], help="a case line in place of the profile; repeatable")
    add("--moonep-subject", default="reference", help="reference, vllm, sglang, or MODULE:CLASS of an integration")
    add("--moonep-sglang-path", help="folder with the package sglang; first on the import path of the ranks")
    add(
        "--moonep-device",
        choices=("cpu", "cuda"),
        help="where tensors live; cpu, for an engine cuda if there are GPUs",
    )
    add("--moonep-waivers", help="file of known defects of an engine; none: no waivers; else those we ship")
    add("--moonep-require", action="append", default=[], help="STAGE=PACKAGE that must really run, e.g. load=vllm")
    add("--moonep-module", help="importable module with MoonEP's Buffer; else the embedded reference is judged")
    add("--moonep-experts", default="reference", help="who computes expert rows: torch, MODULE:FUNCTION, ...")
    add("--moonep-api", choices=("A", "B"), help="API generation, where the signatures do not tell")
    add(
        "--moonep-policy",
        choices=("upstream", "legal"),
        help="upstream: gate on upstream's exact plan and rounding",
    )
    add("--moonep-relaxed", action="store_true", help="also run cases that real hardware refuses")
    add("--moonep-destructive", action="store_true", help="also give bad input that may trap or hang")
    add("--moonep-fault", action="append", default=[], help="seed a fault; repeatable")
    plugin_worlds.add_options(add)
    add("--moonep-record", default="full", help="what to keep of large tensors: plan, digest, columns[:N] or full")
    add("--moonep-deadline", type=float, default=30.0, help="seconds a rank may run between collectives")


def pytest_configure(config: pytest.Config) -> None:
    """Read the options now, so that a typo is a usage error and not a failing test."""
    option = config.getoption
    try:
        plugin_worlds.configure(config)
        cases = [Case.parse(line) for line in option("--moonep-case")]
        listed = profile(option("--moonep-profile") or default_profile(option("--moonep-subject")))
        generations: tuple[str, ...] = ("A", "B")
        if option("--moonep-subject") != "reference":
            generations = ("A",)  # an engine is started by the first test that needs it, not by every xdist worker
        elif option("--moonep-fault") or option("--moonep-module"):
            generation = _job(config).generation
            generations = (generation,) if generation else generations
        config.stash[_CASES] = _of_ranks(option("--moonep-ranks"), cases or for_generations(listed, generations))
    except CaseError as error:
        raise pytest.UsageError(str(error)) from None


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
    faults = "".join(f", fault {fault}" for fault in config.getoption("--moonep-fault"))
    subject = config.getoption("--moonep-module") or config.getoption("--moonep-subject")
    return f"moonep-validate: {__version__}, subject {subject}{faults}"


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
    from moonep_validate.pipeline.require import unmet

    job = _job(request.config)
    if missing := unmet(job, request.config.getoption("--moonep-require")):
        pytest.fail("\n".join(missing), pytrace=False)
    cases = request.config.stash[_CASES]
    verdict = plugin_worlds.judged(request.config, job, moonep_case, cases, moonep_gpus)
    request.node.user_properties += [(_LEVEL, verdict.level), (_COMMAND, verdict.command)]
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
    from moonep_validate.pipeline.job import make_job

    if _JOB not in config.stash:
        option = config.getoption
        config.stash[_JOB] = make_job(
            option("--moonep-module"),
            option("--moonep-api"),
            option("--moonep-policy"),
            option("--moonep-relaxed"),
            option("--moonep-destructive"),
            option("--moonep-fault"),
            option("--moonep-deadline"),
            option("--moonep-subject"),
            option("--moonep-sglang-path"),
            option("--moonep-device"),
            "" if option("--moonep-waivers") == "none" else option("--moonep-waivers"),
            option("--moonep-experts"),
            option("--moonep-world"),
            option("--moonep-record"),
        )
    return config.stash[_JOB]
