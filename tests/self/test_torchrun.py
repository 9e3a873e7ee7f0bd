"""Our process as one rank of torchrun: one report, one verdict, and no rank that waits for ever."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moonep_validate.cases.case import CaseError
from moonep_validate.worlds import descendants
from moonep_validate.worlds.place import place
from moonep_validate.worlds.torchrun import World

SIZES = "genB+R2+E4+K2+S3+H8+I8"
CONSUMER = Path(__file__).parents[1] / "component" / "test_component.py"
Cli = Callable[..., tuple[int, str, str]]


def torchrun(*arguments: str, cwd: Path) -> tuple[int, str]:
    """Two ranks; the exit code of torchrun, and what all ranks and torchrun printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def parity(tmp_path: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    out = tmp_path / "out"
    options = ["--out", str(out), "--shrink-seconds", "0"]
    code, text = torchrun("moonep_validate", "parity", *arguments, *options, cwd=tmp_path)
    return code, text, json.loads((out / "report.json").read_text())


def test_all_ranks_agree_and_rank_0_reports_once(tmp_path: Path) -> None:
    cases = ["--case", f"{SIZES}+hot:0", "--case", SIZES, "--case", "genB+R3+E6+K2+S3"]
    code, text, report = parity(tmp_path, *cases)
    assert code == 0, text
    assert text.count("passed: 2 of 2 cases ran (2 passed)") == 1
    assert text.count("1 cases are left out, since they do not have the 2 ranks of torchrun") == 1
    assert (report["status"], report["exit_code"], report["planned"]) == ("passed", 0, 2)


def test_what_one_rank_raises_reaches_all_and_the_next_case_runs(tmp_path: Path) -> None:
    options = ["--fault", "rank-raises", "--case", f"{SIZES}+combine_only", "--case", f"{SIZES}+hot:0"]
    code, text, report = parity(tmp_path, *options, "--case", SIZES)
    assert code == 1
    assert (
        text.count("failed at stage prefetch (check F1 returns: every call returns on every rank, step base)") == 2
    )
    assert text.count("at rank 1: expected return, got RuntimeError: seeded failure of prefetch_weight") == 2
    assert "of 3 cases ran" in text
    assert report["exit_code"] == 1


def test_a_rank_that_never_returns_ends_the_job_with_an_autopsy(tmp_path: Path) -> None:
    options = ["--fault", "rank-never-returns", "--deadline", "1", "--case", f"{SIZES}+hot:0", "--case", SIZES]
    code, text, report = parity(tmp_path, *options)
    assert code == 1
    says = (
        r"rank 1 never entered \S+ #\d+ \(collective #\d+\); rank 0 waits in it; rank 1 is in combine of step base"
    )
    assert len(re.findall(f"autopsy: expected every rank goes on, got {says}", text)) == 1, text
    assert "the ranks cannot go on, so 1 cases were not run; exit code 13" in text
    assert (report["status"], report["exit_code"], report["planned"]) == ("hung", 13, 2)
    assert report["unmet"] == ["the ranks were lost: 1 of 2 cases were not run"]
    case = report["cases"][0]
    assert re.match(says, case["autopsy"]["diagnosis"])
    assert "life.py" in case["autopsy"]["ranks"][1]["stack"]


def test_pytest_runs_on_all_ranks_and_prints_once(tmp_path: Path) -> None:
    (tmp_path / "test_component.py").write_text(CONSUMER.read_text())
    cases = [
        "--moonep-case",
        f"{SIZES}+hot:0",
        "--moonep-case",
        "genB+R3+E6+K2+S3",
        "--moonep-case",
        f"{SIZES}+@triple",
    ]
    code, text = torchrun("pytest", "-v", *cases, cwd=tmp_path)
    assert code == 1
    assert text.count("1 failed, 1 passed, 1 deselected in") == 1, text
    assert len(re.findall(r"=+ FAILURES =+", text)) == 1, (
        text
    )  # under CI, pytest says why once more in its summary
    assert "the case claims @triple, but that event did not occur" in text


def test_no_case_of_as_many_ranks_is_an_error(tmp_path: Path) -> None:
    code, text = torchrun("moonep_validate", "parity", "--case", "genB+R3+E6+K2+S3", cwd=tmp_path)
    assert code == 1
    assert text.count("moonep-validate: torchrun started 2 ranks, and no case has R=2; there are R = 3") == 1


def test_without_torchrun_the_error_says_how(cli: Cli) -> None:
    code, _, err = cli("parity", "--case", SIZES)
    assert code == 4
    assert "start it with: torchrun --nproc-per-node N -m moonep_validate parity" in err


def test_place_is_read_from_the_environment() -> None:
    full = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    here = place(full)
    assert here is not None
    assert (here.rank, here.size, here.local_rank, here.local_size, here.port) == (3, 4, 1, 2, 29500)
    assert place({name: value for name, value in full.items() if name != "LOCAL_RANK"}) is None
    with pytest.raises(CaseError, match="WORLD_SIZE is 'two', a whole number is needed"):
        place({**full, "WORLD_SIZE": "two"})


def test_xdist_under_torchrun_is_a_usage_error(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xdist")
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_subprocess("-n", "2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: -n under torchrun: each of the 2 ranks runs all tests*"])


#: A rank that stops, ends or is told to end some time after its part of a case.
MODULE = """
import os, signal, sys, threading, time
import moonep_validate.judge.verdict
from moonep_validate.reference import moonep_b
from moonep_validate.reference.moonep_b import MoonEPCommPlan
__version__ = "9.9"
{first}

class Buffer(moonep_b.Buffer):
    def destroy(self, *args, **kwargs):
        result = super().destroy(*args, **kwargs)
        if self.rank in {ranks}:
            {then}
            time.sleep(600)
        return result
"""


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, then: str, ranks: str = "(1,)", first: str = "") -> None:
    text = MODULE.replace("{then}", then).replace("{ranks}", ranks).replace("{first}", first)
    (folder / "moonep_ends.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("rank", "how", "says", "statuses"),
    [
        (1, "SIGSTOP", r"autopsy: .* got rank 1 is in close of step close", ("hung",)),
        (1, "SIGTERM", r"rank 1 did not answer: it was told to end \(SIGTERM\)", ("failed", "incomplete")),
        (1, "SIGKILL", r"autopsy: .* got rank 1 ended \(torchrun knows how\) in close of step close", ("failed",)),
        (0, "SIGSTOP", r"autopsy: .* got rank 0 is in close of step close", ("hung",)),
        (
            0,
            "SIGTERM",
            r"rank 0 did not answer: it was told to end \(SIGTERM\), and not by torchrun",
            ("failed", "incomplete"),
        ),
        (0, "SIGKILL", r"autopsy: .* got rank 0 .* in close of step close", ("failed",)),
    ],
)
def test_a_rank_that_stops_or_ends_after_its_case_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, how: str, says: str, statuses: tuple[str, ...]
) -> None:
    module(tmp_path, monkeypatch, f"os.kill(os.getpid(), signal.{how})", f"({rank},)")
    options = ["--moonep-module", "moonep_ends", "--deadline", "1"]
    code, text, report = parity(
        tmp_path, *options, "--case", "genB+R2+E4+K2+S3+hot:0", "--case", "genB+R2+E4+K2+S3"
    )
    assert code == 1
    assert re.search(says, text), text
    assert report["status"] in statuses
    assert report["exit_code"] in (1, 2, 13)


