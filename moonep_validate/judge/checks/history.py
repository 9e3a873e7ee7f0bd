"""Did each read see the write that the contract promises? The stamps of leases.py, judged.

A stamp that is too old, too new or half written proves that a rank read before or after it was allowed to, whether
or not the data it read happened to be right. Builds that stamp nothing are not judged here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from moonep_validate.judge.checks import Compared, differ
from moonep_validate.judge.facts import Absent, Step, Undecided
from moonep_validate.judge.registry import check
from moonep_validate.scenarios import SCENARIOS


@check("H1", "dispatch")
def rows_read_in_time(s: Step) -> Iterator[Compared]:
    """Rows are read after every rank's dispatch has ended, and before the next begins"""
    yield from _reads(s, "dispatch")


@check("H4", "prefetch")
def slots_filled_in_time(s: Step) -> Iterator[Compared]:
    """When prefetch returns, its writes to the slots have ended, and no later ones have begun"""
    yield from _reads(s, "prefetch")


@check("H2", "experts")
def slots_read_in_time(s: Step) -> Iterator[Compared]:
    """The experts read the rows and slots of their own step"""
    yield from _reads(s, "experts")


@check("H3", "combine")
def sums_read_in_time(s: Step) -> Iterator[Compared]:
    """A rank's sums are read after it has made them, and before it makes the next"""
    yield from _reads(s, "combine")


def _reads(s: Step, op: str) -> Iterator[Compared]:
    """All reads of one operation: the stamps of each writer, begin and end, before and after."""
    leases = s.all_info(op, "leases")
    if leases is None:
        raise Absent("this Buffer does not stamp its leases")
    reads = [(rank, read) for rank, of_rank in enumerate(leases) for read in _stamped(s, of_rank, rank, op)]
    if not reads:
        raise Absent(f"nothing is leased to {op} in this step")
    writers = [(rank, read, writer) for rank, read in reads for writer in read["writers"]]
    got = np.array([[*read["before"][writer], *read["after"][writer]] for _, read, writer in writers])
    want = np.repeat(np.array([_turn(read) for _, read, _ in writers])[:, None], 4, axis=1)

    def place(i: tuple[int, ...]) -> dict[str, Any]:
        reader, read, writer = writers[i[0]]
        moment = ("begun, before", "ended, before", "begun, after", "ended, after")[i[1]] + " the read"
        return {
            "rank": reader,
            "lease": f"{read['area']} of rank {read['owner']}",
            "writer": writer,
            "when": moment,
        }

    yield differ("turn of a lease", want, got, place)


def _turn(read: dict[str, Any]) -> int:
    """The number of the write that is promised; traces before 0.1.0 call it a generation."""
    return int(read["turn"] if "turn" in read else read["generation"])


def _stamped(s: Step, reads: list[dict[str, Any]], rank: int, op: str) -> list[dict[str, Any]]:
    if any(read["before"] is None or read["after"] is None for read in reads):
        reason = f"rank {rank} could not read the stamps of its {op}: its peers' memory is not mapped"
        raise Undecided(reason) if SCENARIOS[s.case.scenario.name].overlaps else Absent(reason)
    return reads
