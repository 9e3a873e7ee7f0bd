"""Code from outside never runs in the process that judges, and none of it gives exit code 0 without a verdict."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moonep_validate.cases.case import CaseError
from moonep_validate.pipeline.kinds import refuse
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import OWN_EXPERTS, Options
from moonep_validate.subjects import ask, experts
from moonep_validate.subjects.engines import start as engines

Cli = Callable[..., tuple[int, str, str]]
CASE = "genB+R2+E4+K2+S3+H8+I8"


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Write a module that workers, and this process too, can import."""

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return write


@pytest.mark.parametrize(
    ("option", "text", "says"),
    [
        ("--experts", "import os\nos._exit(0)\n", "importing it ended the process with code 0"),
        ("--experts", "import sys\nsys.exit(0)\n", "importing it ended the process with code 0"),
        ("--experts", "import os\nos.kill(os.getpid(), 11)\n", "importing it ended the process with code -11"),
        ("--moonep-module", "import os\nos._exit(0)\n", "importing it ended the process with code 0"),
        ("--subject", "import os\nos._exit(0)\n", "importing it ended the process with code 0"),
    ],
)
def test_an_import_that_ends_its_process_is_a_usage_error(
    cli: Cli, outside: Callable[[str, str], None], option: str, text: str, says: str
) -> None:
    outside("ends_at_import", text)
    name = "ends_at_import" if option == "--moonep-module" else "ends_at_import:f"
    code, out, err = cli("run", option, name, "--case", CASE)
    assert (code, out) == (4, "")
    assert f"{option} {name}: {says}" in " ".join(err.split())


def test_an_import_that_never_ends_has_a_deadline(
    cli: Cli, outside: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "SECONDS", 8)
    outside("never_imported", "import subprocess\nsubprocess.Popen(['sleep', '600'])\nwhile True:\n    pass\n")
    code, _, err = cli("run", "--experts", "never_imported:f", "--case", CASE)
    assert code == 4
    assert "--experts never_imported:f did not finish importing within 8 s" in " ".join(err.split())


def test_an_import_that_starts_a_helper_and_prints_a_lot_is_no_trouble(
    outside: Callable[[str, str], None],
) -> None:
    outside(
        "starts_helper",
        "import subprocess, threading, time\nsubprocess.Popen(['sleep', '600'])\nprint('x' * 10**7)\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\ndef f(*a):\n    return a[0]\n",
    )
    found = experts.identify("starts_helper:f")
    assert found.part is not None
    assert found.part.package == "starts_helper"


PATCHES = """
from moonep_validate.judge import registry
from moonep_validate.judge.verdict import Verdict
registry.CHECKS.clear()
Verdict.status, Verdict.ok = property(lambda self: "passed"), property(lambda self: True)
def f(rows, row_weights, cu_seqlens, weights):
    return rows * 0
"""


def test_experts_that_patch_the_judge_or_exit_reach_their_workers_only(
    cli: Cli, outside: Callable[[str, str], None]
) -> None:
    outside("patches_all", PATCHES)
    code, out, _ = cli("run", "--experts", "patches_all:f", "--case", CASE, "--shrink-seconds", "0")
    assert "patches_all" not in sys.modules
    assert code in (1, 14), out
    outside("exits_late", "import os\ndef f(*given):\n    os._exit(0)\n")
    code, out, _ = cli("run", "--experts", "exits_late:f", "--case", CASE, "--shrink-seconds", "0")
    assert "exits_late" not in sys.modules
    assert code == 1, out
    assert "the process ended with exit code 0" in out


ENGINE = """
from moonep_validate.subjects.engines.integration import Started
class Mine:
    name, rounds, package, generations = "mine", (), "inside", ("B",)
    def environment(self, device): return {"MINE": device}
    def supports(self, case): return None
    start = open = make_layer = probes = close = lambda self, *given: None
"""


def test_an_integration_from_outside_is_asked_elsewhere(outside: Callable[[str, str], None]) -> None:
    outside("outside_engine", ENGINE)
    found = engines.declared("outside_engine:Mine", "cpu")
    assert (found.package, found.generations, found.environment) == ("inside", ("B",), {"MINE": "cpu"})
    assert "outside_engine" not in sys.modules
    outside("other_engine", ENGINE.replace('("B",)', '("C",)'))
    with pytest.raises(CaseError, match=r"its integration declares generations \('C',\); known: A, B"):
        engines.declared("other_engine:Mine", "cpu")


def test_threads_are_for_our_own_code() -> None:
    with pytest.raises(CaseError, match=r"--world threads: code from outside \(m:f\) runs in processes only"):
        refuse(Options(experts="m:f", world="threads"))
    refuse(Options(experts="torch", world="threads"))
    assert OWN_EXPERTS == experts.OWN
    assert make_job(Options(experts="torch")).runs_in == "threads"
