"""What does the pytest plugin do about GPUs and ranks? Markers, leases, and sessions of several ranks.

Under torchrun every rank runs the same tests in the same order; rank 0 judges and prints. torch is imported
only when it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.worlds import gpus
from moonep_validate.worlds.place import Place, place, tie

if TYPE_CHECKING:
    from moonep_validate.doors.torchrun import Parity
    from moonep_validate.judge.verdict import Verdict
    from moonep_validate.pipeline.job import Job

MARKERS = {
    "gpu": "gpu(n=1): needs so many GPUs",
    "multigpu": "multigpu(n=2): needs so many GPUs, and starts its own ranks on them",
}
_NEEDED = {"gpu": 1, "multigpu": 2}
_PLACE = pytest.StashKey[Place | None]()
_PARITY: pytest.StashKey[Parity] = pytest.StashKey()


def add_options(add: Callable[..., None]) -> None:
    """Options about worlds."""
    add(
        "--require-gpus",
        type=int,
        default=0,
        metavar="N",
        help="a test that is skipped since up to N GPUs are missing is an error",
    )


def configure(config: pytest.Config) -> None:
    """Register the markers, and find out whether torchrun started this session.

    Raises:
        pytest.UsageError: under torchrun with xdist.
        CaseError: if torchrun's variables make no sense.
    """
    for text in MARKERS.values():
        config.addinivalue_line("markers", text)
    here = config.stash[_PLACE] = place()
    if here is None:
        return
    tie()
    if config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        raise pytest.UsageError(
            f"-n under torchrun: each of the {here.size} ranks runs all tests; leave out -n, or torchrun"
        )
    if here.rank:
        config.option.xmlpath = None  # one file for each session, not for each rank


def counts(config: pytest.Config) -> bool:
    """Whether this process answers for the session: no worker of xdist, and of torchrun's ranks the first."""
    here = config.stash[_PLACE]
    return not hasattr(config, "workerinput") and not (here and here.rank)


def quiet(config: pytest.Config) -> None:
    """Under torchrun rank 0 prints, once the reporter is there."""
    here, reporter = config.stash[_PLACE], _reporter(config)
    if here and here.rank and reporter is not None:
        reporter._tw._file = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends


def _reporter(config: pytest.Config) -> Any:
    return config.pluginmanager.getplugin("terminalreporter")


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under torchrun, leave out cases of another number of ranks than there is."""
    here = config.stash[_PLACE]
    if here is None:
        return
    cases = {item: item.callspec.params.get("moonep_case") for item in items if hasattr(item, "callspec")}
    others = [item for item, case in cases.items() if case is not None and here.size != case.R]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def check_gpus(item: pytest.Item) -> None:
    """Skip a marked test where GPUs are missing, or fail it where they were promised."""
    for marker in (marker for name in _NEEDED if (marker := item.get_closest_marker(name))):
        count = marker.args[0] if marker.args else marker.kwargs.get("n", _NEEDED[marker.name])
        if reason := gpus.missing(count, gpus.visible()):
            skip(item.config, count, reason)


def skip(config: pytest.Config, count: int, reason: str) -> None:
    """Skip since ``count`` GPUs are not there; an error under ``--require-gpus`` of as many."""
    if count <= config.getoption("--require-gpus"):
        pytest.fail(f"--require-gpus {config.getoption('--require-gpus')}: {reason}", pytrace=False)
    pytest.skip(reason)


@contextmanager
def leases(config: pytest.Config) -> Iterator[Callable[[int], list[str]]]:
    """A function that leases GPUs until the end of the test."""
    with ExitStack() as held:

        def lease(count: int) -> list[str]:
            """So many GPUs that no other worker uses; processes started from now on see only these."""
            if reason := gpus.missing(count, gpus.visible()):
                skip(config, count, reason)
            held.close()
            return held.enter_context(gpus.leased(count))

        yield lease


def judged(config: pytest.Config, job: Job, case: Case, cases: list[Case], lease: Callable[[int], Any]) -> Verdict:
    """The verdict of a case: in a world of its own, or agreed by the ranks of torchrun."""
    from moonep_validate.pipeline.run import run_case

    if config.stash[_PLACE] is None:
        if job.device == "cuda" and not job.target.kind.own_ranks:
            lease(case.R)
        return run_case(job, case)[1]
    parity = _parity(config, job, cases)
    return parity.led(lambda: run_case(parity.job, case)[1])


def _parity(config: pytest.Config, job: Job, cases: list[Case]) -> Parity:
    """This rank of torchrun's job, joined by the first test that needs it."""
    from rich.console import Console

    from moonep_validate.doors.torchrun import enter

    if _PARITY not in config.stash:
        try:
            parity = config.stash[_PARITY] = enter(job, cases)
        except CaseError as error:
            pytest.exit(str(error), pytest.ExitCode.USAGE_ERROR)
        parity.cases = [case for case in cases if parity.size == case.R]
        parity.console = Console(file=_reporter(config)._tw._file, width=120)  # beside what pytest captures
    return config.stash[_PARITY]


def finish(config: pytest.Config) -> None:
    """Wait for all ranks, so that torchrun does not end one that still writes its report."""
    if _PARITY in config.stash:
        config.stash[_PARITY].leave()
