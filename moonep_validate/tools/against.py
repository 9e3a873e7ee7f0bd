"""What is balance worth? Rows of the fullest rank with plain EP, with static redundancy, and with MoonEP's plan.

No GPU is needed: loads decide it. A link and a GEMM speed give the break-even MaxVio, from which on MoonEP's
prefetch costs less than it saves (docs/plan-format.md derives it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonep_validate.cases.layout import Ints
from moonep_validate.judge.oracle.plan import ExpectedPlan

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Speeds:
    """A machine.

    Attributes:
        link: GB (10**9 bytes) a second into one rank.
        gemm: TFLOP (10**12) a second of one rank's grouped product.
        flops_per_row: of one row through one expert: 6 * H * I.
    """

    link: float
    gemm: float
    flops_per_row: float

    def compute(self, rows: float) -> float:
        """Seconds of so many rows."""
        return rows * self.flops_per_row / (self.gemm * 1e12)

    def move(self, nbytes: float) -> float:
        """Seconds of so many bytes."""
        return nbytes / (self.link * 1e9)


@dataclass(frozen=True)
class Against:
    """One layer in one step.

    Attributes:
        layer, step: from 0.
        mean: rows of a rank where all are equal: S * K.
        plain, static, moonep: rows of the fullest rank.
        max_vio: plain / mean - 1.
        prefetch_bytes: into the busiest rank, of MoonEP's plan.
        break_even: the MaxVio from which on MoonEP is worth it; None without speeds.
        gain: seconds with plain EP over seconds with MoonEP; None without speeds.
    """

    layer: int
    step: int
    mean: int
    plain: int
    static: float
    moonep: int
    max_vio: float
    prefetch_bytes: int
    break_even: float | None = None
    gain: float | None = None


def against(
    plans: Sequence[ExpectedPlan],
    bytes_per_expert: int,
    layers: int = 1,
    redundant: int = 1,
    speeds: Speeds | None = None,
) -> list[Against]:
    """Compare on each routing.

    Args:
        plans: of the routings, step by step, in each step layer by layer.
        bytes_per_expert: see ``WeightFormat.expert_bytes``.
        layers: how many there are.
        redundant: replicas a rank that static redundancy has; its placement knows the sum of its layer over all
            steps, which is more than it can know.
        speeds: of a machine, or None.

    Raises:
        ValueError: if the routings are not whole steps, or not of one E and R.
    """
    if len(plans) % layers:
        raise ValueError(f"{len(plans)} routings are no whole number of steps of {layers} layers")
    if len(sizes := {(one.layout.E, one.layout.R) for one in plans}) > 1:
        raise ValueError(f"routings of one model are needed, these have (E, R) {sorted(sizes)}")
    loads = [plan.alloc.sum(axis=1) for plan in plans]
    known = [sum(loads[layer::layers]) for layer in range(layers)] if plans else []
    return [
        _one(plan, load, known[at % layers], (at % layers, at // layers), bytes_per_expert, redundant, speeds)
        for at, (plan, load) in enumerate(zip(plans, loads, strict=True))
    ]


def _one(
    plan: ExpectedPlan,
    loads: Ints,
    known: Ints,
    where: tuple[int, int],
    bytes_per_expert: int,
    redundant: int,
    speeds: Speeds | None,
) -> Against:
    ranks, mean = plan.layout.R, plan.layout.capacity
    plain, moonep = int(loads.reshape(ranks, -1).sum(axis=1).max()), int(plan.alloc.sum(axis=0).max())
    moved = int((plan.experts_to_copy >= 0).sum(axis=1).max()) * bytes_per_expert
    found = Against(
        *where, mean, plain, static_rows(loads, known, ranks, redundant), moonep, plain / mean - 1, moved
    )
    if speeds is None:
        return found
    cost, base = speeds.move(moved), speeds.compute(mean)
    return Against(**{**vars(found), "break_even": cost / base, "gain": speeds.compute(plain) / (base + cost)})


def replicas(loads: Ints | Floats, extra: int) -> Ints:
    """Copies of each expert, ``[E]``: each further one goes to the largest load a copy, ties to the first."""
    counts = np.ones(len(loads), np.int64)
    for _ in range(extra):
        counts[(loads / counts).argmax()] += 1
    return counts


def packed(weights: Floats, ranks: int) -> Ints:
    """The rank of each replica, ``[P]``: the heaviest first, to the lightest rank that has fewer than P/R."""
    rank_of, load, room = np.zeros(len(weights), np.int64), np.zeros(ranks), np.full(ranks, len(weights) // ranks)
    for one in np.argsort(-weights, kind="stable"):
        rank = int(np.where(room > 0, load, np.inf).argmin())
        rank_of[one] = rank
        load[rank] += weights[one]
        room[rank] -= 1
    return rank_of


def static_rows(loads: Ints, known: Ints, ranks: int, redundant: int) -> float:
    """Rows of the fullest rank with static redundancy, as DeepSeek's EPLB places it in one group.

    Args:
        loads: ``[E]``, routes to each expert; replicas of an expert share them equally.
        known: ``[E]``, the loads that the placement was made from.
        ranks: R.
        redundant: replicas a rank beyond its E/R experts.
    """
    counts = replicas(known, ranks * redundant)
    expert = np.repeat(np.arange(len(loads)), counts)
    rank_of = packed((known / counts)[expert], ranks)
    return float(np.bincount(rank_of, weights=(loads / counts)[expert], minlength=ranks).max())
