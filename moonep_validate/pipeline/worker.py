"""What runs in a worker process? A loop: read a job, run this rank's part, send its calls back as bytes.

Started by worlds/child.py with RANK SIZE FOLDER CONNECTIONS: descriptors, to the pool and then to other ranks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moonep_validate.cases.case import Case
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.record import open_trace, rank_main
from moonep_validate.pipeline.target import Engine
from moonep_validate.pipeline.words import tampered, used, words
from moonep_validate.subjects.engines import start as engines
from moonep_validate.trace.recording import Recording
from moonep_validate.trace.trace import Recorder, Trace, described
from moonep_validate.worlds import held, launch, wire
from moonep_validate.worlds.comm import CollectiveError
from moonep_validate.worlds.flight import DONE, Flight, Logged, tell_peers, watch_torch
from moonep_validate.worlds.local import LocalComm, Star

#: Longer than any deadline of a case: the pool, not gloo, decides that a case hangs, and says where.
_GLOO_SECONDS = 3600


def main() -> None:
    """Serve jobs until the pool closes the connection."""
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    descriptors = [int(number) for number in sys.argv[4].split(",")]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # what a module starts shall not hold our connections
    launch.adopt_orphans()
    with (folder / f"stack{rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        torch.set_num_threads(1)  # as many ranks as cores already; and sums keep one order
        pool, star = socket.socket(fileno=descriptors[0]), Star(rank, descriptors[1:])
        flight = Flight(folder / f"flight{rank}")
        _join(rank, size, folder)
        watch_torch(flight)
        wire.send(pool, 0, wire.FINE, json.dumps(launch.identity()).encode())
        while True:
            try:
                number, _, request = wire.receive(pool)
            except (EOFError, OSError):
                os._exit(0)  # at once: what an engine does at exit may wait for peers that are gone
            failed, answer = _answer(request, flight, star)
            wire.send(pool, number, wire.RAISED if failed else wire.FINE, answer)


def _join(rank: int, size: int, folder: Path) -> None:
    """Become a rank of the pool's process group."""
    on_gpus = os.environ.get(engines.DEVICE) == "cuda"
    if on_gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_GLOO_SECONDS),
    )


def _answer(request: bytes, flight: Flight, star: Star) -> tuple[bool, bytes]:
    """Whether this rank failed, and what it has to say."""
    message = json.loads(request)
    if "start" in message:
        answer = engines.start(message["start"], dist.get_rank(), dist.get_world_size(), message["device"])
        return "error" in answer, json.dumps(answer).encode()
    if "reset" in message:
        engines.reset(message["reset"])
        dist.barrier()  # a rank that is done sooner must not begin the next case beside one that still closes
        return False, b""
    if "held" in message:
        return False, json.dumps(held.own(message["held"])).encode()
    job, case = Job.from_json(message["job"]), Case.parse(message["case"])
    trace, failed = record_rank(job, case, Logged(LocalComm(star), flight))
    return failed, trace.to_bytes(sealed=False)


def record_rank(job: Job, case: Case, comm: Logged) -> tuple[Trace, bool]:
    """This rank's part of a case, as a trace of one rank, and whether the rank raised; peers are told of that."""
    flight, trace, failed = comm.flight, open_trace(job, case), False
    flight.begin(str(case))
    if isinstance(job.target, Engine) and (reason := engines.refusal(job.target.name, case)):
        trace.not_run, trace.calls = reason, [[]]
        flight.note(DONE)
        return trace, False
    recorder, before = Recorder(flight.tell, Recording.parse(job.recording)), used()
    try:
        trace.relations = rank_main(job, case, comm, recorder)
        flight.note(DONE)
    except (Exception, SystemExit) as error:
        flight.raised(error)
        failed = True
        if job.target.kind.embedded and not isinstance(error, CollectiveError):
            tell_peers(comm, error)
        if not any(call.error for call in recorder.calls):
            trace.errors.append("{type}: {message} ({where})".format(**described(error)))
    trace.calls, trace.said = [recorder.calls], words(job, before)
    trace.errors += tampered(job)
    return trace, failed
