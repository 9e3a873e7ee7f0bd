"""What is known of a rank that sent no data, or nothing that can be read?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moonep_validate.trace.trace import Call, Trace
from moonep_validate.worlds import processes
from moonep_validate.worlds.autopsy import how_ended

#: Calls that no scenario makes: what a rank does before its first call, and after its last one.
BEGIN, END = ("case", "begin"), ("case", "end")


def deadlocked(replies: Sequence[processes.Reply]) -> bool:
    """Whether every rank that still ran waits in a collective: none is busy, so nobody will come."""
    stacks = [reply.stack for reply in replies if reply.stack]
    return bool(stacks) and all(map(processes.in_collective, stacks))


def calls_of_lost_rank(
    rank: int, reply: processes.Reply, trace: Trace, deadline: float, deadlock: bool
) -> list[Call]:
    """What is known of a rank that sent no data: the calls it entered, and why the last one has no end."""
    calls = [Call(step, op, done=done) for step, op, done in reply.phases]
    if all(call.done for call in calls):
        calls.append(Call(*(END if calls else BEGIN)))
    stuck = reply.stack is not None and not processes.in_collective(reply.stack)
    if stuck and not reply.problem:
        trace.hung.append({"rank": rank, "stack": reply.stack, "deadline": deadline})
        return calls
    for call in calls:
        if not call.done:
            call.done, call.error = True, _why(rank, reply, call, deadlock)
    return calls


def _why(rank: int, reply: processes.Reply, last: Call, deadlock: bool) -> dict[str, Any]:
    kind, message = "PeerFailed", "stopped while waiting for its peers"
    if reply.ended is not None:
        kind, message = "ProcessEnded", f"the process {how_ended(reply.ended)}"
    elif reply.problem:
        kind, message = "NoReply", reply.problem
    elif deadlock:  # nobody failed and nobody is busy, so the peers that it waits for are done
        kind, message = "Deadlock", f"rank {rank} waits in {last.op} for peers that do not come"
    return _error(kind, message, peer=kind == "PeerFailed")


def left_running(processes_left: list[str]) -> Call:
    """What stands for processes that a rank started and that still ran after its case."""
    count = len(processes_left)
    what = f"{count} process{'es' * (count > 1)} that it started still ran: {', '.join(processes_left)}"
    return Call(*END, done=True, error=_error("ProcessesLeft", what, peer=False))


def _error(kind: str, message: str, peer: bool) -> dict[str, Any]:
    return {"type": kind, "message": message, "where": "outside Python", "peer": peer}
