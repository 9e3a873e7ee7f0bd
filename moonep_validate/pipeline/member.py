"""What does a rank of torchrun's job do? Its part of each case that rank 0 names, until that says something else.

Ranks other than 0 do it in the process that torchrun started. On rank 0 that process judges, so it imports no code
from outside: its child is the rank (``main``), and answers it over a connection that is read within limits.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import Any

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.selection import buffer_key
from moonep_validate.pipeline.worker import record_rank
from moonep_validate.worlds import first, torchrun
from moonep_validate.worlds.autopsy import Rank
from moonep_validate.worlds.descendants import stopped
from moonep_validate.worlds.dist import DistComm
from moonep_validate.worlds.flight import Logged, finish
from moonep_validate.worlds.place import Place, place

_SIGN_SECONDS = 1.0
#: A leader that was stopped for so long does not come back by itself.
_STOPPED_SECONDS = 60.0


class Member:
    """One rank; collective.

    Args:
        here: its place.
        device: ``cpu`` or ``cuda``.
        alike: what must be the same on every rank, by name.

    Raises:
        CaseError: on every rank, if they were started differently.
    """

    def __init__(self, here: Place, device: str, alike: dict[str, str]) -> None:
        self.world = torchrun.World(here, device)
        self._keys: set[object] = set()
        for what, value in alike.items():
            self.world.same(what, value)

    def part(self, job: Job, case: Case) -> list[bytes]:
        """Record this rank's part of a case; returns those of all ranks on rank 0."""
        key = buffer_key(case)
        limit = job.deadline if key in self._keys else job.deadline_at_first
        self._keys.add(key)
        with self.world.watched(limit):
            comm = Logged(DistComm(), self.world.flight)
            trace, failed = record_rank(job, case, comm)
            if job.target.kind.embedded and not failed:
                try:
                    finish(comm)
                except RuntimeError as error:
                    trace.errors.append(f"this rank had finished, and its peers had not: {error}")
            with self.world.hurried(failed and not job.target.kind.embedded):
                return self.world.gather(trace.to_bytes(sealed=False))
        raise AssertionError("a lost world has ended this process")

    def serve(self) -> tuple[str, Any]:
        """Take part in cases until rank 0 says something else."""
        while True:
            kind, *values = self.world.share(None)
            if kind != "record":
                return kind, values[0]
            self.part(Job.from_json(values[0]), Case.parse(values[1]))


def alike(job: Job, cases: Sequence[Case]) -> dict[str, str]:
    """What all ranks must have been started with."""
    parts = {stage: (part.package, part.version) for stage, part in job.subject.parts.items()}
    return {
        "job": json.dumps([job.reproducer, job.deadline, parts]),
        "list of cases": json.dumps([str(case) for case in cases]),
    }


def main() -> None:
    """Be rank 0 for the process that torchrun started, until that says that all is over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader says what an interrupted run has found
    near = first.Near([int(number) for number in sys.argv[1].split(",")])
    request, here = json.loads(near.receive()), place()
    assert here is not None
    threading.Thread(target=_give_signs, args=(near, os.getppid()), daemon=True).start()
    try:
        member = Member(here, request["device"], request["alike"])
    except (CaseError, RuntimeError) as error:
        near.send(first.REFUSED, json.dumps([isinstance(error, CaseError), str(error)]).encode())
        os._exit(first.NEVER)
    member.world.on_lost = lambda ranks, silent, why: near.lost(_told(ranks), silent, why)
    near.send(first.FINE, str(member.world.folder).encode())
    while True:
        kind, *values = pickle.loads(near.receive())  # the leader's own, never the other way
        if kind == "end":
            member.world.end()
            near.send(first.FINE, b"")
            os._exit(0)
        member.world.share((kind, *values))
        parts = member.part(Job.from_json(values[0]), Case.parse(values[1])) if kind == "record" else []
        near.send(first.FINE, first.packed(parts))


def _told(ranks: Sequence[Rank]) -> list[dict[str, Any]]:
    return [
        {
            "records": [astuple(record) for record in rank.records],
            "ended": rank.ended,
            "stack": rank.stack,
            "native": rank.native,
            "problem": rank.problem,
        }
        for rank in ranks
    ]


def _give_signs(near: first.Near, leader: int) -> None:
    """Say once a second that this process runs; and end a leader that was stopped, which torchrun waits for."""
    since = time.monotonic()
    while True:
        with suppress(OSError):
            near.send(first.ALIVE, b"")
        if not stopped(leader):
            since = time.monotonic()
        elif time.monotonic() - since > _STOPPED_SECONDS:
            sys.stderr.write(
                f"moonep-validate: the process that judges (pid {leader}) has been stopped for "
                f"{_STOPPED_SECONDS:g} s: it is ended, without a verdict\n"
            )
            os.kill(leader, signal.SIGKILL)
        time.sleep(_SIGN_SECONDS)
