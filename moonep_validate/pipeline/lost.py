"""What is known of a rank that sent no data?"""

from __future__ import annotations

from collections.abc import Sequence

from moonep_validate.trace.trace import Call, Trace
from moonep_validate.worlds import processes
from moonep_validate.worlds.autopsy import how_ended


def deadlocked(replies: Sequence[processes.Reply]) -> bool:
    """Whether every rank that still ran waits in a collective: none is busy, so nobody will come."""
    stacks = [reply.stack for reply in replies if reply.stack]
    return bool(stacks) and all(map(processes.in_collective, stacks))


def calls_of_lost_rank(
    rank: int, reply: processes.Reply, trace: Trace, deadline: float, deadlock: bool
) -> list[Call]:
    """What is known of a rank that sent no data: the calls it entered, and why the last one has no end."""
    calls = [Call(step, op, done=done) for step, op, done in reply.phases]
    stuck = reply.stack is not None and not processes.in_collective(reply.stack)
    if stuck:
        trace.hung.append({"rank": rank, "stack": reply.stack, "deadline": deadline})
    last = next((call for call in reversed(calls) if not call.done), None)
    if last is None:
        trace.errors.append(f"rank {rank} sent nothing back (exit code {reply.ended})")
    elif not stuck:
        kind, message = "PeerFailed", "stopped while waiting for its peers"
        if reply.ended is not None:
            kind, message = "ProcessEnded", f"the process {how_ended(reply.ended)}"
        elif deadlock:  # nobody failed and nobody is busy, so the peers that it waits for are done
            kind, message = "Deadlock", f"rank {rank} waits in {last.op} for peers that do not come"
        for call in calls:
            if not call.done:
                call.done = True
                peer = kind == "PeerFailed"
                call.error = {"type": kind, "message": message, "where": "outside Python", "peer": peer}
    return calls
