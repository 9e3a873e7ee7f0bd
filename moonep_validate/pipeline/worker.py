"""What runs in a worker process? A loop: read a job, run this rank's part, send its calls back as bytes.

Started by worlds/processes.py as ``python -m moonep_validate.pipeline.worker ADDRESS RANK SIZE FOLDER``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path

import torch
import torch.distributed as dist

from moonep_validate.cases.case import Case
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.record import open_trace, rank_main
from moonep_validate.subjects.engines import start as engines
from moonep_validate.trace.keep import Keep
from moonep_validate.trace.trace import Recorder, Trace, described
from moonep_validate.worlds.comm import CollectiveError
from moonep_validate.worlds.flight import DONE, Flight, Logged, tell_peers, watch_torch
from moonep_validate.worlds.local import LocalComm, Star

#: Longer than any deadline of a case: the pool, not gloo, decides that a case hangs, and says where.
_GLOO_SECONDS = 3600


def main() -> None:
    """Serve jobs until the pool closes the connection."""
    address, rank, size, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    with (folder / f"stack{rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        torch.set_num_threads(1)
        connection = Client(address, family="AF_UNIX")
        connection.send_bytes(str(rank).encode())
        flight = Flight(folder / f"flight{rank}")
        if os.environ.get(engines.DEVICE) == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if os.environ.get(engines.DEVICE) == "cuda" else "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_GLOO_SECONDS),
        )
        star = Star(folder, rank, size)
        watch_torch(flight)
        while True:
            try:
                request = connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)
            _serve(connection, request, flight, star)


def _serve(connection: Connection, request: bytes, flight: Flight, star: Star) -> None:
    message = json.loads(request)
    if "start" in message:
        answer = engines.start(message["start"], dist.get_rank(), dist.get_world_size(), message["device"])
        connection.send_bytes(b"R" + (b"E" if "error" in answer else b"F") + json.dumps(answer).encode())
        return
    if "reset" in message:
        engines.reset(message["reset"])
        dist.barrier()
        connection.send_bytes(b"RF")
        return
    job, case = Job.from_json(message["job"]), Case.parse(message["case"])
    trace, failed = record_rank(job, case, Logged(LocalComm(star), flight))
    connection.send_bytes(b"R" + (b"E" if failed else b"F") + trace.to_bytes(sealed=False))


def record_rank(job: Job, case: Case, comm: Logged) -> tuple[Trace, bool]:
    """This rank's part of a case, as a trace of one rank, and whether the rank raised; peers are told of that."""
    flight, trace, failed = comm.flight, open_trace(job, case), False
    flight.begin(str(case))
    recorder = Recorder(flight.tell, Keep.parse(job.recording))
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
    trace.calls = [recorder.calls]
    return trace, failed


if __name__ == "__main__":
    main()
