"""How long does a MoE layer take with our reference, against other ways on the same routing? Ratios, on CPU ranks.

All ways run in turn in one process group and must give the same bits, so a ratio compares the same work at the
same time. The reference is written to be right: these figures say nothing of MoonEP's own speed.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from moonep_validate.cases.case import Case
from moonep_validate.cases.grammar import Spec
from moonep_validate.data.problem import PROJECTIONS, batch, expert_weights, projection_shapes
from moonep_validate.reference import moonep_a, moonep_b
from moonep_validate.reference.experts import grouped_experts
from moonep_validate.subjects.buffer.api import Slots, make_buffer
from moonep_validate.worlds.dist import DistComm

BASE = "genB+R2+E16+K4+S16+H256+I128+pad16"
STAGES = ("dispatch", "prefetch", "experts", "combine")
MOONEP, ALL_TO_ALL = "moonep", "alltoall"
WAYS = ("dense", "allgather", ALL_TO_ALL, MOONEP)
_BUFFERS = {"A": moonep_a.Buffer, "B": moonep_b.Buffer}
_SECONDS = 120


@dataclass(frozen=True)
class Point:
    """One routing.

    Attributes:
        case: its line.
        max_vio, tokens: the swept values; tokens are of a rank.
        cold: way -> seconds of its first pass.
        seconds: way -> seconds of each later pass of the slowest rank, all ways in turn.
        stages: stage of the reference -> seconds of each pass, with a fence between stages.
    """

    case: str
    max_vio: float
    tokens: int
    cold: dict[str, float]
    seconds: dict[str, list[float]]
    stages: dict[str, list[float]]

    def ratio(self, way: str, over: str) -> tuple[float, float, float]:
        """Quartiles of one way's seconds over another's in the same turn: middle, lower, upper."""
        pairs = zip(self.seconds[way], self.seconds[over], strict=True)
        return _quartiles([mine / other for mine, other in pairs])

    def share(self, stage: str) -> tuple[float, float, float]:
        """Quartiles of a stage's part of all stages: middle, lower, upper."""
        turns = zip(*self.stages.values(), strict=True)
        at = list(self.stages).index(stage)
        return _quartiles([turn[at] / sum(turn) for turn in turns])


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    lower, middle, upper = np.percentile(values, [25, 50, 75])
    return float(middle), float(lower), float(upper)


def sweep(base: Case, max_vios: Sequence[float], tokens: Sequence[int], repeats: int) -> list[Point]:
    """Measure every way on every routing, in one group of new processes.

    Args:
        base: sizes; routing and tokens are replaced.
        max_vios: of the case word ``maxvio``: largest expert load / mean - 1.
        tokens: S.
        repeats: passes of each way after its first.

    Raises:
        CaseError: for values that no case can have.
        ProcessRaisedException: if a rank raises, also where two ways do not give the same bits.
    """
    swept = [(vio, size) for size in tokens for vio in max_vios]
    cases = [base.but(S=size, routing=Spec.parse(f"maxvio:{vio}"), tokens=None) for vio, size in swept]
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (folder, [str(case) for case in cases], repeats), nprocs=base.R)
        told = json.loads((Path(folder) / "told.json").read_text())
    return [Point(str(case), *where, *one) for case, where, one in zip(cases, swept, told, strict=True)]


def _rank(rank: int, folder: str, lines: list[str], repeats: int) -> None:
    """One rank, in a process of its own; rank 0 writes the times of all cases."""
    torch.set_num_threads(1)
    cases = [Case.parse(line) for line in lines]
    place = f"file://{folder}/store"
    wait = timedelta(seconds=_SECONDS)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=cases[0].R, timeout=wait)
    told = [_measured(case, DistComm(), repeats) for case in cases]
    if rank == 0:
        (Path(folder) / "told.json").write_text(json.dumps(told))
    dist.destroy_process_group()


Times = tuple[dict[str, float], dict[str, list[float]], dict[str, list[float]]]


def _measured(case: Case, comm: DistComm, repeats: int) -> Times:
    """Seconds of each way and stage, as in ``Point``."""
    layer = Layer(case, comm)
    cold, found = {}, {}
    for name, way in layer.ways.items():
        cold[name], found[name] = _timed(way)
    same(found)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    stages: dict[str, list[float]] = {name: [] for name in STAGES}
    for _ in range(repeats):
        for name, way in layer.ways.items():
            seconds[name].append(_timed(way)[0])
        for name, stage in layer.stages.items():
            stages[name].append(_timed(stage)[0])
    layer.destroy()
    return cold, seconds, stages


def same(found: Mapping[str, Tensor]) -> None:
    """Refuse to compare the times of ways that do not compute the same.

    Raises:
        ValueError: naming the way, and how many elements differ.
    """
    for name, out in found.items():
        if wrong := int((out != found[MOONEP]).sum()):
            raise ValueError(
                f"{name} differs from {MOONEP} in {wrong} of {out.numel()} elements: no time is compared"
            )


