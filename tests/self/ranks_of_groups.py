"""Run as a rank of torchrun, four of them: two groups at once, each with a case of its own, then all four together.

Each group's first rank judges what its ranks recorded and prints one line.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from moonep_validate.cases.case import Case
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.judge import judge
from moonep_validate.pipeline.record import add_part, open_trace
from moonep_validate.pipeline.worker import record_rank
from moonep_validate.worlds.dist import DistComm
from moonep_validate.worlds.flight import Flight, Logged

CASES = {
    (1, 3): Case.parse("genB+R2+E6+K4+S7+H24+I8+hot:1+@slot_used"),
    (0, 2): Case.parse("genA+R2+E6+K4+S7+H24+I8+hot:1+variants+@slot_used"),
    (0, 1, 2, 3): Case.parse("genB+R4+E8+K2+S9+H24+I8+hot:5+life+@slot_used"),
}


def run(group: Any, members: tuple[int, ...], flight: Flight) -> None:
    """Record a case on the ranks of a group, and judge it on the first."""
    case, comm = CASES[members], DistComm(group)
    assert (comm.rank, comm.size) == (members.index(dist.get_rank()), len(members))
    part, _ = record_rank(Job(), case, Logged(comm, flight))
    parts = comm.exchange("parts", part.to_bytes())
    if comm.rank == 0:
        trace = open_trace(Job(), case)
        trace.calls = [[] for _ in members]
        for rank, data in enumerate(parts):
            add_part(trace, rank, data)
        mapped = all(
            call.info["leases"][0]["before"] for calls in trace.calls for call in calls if call.op == "dispatch"
        )
        print(f"{members}: {judge(trace).status}, peers mapped: {mapped}", flush=True)


def main() -> None:
    """One rank."""
    import sys
    from pathlib import Path

    dist.init_process_group("gloo")
    flight = Flight(Path(sys.argv[1]) / f"flight{dist.get_rank()}")
    groups = {members: dist.new_group(list(members)) for members in CASES if len(members) == 2}
    for members, group in groups.items():
        if dist.get_rank() in members:
            run(group, members, flight)
    run(None, (0, 1, 2, 3), flight)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
