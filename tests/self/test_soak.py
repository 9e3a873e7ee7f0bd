"""A soak says what leaks, and only that; one that was interrupted goes on where it was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moonep_validate.cases.case import Case
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.run import run_case
from moonep_validate.studies.leaks import LEAST, Series, leaks
from moonep_validate.studies.soak import Soak, begin, go_on
from tests.self.test_interrupts import eventually

Cli = Callable[..., tuple[int, str, str]]
LINES = [f"genB+R2+E4+K2+S4+pad4+seed{seed}" for seed in range(2)]
MB = 10**6
LEAKY = """
import os, tempfile, threading, time
import torch.distributed as dist
from moonep_validate.reference import moonep_b
from moonep_validate.reference.moonep_b import MoonEPCommPlan
KEPT, HERE = [], os.path.dirname(__file__)
class Buffer(moonep_b.Buffer):
    files = []
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if dist.get_rank() == 1:
            KEPT.append(bytes(200_000))
            self.files.append(open(tempfile.mkstemp(prefix="leaky", dir=HERE)[1]))
            threading.Thread(target=threading.Event().wait, name="leaky-thread", daemon=True).start()
            with open(f"/dev/shm/leaky-{os.getpid()}-{len(KEPT)}", "wb") as segment:
                segment.write(bytes(64))
