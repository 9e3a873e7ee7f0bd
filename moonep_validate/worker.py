"""What runs in a worker process? A loop: read a job, run this rank's part, send its calls back as bytes.

Started by worlds/processes.py as ``python -m moonep_validate.worker ADDRESS RANK SIZE FOLDER``.
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

from moonep_validate.case import Case
from moonep_validate.engine import Job, open_trace, rank_main
from moonep_validate.keep import Keep
from moonep_validate.subjects import engines
from moonep_validate.trace import Recorder, described
from moonep_validate.worlds.dist import DistComm

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
        if os.environ.get(engines.DEVICE) == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if os.environ.get(engines.DEVICE) == "cuda" else "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_GLOO_SECONDS),
        )
        while True:
            try:
                request = connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)
            _serve(connection, request)


def _serve(connection: Connection, request: bytes) -> None:
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
    trace = open_trace(job, case)

    def tell(step: str, op: str, done: bool) -> None:
        connection.send_bytes(b"P" + json.dumps([step, op, done]).encode())

    recorder, comm, failed = Recorder(tell, Keep.parse(job.keep)), DistComm(), False
    try:
        trace.relations = rank_main(job, case, comm, recorder)
    except (Exception, SystemExit) as error:
        failed = True
        if not any(call.error for call in recorder.calls):
            trace.errors.append("{type}: {message} ({where})".format(**described(error)))
    trace.calls = [recorder.calls]
    connection.send_bytes(b"R" + (b"E" if failed else b"F") + trace.to_bytes())


if __name__ == "__main__":
    main()
