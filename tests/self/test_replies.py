"""A worker may say anything, or nothing: that is one finding on its rank, and the next case runs on a new pool."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonep_validate.cases.case import Case
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.record import record
from moonep_validate.pipeline.run import run_case
from moonep_validate.trace.trace import Trace
from moonep_validate.worlds import child, descendants, flight, launch, processes, wire
from moonep_validate.worlds.flight import Flight, read
from moonep_validate.worlds.wire import BadFrame, Inbox, Tail

CASE = Case.parse("genB+R2+E4+K2+S3+pad4+hot:1")
#: A worker without torch: it answers with what the test recorded before, and rank 1 does what BAD says.
WORKER = """
import ctypes, json, os, signal, socket, subprocess, sys, time
from pathlib import Path
from moonep_validate.worlds import launch, wire
from moonep_validate.worlds.flight import Flight, DONE
import faulthandler

def frame(number, kind, body):
    return wire.HEAD.pack(wire.MARK, number, kind, len(body)) + body

def main():
    rank, folder, control = int(sys.argv[1]), Path(sys.argv[3]), int(sys.argv[4].split(",")[0])
    for number in map(int, sys.argv[4].split(",")):
        os.set_inheritable(number, False)
    launch.adopt_orphans()
    stack = (folder / f"stack{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    log, pool = Flight(folder / f"flight{rank}"), socket.socket(fileno=control)
    wire.send(pool, 0, wire.FINE, json.dumps(launch.identity()).encode())
    while True:
        number, _, request = wire.receive(pool)
        here = Path(__file__).parent
        log.begin("a case")
        log.tell("base", "combine", False)
        if rank == 1:
            exec((here / "inside").read_text())
        log.tell("base", "combine", True)
        log.note(DONE)
        data = frame(number, wire.FINE, (here / f"part{rank}").read_bytes())
        if rank == 1:
            data = eval((here / "answer").read_text())
        pool.sendall(data)
"""
HEAD_BYTES = wire.HEAD.size
#: name -> what rank 1 does in its call, what it sends in place of ``data``, status of the case, what is said.
BAD = {
    "four_bytes": ("", "data[:4]", "failed", "its reply stops after 4 bytes"),
    "half": ("", f"data[:{HEAD_BYTES} + 50]", "failed", r"its reply stops after 50 of \d+ bytes"),
    "garbage": ("", "b'x' * 100", "failed", "it begins with b'xxxxxxxxxxxxxxxx', and is no frame"),
    "huge": (
        "",
        "wire.HEAD.pack(wire.MARK, number, b'F', 2**60)",
        "failed",
        f"it would have {2**60} bytes; at most {2**35} are read",
    ),
    "longer": ("", "data + b'more'", "failed", r"4 bytes follow on its \d+"),
    "twice": ("", "data * 2", "failed", r"\d+ bytes follow on its \d+"),
    "of_another_request": ("", "frame(number + 1, b'F', b'')", "failed", r"it answers request \d+, and request"),
    "no_json": ("", f"data[:{HEAD_BYTES} + 20] + b'\\xff' + data[{HEAD_BYTES} + 21:]", "failed", "cannot be read"),
    "empty": ("", "frame(number, b'F', b'')", "failed", "its reply cannot be read"),
    "of_another_case": (
        "",
        "frame(number, b'F', (here / 'other').read_bytes())",
        "failed",
        "it is of another case",
    ),
    "closes": ("pool.close(); signal.pause()", "data", "failed", "it closed its connection and goes on"),
    "speaks_early": ("pool.sendall(b'hello')", "data", "failed", "it begins with b'hello"),
    "is_silent": ("", "time.sleep(600)", "hung", "end call of step case at rank 1: .* no return after 1"),
    "before_its_case": ("log.begin('x'); time.sleep(600)", "data", "hung", "begin call of step case at rank 1"),
    "overwrites_its_record": (
        "log._map[:] = b'\\xee' * len(log._map); os.kill(os.getpid(), signal.SIGKILL)",
        "data",
        "failed",
        r"ended with signal 9 \(SIGKILL\) in an unknown place, since its flight record was written over",
    ),
    "keeps_the_gil": (
        "mask = (ctypes.c_ulong * 16)(*[2**64 - 1] * 16); lib = ctypes.PyDLL(None)\n"
        "lib.sigprocmask(0, mask, None)\n"
        "while True: lib.sleep(600)",
        "data",
        "hung",
        "rank 1 is in combine of step base",
    ),
    "leaves_a_child": (
        "subprocess.Popen(['sleep', '1000'])",
        "data",
        "failed",
        r"end call of step case at rank 1: .*1 process that it started still ran: \d+ \(sleep 1000\)",
    ),
    "leaves_an_orphan": (
        "subprocess.run(['setsid', 'sh', '-c', 'sleep 1001 &'])",
        "data",
        "failed",
        r"1 process that it started still ran: \d+ \(sleep 1001\)",
    ),
    "dies_and_leaves_a_child": (
        "subprocess.Popen(['sleep', '1002']); os._exit(3)",
        "data",
        "failed",
        r"1 process that it started still ran: \d+ \(sleep 1002\)",
    ),
}


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Put the worker in place, and say what its rank 1 does."""
    processes.close_pools()
    (tmp_path / "hostile_worker.py").write_text(WORKER)
    for name, case in {"part": CASE, "other": CASE.but(seed=1)}.items():
        trace = record(make_job(), case)
        for rank in range(case.R):
            part = Trace.from_bytes(trace.to_bytes(), "it")
            part.calls = [trace.calls[rank]]
            (tmp_path / (f"part{rank}" if name == "part" else name)).write_bytes(part.to_bytes(sealed=False))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(child, "WORKER", "hostile_worker")

    def does(inside: str, answer: str) -> None:
        (tmp_path / "inside").write_text(inside)
        (tmp_path / "answer").write_text(answer)

    yield does
    processes.close_pools()


def said(verdict: Verdict) -> str:
    """All findings of F1."""
    return "\n".join(str(f) for r in verdict.results if r.check == "F1" for f in r.findings)


@pytest.mark.parametrize("name", BAD)
def test_whatever_a_rank_answers_is_a_finding_on_it_and_the_next_case_passes(
    name: str, worker: Callable[[str, str], None], tmp_path: Path
) -> None:
    inside, answer, status, says = BAD[name]
    job = make_job(Options(world="processes", deadline=1.0))
    worker("", "data")
    assert run_case(job, CASE)[1].ok  # the key is no longer new: from here on the short deadline counts
    worker(inside, answer)
    trace, verdict = run_case(job, CASE)
    assert verdict.status == status, verdict.diagnosis
    assert not verdict.errors
    assert re.search(says, said(verdict)), verdict.diagnosis
    assert verdict.first is not None
    assert verdict.first.check == "F1"
    assert verdict.first.findings[-1].place == {"rank": 1}, verdict.diagnosis
    trace.save(tmp_path / "trace")
    assert Trace.load(tmp_path / "trace").digest() == trace.digest()
    for number in re.findall(r"(\d+) \(sleep \d+\)", said(verdict)):
        assert not descendants.lives(int(number)), number
    worker("", "data")
    assert run_case(job, CASE)[1].ok


def test_what_a_worker_prints_costs_the_judge_nothing(worker: Callable[[str, str], None]) -> None:
    worker("for _ in range(400): os.write(1, b'x' * 2**20)\nos.write(1, b'\\nthe end\\n')", "b'?' * 20")
    trace, _ = run_case(make_job(Options(world="processes")), CASE)
    told = trace.autopsy["ranks"][1]["output"]
    assert told.endswith("the end")
    assert len(told) <= 2**16 + 10


def test_another_copy_of_the_package_in_a_worker_is_refused(
    worker: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker("", "data")
    ours = launch.identity()
    monkeypatch.setattr(launch, "identity", lambda: {**ours, "folder": "/elsewhere", "files": "0123"})
    trace, verdict = run_case(make_job(Options(world="processes")), CASE)
    assert verdict.status == "error"
    assert f"it runs moonep_validate {ours['version']} of {ours['folder']} (files {ours['files']})" in str(
        trace.errors
    )
    assert "and this process runs moonep_validate" in str(trace.errors)
    assert "of /elsewhere (files 0123)" in str(trace.errors)


def test_a_changed_copy_in_the_current_folder_is_not_run(tmp_path: Path) -> None:
    changed = tmp_path / "moonep_validate"
    changed.mkdir()
    (changed / "__init__.py").write_text("raise SystemExit('the changed copy ran')\n")
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong random')\n")
    (tmp_path / "my_tool.py").write_text(
        "import random, moonep_validate\ndef main():\n    print(moonep_validate.__path__[0])\n"
    )
    script = (
        "import os, subprocess\nfrom moonep_validate.worlds import launch\n"
        f"os.chdir({str(tmp_path)!r})\nsubprocess.run(launch.command('my_tool'), check=True, timeout=100)\n"
    )
    # `-c` imports from the current folder first, and this one may hold a checkout beside the installed package.
    started = tmp_path / "started"
    started.mkdir()
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=started)
    assert done.stdout.strip() == str(launch.folder()), done


def test_a_long_folder_for_temporary_files_is_no_trouble(
    tmp_path: Path, worker: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 40)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    worker("", "data")
    assert run_case(make_job(Options(world="processes")), CASE)[1].ok
    processes.close_pools()
    assert list(long.iterdir()) == []


def test_a_full_disk_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, worker: Callable[[str, str], None]
) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    trace, verdict = run_case(make_job(Options(world="processes")), CASE)
    assert verdict.status == "error"
    assert re.search(r"could not run this case: .*No space left on device: '\S+flight0'", trace.errors[0])