"""


def series(subject: str, values: list[int]) -> Series:
    found = Series("rank 0 of 2")
    for number, value in enumerate(values):
        found.add(4 * (number + 1), {subject: (value, [f"file {n}" for n in range(value % 1000)])})
    return found


def test_what_grows_with_every_case_is_a_leak() -> None:
    (line,) = leaks(series("open files", [10 + n for n in range(50)]))
    assert line == (
        "leak: rank 0 of 2: open files: more with every case, at least 26, 32, 39, 46, 53 in five equal parts of "
        "132 cases; new: file 58, file 57, file 56"
    )
    (line,) = leaks(series("memory", [100 * MB + n * MB // 10 for n in range(50)]))
    assert "memory: more with every case, at least 101,600,000, 102,200,000" in line
    assert "bytes in five" in line
    # One in five cases, and a thread that comes and goes beside it.
    assert leaks(series("threads", [n // 3 + n % 2 for n in range(60)]))


@pytest.mark.parametrize(
    ("subject", "values"),
    {
        "flat": ("open files", [12] * 50),
        "comes and goes": ("open files", [12 + n % 5 for n in range(50)]),
        "a step": ("threads", [5] * 30 + [9] * 20),
        "warm-up only": ("memory", [100 * MB + min(n, 15) * 5 * MB for n in range(50)]),
        "levels off": ("memory", [100 * MB - 50 * MB * 9**n // 10**n for n in range(100)]),
        "fragments": ("memory", [100 * MB + n * 20_000 for n in range(50)]),
        "too short": ("open files", list(range(LEAST - 1))),
        "once freed": ("memory", [100 * MB + (n % 25) * MB for n in range(100)]),
    }.values(),
)
def test_what_does_not_is_none(subject: str, values: list[int]) -> None:
    assert leaks(series(subject, values)) == []


def test_no_false_alarm_in_a_thousand_right_processes() -> None:
    draw, alarms = random.Random(0), 0
    for _ in range(1000):
        # Each case needs another amount, above a floor that is reached late: 4 MB of noise, 20 MB of warm-up.
        floor = draw.randrange(20, 80)
        values = [100 * MB + 20 * MB * min(n, floor) // floor + draw.randrange(4 * MB) for n in range(floor * 4)]
        counts = [12 + (draw.random() < 0.2) for _ in values]
        alarms += len(leaks(Series("", list(range(len(values))), {"memory": values, "open files": counts})))
    assert alarms == 0


def test_each_leak_of_a_module_is_named_on_the_rank_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaky_moonep.py").write_text(LEAKY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job, soak = make_job(Options(moonep_module="leaky_moonep")), Soak(LINES)
    try:
        for verdict in go_on(soak, job, lambda case: run_case(job, case)[1], 1e6):
            assert verdict.status == "passed", verdict.diagnosis
            if soak.next == 4 * LEAST:
                break
        found = [line.partition(", at least")[0] for line in soak.leaks]
        assert [line for line in found if "rank" in line] == [
            "leak: rank 1 of 2: length of leaky_moonep.Buffer.files: more with every case",
            "leak: rank 1 of 2: length of leaky_moonep.KEPT: more with every case",
            "leak: rank 1 of 2: memory: more with every case",
            "leak: rank 1 of 2: open files: more with every case",
            "leak: rank 1 of 2: threads: more with every case",
        ]
        assert "leak: this machine: shared memory segments: more with every case" in found
        text = "\n".join(soak.leaks)
        assert f"new: {tmp_path}/leaky" in text
        assert "new: leaky-thread" in text
        assert "new: /dev/shm/leaky-" in text
        assert (soak.status, soak.unwatched, soak.statuses) == ("failed", [], {"passed": 4 * LEAST})
    finally:
        for segment in Path("/dev/shm").glob("leaky-*"):
            segment.unlink()


def test_a_soak_that_was_interrupted_goes_on_with_the_case_that_it_was_in() -> None:
    seen: list[Case] = []

    def judge(case: Case) -> Verdict:
        seen.append(case)
        if len(seen) == 8:
            raise KeyboardInterrupt
        return Verdict(case, {}, [], vacuous=["nothing ran"])

    soak = begin(Job(world="processes"), 7, None)
    with pytest.raises(KeyboardInterrupt):
        list(go_on(soak, Job(world="processes"), judge, 60.0))
    assert (soak.next, soak.statuses) == (7, {"vacuous": 7})
    for _ in go_on(soak, Job(world="processes"), judge, 60.0):
        if soak.next == 90:
            break
    assert seen[7] == seen[8]  # that which was interrupted, again
    again = begin(Job(world="processes"), 7, None)
    assert seen[:7] + seen[8:] == [again.case(number) for number in range(90)]
    assert soak.statuses == {"vacuous": 90}
    # A later round has the same cases with other data.
    assert again.case(0) != again.case(40) == again.case(0).but(seed=(again.case(0).seed + 1) % 2**16)
    assert {case.R for case in seen} == {2, 4}
    assert again.status == "vacuous"
    assert again.unwatched == [f"rank {rank} of {size}" for size in (2, 4) for rank in range(size)]
    assert begin(Job(world="processes"), 8, 3).cases != begin(Job(world="processes"), 9, 3).cases


def test_sigterm_keeps_a_soak_and_resume_takes_it_up(tmp_path: Path, cli: Cli) -> None:
    out, state = tmp_path / "out", tmp_path / "out" / "soak.json"
    command = [sys.executable, "-m", "moonep_validate", "run", "--soak", "10m", "--ranks", "2", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as run:
        assert eventually(lambda: state.exists() and json.loads(state.read_text())["soak"]["next"] > 0)
        run.send_signal(signal.SIGTERM)
        said, _ = run.communicate(timeout=100)
    assert run.returncode == 2
    assert f"go on with: moonep-validate run --resume {out}" in said.replace("\n", "")
    data = json.loads(state.read_text())
    done = data["soak"]["next"]
    assert (data["status"], done) == ("incomplete", sum(data["soak"]["statuses"].values()))
    data["seconds"] = data["soak"]["spent"] + 0.01
    state.write_text(json.dumps(data))
    code, said, _ = cli("run", "--resume", str(out))
    assert code == 10, said
    assert f", from case {done} on" in said
    assert f"vacuous: {done + 1} cases" in said
    assert "watched too short to tell a leak, 100 cases at least: rank 0 of 2, rank 1 of 2" in said
    after = json.loads(state.read_text())
    assert (after["soak"]["next"], after["status"]) == (done + 1, "vacuous")
    assert after["soak"]["cases"] == data["soak"]["cases"]
    code, _, error = cli("run", "--soak", "10m", "--out", str(out))
    assert (code, f"go on with --resume {out}" in error.replace("\n", "")) == (4, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--soak", "10x"], "--soak is '10x'; it must be a time: 90s, 10m or 8h"),
        (["--soak", "0"], "--soak is '0'; it must be a time"),
        (["--soak", "1m", "--case", LINES[0]], "leave --case out"),
        (["--soak", "1m", "--world", "threads"], "leave --world threads out"),
        (["--resume", "nowhere"], "nowhere/soak.json is no soak that can go on: FileNotFoundError"),
        (["--resume", "nowhere", "--ranks", "2"], "leave --ranks out"),
        (["--resume", "nowhere", "--soak", "1m"], "--resume nowhere has its own --soak and --out"),
    ],
)
def test_what_a_soak_does_not_take_is_said(cli: Cli, options: list[str], message: str) -> None:
    code, _, error = cli("run", *options)
    assert code == 4
    assert message in error