def _timed(run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Seconds from when all ranks begin to when all have ended."""
    dist.barrier()
    begin = time.perf_counter()
    out = run()
    dist.barrier()
    return time.perf_counter() - begin, out


class Layer:
    """The tokens and experts of one rank, and every way to compute the layer.

    Attributes:
        ways: name -> the whole layer: ``() -> [S, H]`` bf16.
        stages: name -> one stage of the reference, on what the stage before made.
    """

    def __init__(self, case: Case, comm: DistComm) -> None:
        self.case, self.rank, self.size = case, comm.rank, comm.size
        tokens = batch(case, comm.rank)
        self.hidden, self.ids, self.route_weights = tokens.hidden, tokens.topk_ids, tokens.topk_weights
        every = [expert_weights(case, rank) for rank in range(case.R)]
        self.all_weights = [torch.cat([one[name] for one in every]) for name in PROJECTIONS]
        self.per_rank = case.E // case.R
        own = slice(comm.rank * self.per_rank, (comm.rank + 1) * self.per_rank)
        self.own_weights = [weight[own] for weight in self.all_weights]
        self.buffer: Any = make_buffer(_BUFFERS[case.generation], case, comm)
        self.slots = Slots(case, comm, projection_shapes(case), dict.fromkeys(PROJECTIONS, torch.bfloat16))
        loaded = self.all_weights if self.slots.needs_all_experts else self.own_weights
        self.slots.load(dict(zip(PROJECTIONS, loaded, strict=True)))
        self.ways = {
            "dense": self._dense,
            "allgather": self._allgather,
            ALL_TO_ALL: self._all_to_all,
            MOONEP: self._moonep,
        }
        self.stages = {name: partial(self._stage, name) for name in STAGES}

    def destroy(self) -> None:
        """Release the Buffer; collective."""
        self.buffer.destroy()

    def _stage(self, name: str) -> Tensor:
        if name == "dispatch":
            self.rows, self.weights, self.ends, self.plan = self.buffer.dispatch(
                self.hidden, self.route_weights, self.ids
            )
        elif name == "prefetch":
            self.buffer.prefetch_weight(plan=self.plan, **self.slots.prefetch_arguments())
        elif name == "experts":
            groups = [self.slots.groups(projection) for projection in PROJECTIONS]
            self.computed = grouped_experts(self.rows, self.weights, self.ends, groups)
        else:
            combined: Tensor = self.buffer.combine(self.plan, self.computed)[0]
            return combined
        rows: Tensor = self.rows
        return rows

    def _moonep(self) -> Tensor:
        for name in STAGES:
            out = self._stage(name)
        return out

    def _dense(self) -> Tensor:
        """Every rank has all experts, and computes its own tokens."""
        return _summed(self.hidden, self.ids, self.route_weights, self.all_weights, 0).bfloat16()

    def _allgather(self) -> Tensor:
        """Every rank gets all tokens, computes its experts, and the sums are reduced and scattered."""
        hidden, ids, weights = (self._gathered(one) for one in (self.hidden, self.ids, self.route_weights))
        partly = _summed(hidden, ids, weights, self.own_weights, self.rank * self.per_rank)
        parts = torch.empty_like(partly)
        dist.all_to_all_single(parts, partly)  # gloo of older torch has no reduce_scatter
        return parts.view(self.size, *self.hidden.shape).sum(dim=0).bfloat16()

    def _gathered(self, mine: Tensor) -> Tensor:
        every = [torch.empty_like(_bytes(mine)) for _ in range(self.size)]
        dist.all_gather(every, _bytes(mine))
        return torch.cat(every).view(mine.dtype)

    def _all_to_all(self) -> Tensor:
        """Each route's token goes to the rank of its expert, and its row comes back."""
        rank_of = self.ids.flatten().long() // self.per_rank
        order = rank_of.argsort(stable=True)
        token = order // self.case.K
        send = torch.bincount(rank_of, minlength=self.size)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send)
        there = partial(_exchanged, send=send.tolist(), receive=receive.tolist())
        back = partial(_exchanged, send=receive.tolist(), receive=send.tolist())
        ids, weights = (there(one.flatten()[order][:, None]) for one in (self.ids, self.route_weights))
        sums = _summed(there(self.hidden[token]), ids, weights, self.own_weights, self.rank * self.per_rank)
        rows = back(sums.bfloat16())
        return torch.zeros(self.hidden.shape).index_add_(0, token, rows.float()).bfloat16()


def _bytes(tensor: Tensor) -> Tensor:
    """What every gloo can send; that of older torch knows no bf16."""
    return tensor.contiguous().view(torch.uint8)


def _exchanged(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
    """Rows ``[sum(send), n]`` in order of their rank to ``[sum(receive), n]`` from all ranks."""
    data = _bytes(rows)
    out = torch.empty((sum(receive), data.shape[1]), dtype=torch.uint8)
    dist.all_to_all_single(out, data, receive, send)
    return out.view(rows.dtype)


def _summed(hidden: Tensor, ids: Tensor, weights: Tensor, experts: Sequence[Tensor], first: int) -> Tensor:
    """The sum of what some experts make of each token.

    Args:
        hidden: ``[n, H]`` bf16.
        ids, weights: ``[n, k]``.
        experts: gate, up and down of the experts from ``first`` on.

    Returns:
        ``[n, H]`` float32; zero for tokens that go to none of them.
    """
    group = ids.flatten().long() - first
    here = ((group >= 0) & (group < len(experts[0]))).nonzero().flatten()
    order = here[group[here].argsort(stable=True)]
    token = order // ids.shape[1]
    ends = torch.bincount(group[order], minlength=len(experts[0])).cumsum(0)
    out = grouped_experts(hidden[token], weights.flatten()[order], ends, experts)
    return torch.zeros(hidden.shape).index_add_(0, token, out.float())
