"""Nothing hangs, and the report says why: one rank of four misbehaves, and one sentence names it and the place."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moonep_validate.cases.case import Case
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.run import run_case
from moonep_validate.trace.trace import Trace
from moonep_validate.worlds import flight, processes
from moonep_validate.worlds.autopsy import Rank, autopsy, diagnosis
from moonep_validate.worlds.flight import Flight, Record, phases, read

CASE = Case.parse("genB+R4+E8+K2+S5+pad4+hot:1")
HEAD = """
import os, signal, time
import torch
import torch.distributed as dist
from moonep_validate.reference import moonep_b
from moonep_validate.reference.moonep_b import MoonEPCommPlan
__version__ = "9.9"
class Buffer(moonep_b.Buffer):
    def combine(self, *args, **kwargs):
        if self.rank == 3:
            self.misbehave()
        return self.go_on(*args, **kwargs)
    def go_on(self, *args, **kwargs):
        return super().combine(*args, **kwargs)
    def misbehave(self):
        pass
"""
WAIT = r"ranks 0, 1, 2 wait in \w+ #\d+ \(collective #\d+\)"
#: Text of the module -> status, and what its diagnosis must say.
BAD = {
    "sleeps": (
        "    def misbehave(self):\n        time.sleep(600)\n",
        "hung",
        r"rank 3 never entered \w+ #\d+ \(collective #\d+\); ranks 0, 1, 2 wait in it; "
        r"rank 3 is in combine of step base at bad_sleeps.py:\d+ in misbehave",
    ),
    "is_killed": (
        "    def misbehave(self):\n        os.kill(os.getpid(), signal.SIGKILL)\n",
        "failed",
        r"rank 3 ended with signal 9 \(SIGKILL\) in combine of step base",
    ),
    "raises": (
        "    def misbehave(self):\n        raise ValueError('row 7 is bad')\n",
        "failed",
        rf"rank 3 raised ValueError: row 7 is bad in combine of step base; {WAIT}",
    ),
    "skips": (
        "    def go_on(self, plan, rows, weights=None, **k):\n"
        "        if self.rank != 3:\n            dist.barrier()\n"
        "        return super().combine(plan, rows, weights, **k)\n",
        "hung",
        r"rank 3 (waits in \w+ #\d+ \(collective #\d+\)|never entered barrier #\d+)",
    ),
    "another_order": (
        "    def go_on(self, *a, **k):\n"
        "        calls = [dist.barrier, lambda: dist.all_reduce(torch.ones(3))]\n"
        "        for call in calls[::-1] if self.rank == 3 else calls:\n            call()\n"
        "        return super().combine(*a, **k)\n",
        None,
        r"rank 3.*all_reduce #1 \(collective #\d+\)",
    ),
    "no_memory": (
        "    def misbehave(self):\n        bytearray(2**60)\n",
        "failed",
        rf"out of memory on rank 3 in combine of step base: MemoryError: ?; {WAIT}",
    ),
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Job]]:
    """Write a module, and make the job that judges it; all in one folder, so that a sound pool is used again."""
    folder = tmp_path_factory.mktemp("modules")
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)

    def write(name: str, body: str, device: str = "cpu") -> Job:
        (folder / f"{name}.py").write_text(HEAD + body)
        return replace(
            make_job(Options(moonep_module=name, api="B", deadline=1.5, device=device)), first_deadline=20.0
        )

    yield write
    patch.undo()
    processes.close_pools()


@pytest.fixture(scope="module")
def good(make: Callable[..., Job]) -> Job:
    return make("good", "")


@pytest.mark.parametrize("name", BAD)
def test_one_of_four_ranks_misbehaves_and_the_next_case_passes(
    name: str, make: Callable[..., Job], good: Job, tmp_path: Path
) -> None:
    body, status, says = BAD[name]
    job = make(f"bad_{name}", body)
    assert run_case(good, CASE)[1].ok  # the key is no longer new: from here on the short deadline counts
    trace, verdict = run_case(job, CASE)
    assert verdict.first is not None
    assert (verdict.first.stage, verdict.first.check) == ("combine", "F1"), verdict.diagnosis
    assert status in (None, verdict.status), verdict.diagnosis
    assert re.search(says, trace.autopsy["diagnosis"]), trace.autopsy["diagnosis"]
    assert str(verdict.first.findings[0]).endswith(trace.autopsy["diagnosis"])
    assert trace.autopsy["diagnosis"] in verdict.diagnosis
    trace.save(tmp_path / "trace")
    assert Trace.load(tmp_path / "trace").autopsy == trace.autopsy
    told = json.loads(json.dumps(verdict.to_json()))["autopsy"]
    assert [one["rank"] for one in told["ranks"]] == [0, 1, 2, 3]
    assert all(one["log"] for one in told["ranks"])
    assert told["ranks"][3]["completed"] == "experts of step base"
    if name == "sleeps":
        assert told["silent"] == 1.5
        assert "in misbehave" in told["ranks"][3]["stack"]
        assert all("in combine" in one["stack"] for one in told["ranks"][:3])
    assert run_case(good, CASE)[1].ok


@pytest.mark.multigpu
def test_a_device_side_assert_poisons_one_context_and_the_next_case_passes(make: Callable[..., Job]) -> None:
    body = (
        "    def go_on(self, *a, **k):\n"
        "        if self.rank == 1:\n"
        "            torch.zeros(3, device='cuda')[torch.tensor([7], device='cuda')].add_(1)\n"
        "            torch.cuda.synchronize()\n"
        "        return super().combine(*a, **k)\n"
    )
    job, case = make("bad_assert", body, "cuda"), Case.parse("genB+R2+E4+K2+S5+pad4+hot:1")
    trace, verdict = run_case(job, case)
    assert verdict.status == "failed", verdict.diagnosis
    assert "CUDA device-side assert on rank 1 in combine of step base" in trace.autopsy["diagnosis"]
    assert run_case(make("good_on_cuda", "", "cuda"), case)[1].ok


def records(*entries: tuple[str, str, str]) -> list[Record]:
    """(kind, op, name) -> a log; collectives are numbered."""
    found, number = [], 0
    for seconds, (kind, op, name) in enumerate(entries):
        number += kind == flight.ENTER
        counted = number if kind in (flight.ENTER, flight.LEAVE) else 0
        found.append(Record(float(seconds), kind, counted, "base" if op else "", op, name))
    return found


STARTED = (
    ("case", "", "genB"),
    ("call", "dispatch", ""),
    ("enter", "dispatch", "rows"),
    ("leave", "dispatch", "rows"),
)
WAITS = records(*STARTED, ("enter", "dispatch", "rows"))


def test_diagnoses_of_logs() -> None:
    busy = Rank(
        records(*STARTED),
        stack='  File "/x/moonep/buffer.py", line 31 in spin\n  File "/y/moonep_validate/pipeline/worker.py", line 2 in m',
    )
    said = "rank 2 never entered rows #2 (collective #2); ranks 0, 1 wait in it; "
    assert (
        diagnosis([Rank(WAITS), Rank(WAITS), busy])
        == said + "rank 2 is in dispatch of step base at buffer.py:31 in spin"
    )
    over = Rank(records(*STARTED, ("return", "dispatch", ""), ("done", "", "")))
    assert diagnosis([Rank(WAITS), Rank(WAITS), over]) == said + "rank 2 has finished"
    other = Rank(records(*STARTED, ("enter", "dispatch", "plan")))
    assert diagnosis([Rank(WAITS), other]) == (
        "ranks are in different collectives: rank 0 waits in rows #2 (collective #2); "
        "rank 1 waits in plan #1 (collective #2)"
    )
    killed = Rank(records(*STARTED), ended=-9)
    assert diagnosis([Rank(WAITS), killed]) == (
        "rank 1 ended with signal 9 (SIGKILL) in dispatch of step base; rank 0 waits in rows #2 (collective #2)"
    )
    assert diagnosis([Rank(WAITS), Rank(records(*STARTED), ended=3)]).startswith(
        "rank 1 ended with exit code 3 in"
    )
    cuda = "AcceleratorError: CUDA error: device-side assert triggered"
    poisoned = Rank(records(*STARTED, ("raised", "dispatch", cuda), ("raised", "", cuda)))
    assert diagnosis([poisoned, Rank(WAITS)]) == (
        "CUDA device-side assert on rank 0 in dispatch of step base: its context is poisoned; "
        "rank 1 waits in rows #2 (collective #2)"
    )
    full = Rank(records(*STARTED, ("raised", "dispatch", "OutOfMemoryError: CUDA out of memory. Tried 2 GiB")))
    assert diagnosis([full]).startswith("out of memory on rank 0 in dispatch of step base: OutOfMemoryError")
    assert diagnosis([Rank(WAITS), Rank(WAITS)]) == (
        "all ranks wait in rows #2 (collective #2): it was entered by all, and does not complete"
    )
    assert diagnosis([busy]) == "rank 0 is in dispatch of step base at buffer.py:31 in spin"
    assert diagnosis([]) == "no rank left a sign"


def test_a_peer_that_only_lost_its_connection_is_not_the_cause() -> None:
    lost = Rank(records(*STARTED, ("raised", "dispatch", "RuntimeError: Connection closed by peer [::1]:7")))
    killed = Rank(records(*STARTED), ended=-9)
    assert diagnosis([lost, killed]).startswith("rank 1 ended with signal 9")


def test_an_exception_that_was_caught_is_no_end() -> None:
    caught = Rank(records(*STARTED, ("raised", "dispatch", "ValueError: refused"), ("call", "combine", "")))
    assert caught.raised == ""
    assert diagnosis([caught]) == "rank 0 is in combine of step base"


def test_the_ring_keeps_the_last_records_of_a_case_and_survives_a_kill(tmp_path: Path) -> None:
    path, child = tmp_path / "flight", os.fork()
    if child == 0:
        log = Flight(path)
        log.begin("one")
        log.tell("base", "dispatch", False)
        log.begin("two")
        log.tell("base", "dispatch", False)
        with log.collective("rows"), log.collective("inner"):
            pass
        log.tell("base", "dispatch", True)
        log.tell("base", "combine" * 9, False)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    found = read(path)
    assert [(r.kind, r.number, r.op, r.name) for r in found[:4]] == [
        ("case", 0, "", "two"),
        ("call", 0, "dispatch", ""),
        ("enter", 1, "dispatch", "rows"),
        ("leave", 1, "dispatch", "rows"),
    ]
    assert phases(found) == [["base", "dispatch", True], ["base", ("combine" * 9)[:24], False]]
    assert read(tmp_path / "absent") == []
    log = Flight(path)
    log.begin("three")
    for number in range(flight._CAPACITY + 5):
        log.note("enter", f"c{number}", number + 1)
    assert len(read(path)) == flight._CAPACITY
    assert read(path)[-1].name == f"c{flight._CAPACITY + 4}"


def test_an_autopsy_is_json_and_keeps_the_last_lines() -> None:
    ranks = [Rank(records(*STARTED * 20, ("enter", "dispatch", "rows")))]
    data = json.loads(json.dumps(autopsy(ranks, 2.0)))
    assert data["silent"] == 2.0
    assert len(data["ranks"][0]["log"]) == 20
    assert data["ranks"][0]["log"][-1] == "  80.000 s  enter  rows (collective #21) in dispatch of step base"