@pytest.mark.parametrize(
    ("then", "ranks"),
    [
        ("os._exit(0)", "(0,)"),
        ("sys.exit(0)", "(0, 1)"),
        ("threading.Thread(target=os._exit, args=(0,)).start()", "(0, 1)"),
    ],
)
def test_a_rank_that_exits_with_0_is_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, ranks: str
) -> None:
    module(tmp_path, monkeypatch, then, ranks)
    code, text, report = parity(
        tmp_path, "--moonep-module", "moonep_ends", "--deadline", "1", "--case", "genB+R2+E4+K2+S3"
    )
    assert code == 1, text
    assert report["status"] == "failed", text
    assert report["exit_code"] == 1


def test_what_a_module_patches_does_not_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = "moonep_validate.judge.verdict.Verdict.status = property(lambda self: 'passed')"
    module(tmp_path, monkeypatch, "result = result; return 1 / 0", "(0, 1)", first)
    options = ["--moonep-module", "moonep_ends", "--case", "genB+R2+E4+K2+S3"]
    code, text, report = parity(tmp_path, *options)
    assert code == 1, text
    assert report["status"] in ("failed", "error"), text
    assert report["exit_code"] in (1, 14)


def test_a_module_that_exits_with_0_in_pytest_on_rank_0_is_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module(tmp_path, monkeypatch, "os._exit(0)", "(0, 1)")
    (tmp_path / "test_component.py").write_text(CONSUMER.read_text())
    options = ["--moonep-module", "moonep_ends", "--moonep-case", "genB+R2+E4+K2+S3", "--moonep-deadline", "1"]
    code, text = torchrun("pytest", *options, cwd=tmp_path)
    assert code == 1, text


@pytest.mark.parametrize("when", ["start", "case"])
def test_killing_torchrun_leaves_no_rank(tmp_path: Path, when: str) -> None:
    options = ["--fault", "rank-never-returns", "--deadline", "1000", "--case", f"{SIZES}+hot:0"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]
    command += ["moonep_validate", "parity", *options, "--out", str(tmp_path / "out")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as agent:
        assert eventually(lambda: len(ranks(agent.pid)) == 2)
        pids = ranks(agent.pid)
        if when == "case":
            assert eventually(lambda: any(b"combine" in path.read_bytes() for path in tmp_path.glob("*/flight1")))
        else:
            assert eventually(lambda: all("parity" in descendants.command(pid) for pid in pids))
        agent.kill()
    assert eventually(lambda: not any(map(descendants.lives, pids))), pids
    assert eventually(lambda: not list(tmp_path.glob("moonep-validate-*")))
    if when == "case":
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["exit_code"] != 0
        assert len(report["cases"]) == 1


@pytest.mark.parametrize(("over", "lost"), [(False, [(None, "torchrun's store is gone")]), (True, [])])
def test_a_rank_whose_store_went_with_the_agent_ends(
    monkeypatch: pytest.MonkeyPatch, over: bool, lost: list[tuple[None, str]]
) -> None:
    class Gone:
        def add(self, name: str, count: int) -> int:
            if over:
                world._over.set()
            raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr("moonep_validate.worlds.torchrun._PATIENCE", 0.3)
    found: list[tuple[None, str]] = []
    world: Any = object.__new__(World)
    world.rank, world.store, world._over = 1, Gone(), threading.Event()
    world.flight = SimpleNamespace(count=0)
    world._told_to_end = lambda: False
    world.lost = lambda silent, why: found.append((silent, why))
    world._watch()
    assert found == lost


def ranks(agent: int) -> list[int]:
    return [pid for pid, text in descendants.children(agent).items() if "moonep_validate" in text]


def eventually(true: Callable[[], object], seconds: float = 100.0) -> bool:
    """Whether something becomes true; the limit is generous, since machines are busy."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