def test_a_reply_is_read_as_it_comes() -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    inbox = Inbox(7)
    assert inbox.take(near) == 0
    whole = wire.HEAD.pack(wire.MARK, 7, wire.RAISED, 5) + b"hello"
    for index in range(len(whole)):
        assert not inbox.whole
        far.send(whole[index : index + 1])
        assert inbox.take(near) == 1
    assert (inbox.whole, inbox.kind, inbox.body, inbox.problem) == (True, wire.RAISED, b"hello", "")
    far.send(b"!")
    with pytest.raises(BadFrame, match="1 bytes follow on its 5"):
        inbox.take(near)
    far.close()
    with pytest.raises(EOFError):
        Inbox(8).take(near)
    near.close()


def test_only_the_end_of_an_output_is_kept() -> None:
    reader, writer = os.pipe()
    tail = Tail(reader)
    assert tail.text() == "no output"
    for number in range(30):
        os.write(writer, b"x" * 5000 + b"\nline %d \xff\n" % number)
        tail.take()
    assert tail.text().endswith("line 29 �")
    assert len(tail._data) == 2**16
    os.close(writer)
    tail.take()
    assert not tail.open
    tail.close()


@pytest.mark.parametrize("count", [2**63, 5000])
def test_a_damaged_flight_record_is_told_as_such(tmp_path: Path, count: int) -> None:
    log = Flight(tmp_path / "flight")
    log.begin("a \udc80 case")
    assert [record.name for record in read(tmp_path / "flight")] == ["a \\udc80 case"]
    log._map[flight._HEAD.size :] = b"\xee" * (len(log._map) - flight._HEAD.size)
    flight._HEAD.pack_into(log._map, 0, count, 1)
    assert [record.kind for record in read(tmp_path / "flight")] == [flight.DAMAGED]


