"""A run that is told to end, or killed, leaves a report that says so, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonep_validate.doors import interrupts
from moonep_validate.doors.report.files import OutputFolder
from moonep_validate.doors.report.summary import Summary
from moonep_validate.worlds import descendants

SIZES = "genB+R2+E4+K2+S3+H8+I8"
Cli = Callable[..., tuple[int, str, str]]


def eventually(true: Callable[[], object], seconds: float = 100.0) -> bool:
    """Whether something becomes true; the limit is generous, since machines are busy."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def report(out: Path) -> dict[str, Any]:
    path = out / "report.json"
    return json.loads(path.read_text()) if path.exists() else {"cases": []}


def start(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    """A run with two cases on workers, whose temporary folders are in ``tmp``; the second case never ends."""
    (tmp_path / "tmp").mkdir()
    cases = ["--case", f"{SIZES}+combine_only", "--case", f"{SIZES}+hot:0"]
    fault = ["--world", "processes", "--fault", "rank-never-returns", "--deadline", "1000"]
    command = [sys.executable, "-m", "moonep_validate", "run", *cases, *fault, "--out", str(tmp_path / "out")]
    return subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )


def workers(pid: int) -> list[int]:
    return [child for child, text in descendants.children(pid).items() if "pipeline.worker" in text]


def stuck(tmp_path: Path, run: subprocess.Popen[str]) -> list[int]:
    """Wait until the workers are in the case that does not end; their ids."""
    assert eventually(lambda: len(workers(run.pid)) == 2 and len(list((tmp_path / "tmp").glob("*/flight1"))) == 1)
    logs = (tmp_path / "tmp").glob("*/flight1")
    log = next(iter(logs))
    assert eventually(lambda: b"combine" in log.read_bytes())
    return workers(run.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_run_like_ctrl_c(tmp_path: Path, number: signal.Signals) -> None:
    with start(tmp_path) as run:
        pids = stuck(tmp_path, run)
        before = report(tmp_path / "out")
        assert (before["status"], before["exit_code"], before["interrupted"]) == ("incomplete", 2, False)
        run.send_signal(number)
        run.send_signal(number)  # impatience gives no traceback
        said, _ = run.communicate(timeout=100)
    assert run.returncode == 2, said
    assert "interrupted" in said
    assert "Traceback" not in said
    assert "exit code 2" in said
    after = report(tmp_path / "out")
    assert (after["status"], after["exit_code"], after["interrupted"]) == ("incomplete", 2, True)
    assert after["planned"] == 2
    assert not any(map(descendants.lives, pids))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_run_that_is_killed_is_incomplete_and_leaves_nothing(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        pids = stuck(tmp_path, run)
        run.kill()
        run.communicate(timeout=100)
    after = report(tmp_path / "out")
    assert (after["status"], after["exit_code"]) == ("incomplete", 2)
    assert eventually(lambda: not any(map(descendants.lives, pids)))
    assert eventually(lambda: list((tmp_path / "tmp").iterdir()) == [])


def test_ctrl_c_before_any_case_is_exit_code_2(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("moonep_validate.cases.case.Case.parse", interrupted)
    code, out, err = cli("run", "--case", SIZES)
    assert code == 2
    assert "Traceback" not in out + err


def test_signals_are_one_until_the_end_has_begun() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with interrupts.as_one():
        for number in interrupts.SIGNALS:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        assert interrupts.told()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        interrupts.ending()
        for number in interrupts.SIGNALS:
            signal.raise_signal(number)
        interrupts.check()
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts.as_one():
            signal.raise_signal(signal.SIGHUP)
        assert not interrupts.told()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_two_runs_do_not_share_a_folder(tmp_path: Path, cli: Cli) -> None:
    first = OutputFolder(tmp_path)
    code, _, err = cli("run", "--case", SIZES, "--out", str(tmp_path))
    assert code == 4
    assert "another run writes to it; give each run a folder of its own" in err
    del first
    assert cli("run", "--case", SIZES, "--out", str(tmp_path))[0] == 0


def test_a_folder_that_is_used_again_loses_only_what_a_run_left(tmp_path: Path, cli: Cli) -> None:
    run = ("run", "--case", SIZES, "--keep", "all", "--out", str(tmp_path))
    (tmp_path / "notes.txt").write_text("mine")
    assert cli(*run)[0] == 0
    (kept,) = (tmp_path / "traces").iterdir()
    (tmp_path / "traces" / "left.part").write_bytes(b"half")
    assert cli(*run[:3], *run[5:])[0] == 0
    assert not kept.exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert list((tmp_path / "traces").iterdir()) == []
    (tmp_path / "traces" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    code, _, err = cli(*run)
    assert code == 4
    assert "traces/model.safetensors was not written by a run, and stays; give another folder" in err
    assert report(tmp_path)["status"] == "passed"


@pytest.mark.parametrize("text", ['{"tests": 3}', "[1]", "no json"])
def test_a_report_of_another_tool_is_not_overwritten(tmp_path: Path, cli: Cli, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    code, _, err = cli("run", "--case", SIZES, "--out", str(tmp_path))
    assert code == 4
    assert "report.json was not written by a run" in err
    assert (tmp_path / "report.json").read_text() == text


def test_a_report_is_incomplete_until_the_run_has_ended(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    assert (report(tmp_path)["status"], report(tmp_path)["exit_code"]) == ("incomplete", 2)
    folder.write_report(Summary(1, ended=True), "reference")
    assert (report(tmp_path)["status"], report(tmp_path)["exit_code"]) == ("not_run", 5)