def test_killing_this_process_leaves_no_worker_and_no_folder(tmp_path: Path) -> None:
    """By SIGKILL, while one rank keeps its interpreter and one has a child."""
    (tmp_path / "hostile_worker.py").write_text(WORKER)
    script = (
        "import time, json, sys\nfrom moonep_validate.worlds import child, processes\n"
        "child.WORKER = 'hostile_worker'\n"
        "pool = processes.Pool(2, {})\n"
        "print(json.dumps([pool.folder.name, *[w.pid for w in pool.workers]]), flush=True)\n"
        "pool.run(b'', 600)\n"
    )
    (tmp_path / "part0").write_bytes(b"")
    (tmp_path / "inside").write_text(
        "child = subprocess.Popen(['sleep', '1003']); (here / 'child').write_text(str(child.pid))\n"
        "ctypes.PyDLL(None).sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as main:
        assert main.stdout is not None
        folder, *pids = json.loads(main.stdout.readline())
        assert eventually(lambda: (tmp_path / "child").exists() and bool((tmp_path / "child").read_text()))
        pids.append(int((tmp_path / "child").read_text()))
        assert all(map(descendants.lives, pids))
        main.kill()
    assert eventually(lambda: not any(map(descendants.lives, pids))), pids
    assert eventually(lambda: not Path(folder).exists())


def eventually(true: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether something becomes true; the limit is generous, since machines are busy."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
