"""What do both generations of the reference Buffer share? Everything but their slots.

Row payloads, rounding points, aliasing of zero-copy views, the undefined tail and the in-place prologue of
combine are as docs/contract.md says (section Buffer). Where upstream is undefined on bad input, this refuses on
every rank. Limits of the hardware (multiples of 128, plan broadcast) are refused too, unless ``relaxed``.

It is one-sided as the real library is: ranks write into each other's mapped memory (copies.py) and fences say when
all of it is there, on the CPU and, stream by stream, on GPUs. Planning is on the host; a replay does not need it,
so that a replayed dispatch can be captured in a CUDA graph, and a fresh one cannot.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moonep_validate.cases.case import CaseError
from moonep_validate.cases.layout import Layout
from moonep_validate.reference.copies import get, put
from moonep_validate.reference.lane import Event, Lane
from moonep_validate.reference.leases import Leases
from moonep_validate.reference.moves import Moves, moves_of
from moonep_validate.reference.planner import plan_rank
from moonep_validate.reference.used import USED
from moonep_validate.worlds.comm import agree, barrier
from moonep_validate.worlds.dist import as_comm

PROJECTIONS = ("gate", "up", "down")
_TILE, _SCALE_BYTES = 128, 16384
_POISON = -1  # all bits set: NaN in bf16 and float32, an impossible row in int32

_Wanted = tuple[Any, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class MoonEPCommPlan:
    """A plan: int32 tensors and sizes, no reference to a Buffer. Fields as in docs/contract.md, Plan fields."""

    dst: Tensor
    experts_to_copy: Tensor
    zero_fill_ranges: Tensor
    remote_stats: Tensor
    dup_groups: Tensor
    dup_loffs: Tensor
    dup_counts: Tensor
    N: int
    R: int
    E: int
    NvS: int
    K: int
    B: int | None = None

    def clone(self) -> MoonEPCommPlan:
        """Copy every tensor."""
        tensors: dict[str, Any] = {k: v.clone() for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)


class Transport:
    """Collective: every rank constructs it with the same arguments, in the same order.

    Args:
        layout_of: builds the layout, or raises CaseError.
        H: hidden size.
        num_ep_ranks: must be the size of the group.
        options: ``num_sms``, ``comm_stream_priority``, ``enable_pdl`` of the real library; the priority is that of
            the stream on a GPU, the others are checked, then ignored.
        group: a ``Comm``, a torch process group, or None for the default group.
        explicitly_destroy: whether garbage collection without ``destroy()`` warns.

    Raises:
        AssertionError: on every rank, if the arguments of any rank are refused.
    """

    #: Whether limits that only hardware has are waived.
    relaxed: bool = os.environ.get("MOONEP_VALIDATE_RELAXED") == "1"

    def __init__(
        self,
        generation: str,
        sizes: dict[str, Any],
        H: int,
        num_ep_ranks: int,
        options: dict[str, Any],
        group: Any,
        explicitly_destroy: bool,
    ) -> None:
        self.destroyed, self.explicitly_destroy = True, explicitly_destroy
        self.group = as_comm(group)
        self.rank: int = self.group.rank
        refusal = self._constructor_refusal(sizes, num_ep_ranks, options)
        # Arguments travel too: ranks with other sizes would write behind each other's rows, unseen.
        everybody = self.group.exchange("construct", (refusal, (generation, sizes, H, num_ep_ranks)))
        for rank, (refused, _) in enumerate(everybody):
            if refused is not None:
                raise AssertionError(f"rank {rank}: {refused}")
        arguments = [given for _, given in everybody]
        if any(given != arguments[0] for given in arguments):
            raise AssertionError(f"ranks construct different Buffers: {arguments}")
        try:
            self.layout = Layout(generation, num_ep_ranks, **sizes)
        except CaseError as error:
            raise AssertionError(str(error)) from None
        self.H, self.destroyed = H, False
        self.device: torch.device = self.group.device
        self.leases = Leases(self.group)
        self._lane = Lane(self.device, options["comm_stream_priority"])
        self._all_rows = self._memory("rows", (self.layout.num_rows, H), torch.bfloat16)
        self._all_weights = self._memory("weights", (self.layout.num_rows,), torch.float32)
        self._rows, self._weights = self._all_rows[self.rank], self._all_weights[self.rank]
        barrier(self.group, "constructed")  # else a peer could write rows that this rank has yet to poison

    def _memory(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Poisoned memory ``[R, *shape]`` that peers reach."""
        memory: Tensor = self.group.symmetric(name, shape, dtype)
        integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        memory[self.rank].view(integers).fill_(_POISON)
        return memory

    def __del__(self) -> None:
        if not self.destroyed and self.explicitly_destroy:
            warnings.warn("a Buffer was collected without destroy()", ResourceWarning, stacklevel=1)

    @property
    def hidden_nvsh_buffer_view(self) -> Tensor:
        """The row storage, ``[NvS, H]``."""
        return self._rows

    @property
    def router_weight_buffer_view(self) -> Tensor:
        """The route weight storage, ``[NvS]``."""
        return self._weights

    def dispatch(
        self,
        hidden_sh: Tensor,
        route_weights_sk: Tensor | None = None,
        topk_experts_sk: Tensor | None = None,
        tokens_per_expert: Tensor | None = None,
        plan: MoonEPCommPlan | None = None,
        async_finish: bool = False,
        *,
        inter_rank_sync: bool = True,
        zero_copy: bool = False,
        router_weights_zero_copy: bool = False,
    ) -> tuple[Any, ...]:
        """Send each token to the ranks of its experts.

        Args:
            hidden_sh: ``[S, H]`` bf16.
            route_weights_sk: ``[S, K]`` float32, or None to leave the weight area untouched.
            topk_experts_sk: ``[S, K]`` int32, needed without ``plan``.
            tokens_per_expert: ``[E]`` int32, must equal this rank's bincount.
            plan: replay an earlier plan; the third result is then None.
            async_finish: append an event to the result.

        Returns:
            ``[NvS, H]`` rows, ``[NvS]`` weights or None, ``[G]`` cu_seqlens or None, the plan. Rows after the
            last group are undefined.

        Raises:
            AssertionError: on every rank, if the input of any rank is refused.
        """
        refusal = self._refusal(hidden_sh, route_weights_sk, topk_experts_sk, tokens_per_expert, plan)
        self._agree("dispatch", refusal)
        cu_seqlens = None
        if plan is None:
            assert topk_experts_sk is not None
            plan, cu_seqlens = self._make_plan(topk_experts_sk)
        moves = moves_of(plan, self.rank, self.device)

        def work() -> tuple[Tensor, Tensor | None]:
            # A peer may still read my rows of the step before: nobody writes until all have come here.
            if self.device.type == "cuda" and inter_rank_sync:  # on the CPU, agreeing was such a point
                self.group.fence("dispatch entry", self._all_rows)
            self._scatter(hidden_sh, route_weights_sk, moves)
            rows = self._rows if zero_copy else self._rows.clone()
            if route_weights_sk is None:
                return rows, None
            return rows, self._weights if router_weights_zero_copy else self._weights.clone()

        (rows, weights), event = self._lane.run(work, [hidden_sh, route_weights_sk], async_finish)
        result = (rows, weights, cu_seqlens, plan)
        return (*result, event) if async_finish else result

    def combine(
        self,
        plan: MoonEPCommPlan,
        hidden_nvsh: Tensor,
        route_weights_nvs: Tensor | None = None,
        async_finish: bool = False,
        inter_rank_sync: bool = True,
        *,
        zero_copy: bool = False,
        router_weights_zero_copy: bool = False,
    ) -> tuple[Tensor, Tensor | None, Event | None]:
        """Sum each token's rows, unweighted, in the order and rounding of C1.

        Args:
            plan: of the dispatch.
            hidden_nvsh: ``[NvS, H]`` bf16; with ``zero_copy`` it must be the Buffer's own rows, which the
                prologue changes in place.
            route_weights_nvs: ``[NvS]`` float32 to gather back, or None.
            async_finish: return an event as third result.

        Returns:
            ``[S, H]`` bf16, ``[S, K]`` float32 or None, and an event or None.

        Raises:
            AssertionError: on every rank, if the input of any rank is refused.
        """
        self._agree("combine", self._combine_refusal(hidden_nvsh, route_weights_nvs, zero_copy))
        moves = moves_of(plan, self.rank, self.device)

        def work() -> tuple[Tensor, Tensor | None]:
            with self.leases.writing("sums", [self.rank]):
                if not zero_copy:
                    self._rows.copy_(hidden_nvsh)
                if route_weights_nvs is not None and route_weights_nvs.data_ptr() != self._weights.data_ptr():
                    self._weights.copy_(route_weights_nvs)
                self._prologue(moves)
            # Peers read my sums: nobody gathers before every rank has made its own.
            self.group.fence("combine prologue", self._all_rows)
            out, weights = self._gather(moves), None
            if route_weights_nvs is not None:
                routes = self.layout.capacity
                weights = get(self.group, "combine weights", self._all_weights, moves.weights, routes)
                weights = weights.view(self.layout.S, plan.K)
            # The next dispatch writes where peers read just now: nobody leaves before all have read.
            self.group.fence("combine exit", self._all_rows)
            return out, weights

        inputs = [hidden_nvsh, route_weights_nvs]
        (out, weights), event = self._lane.run(work, inputs, async_finish)
        return out, weights, event if async_finish else None

    def destroy(self) -> None:
        """Collective on the first call, then without effect."""
        if not self.destroyed:
            self.destroyed = True
            barrier(self.group, "destroy")  # peers may still read my rows: memory goes when all are through

    def _agree(self, name: str, problem: str | None) -> None:
        """Refuse on every rank what one refuses; every call begins with it."""
        """Make one rank's refusal everybody's; while a graph is captured, ranks cannot talk on the host."""
        USED["buffer"] += 1
        # If one rank raised alone, its peers would wait for it in the next collective.
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if refusal := problem if capturing else agree(self.group, name, problem):
            raise AssertionError(refusal)

    def _alive(self) -> str | None:
        return "this Buffer has been destroyed" if self.destroyed else None

    def _constructor_refusal(self, sizes: dict[str, Any], ranks: int, options: dict[str, Any]) -> str | None:
        """Why this rank's constructor arguments are refused, or None (docs/contract.md, Limits)."""
        if ranks != self.group.size:
            return f"num_ep_ranks={ranks}, but the group has {self.group.size} ranks"
        for name, value in {**sizes, "num_sms": options["num_sms"]}.items():
            optional = name in ("num_sms", "slots")
            if not (isinstance(value, int) and value > 0) and not (optional and value is None):
                return f"{name} is {value!r}, an int above 0 is needed"
        if not isinstance(options["comm_stream_priority"], int) or not isinstance(options["enable_pdl"], bool):
            return "comm_stream_priority must be an int and enable_pdl a bool"
        if not self.relaxed and sizes["E"] % ranks == 0 and 3 * sizes["E"] * ranks % 4:
            return f"3*E*R = {3 * sizes['E'] * ranks} is no multiple of 4: R must be even or E/R a multiple of 4"
        return None

    def _refusal(
        self,
        hidden: Tensor,
        weights: Tensor | None,
        topk: Tensor | None,
        counts: Tensor | None,
        plan: MoonEPCommPlan | None,
    ) -> str | None:
        """Why this rank's dispatch input is refused, or None."""
        if dead := self._alive():
            return dead
        layout = self.layout
        wanted: dict[str, _Wanted] = {"hidden_sh": (hidden, (layout.S, self.H), torch.bfloat16)}
        if weights is not None:
            wanted["route_weights_sk"] = (weights, (layout.S, layout.K), torch.float32)
        if self.H % 8:
            return f"H={self.H} is no multiple of 8"
        if plan is not None:
            same = (plan.N, plan.R, plan.E, plan.NvS) == (layout.capacity, layout.R, layout.E, layout.num_rows)
            return self._mismatch(wanted) if same else "the plan was made for a Buffer of another geometry"
        if topk is None:
            return "topk_experts_sk is needed when no plan is given"
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "planning is on the host and cannot be captured in a CUDA graph; capture a replay (plan=...)"
        wanted["topk_experts_sk"] = (topk, (layout.S, layout.K), torch.int32)
        if problem := self._mismatch(wanted):
            return problem
        if len(bad := topk[(topk < 0) | (topk >= layout.E)]):
            return f"expert id {int(bad[0])} is outside 0..{layout.E - 1}; there is no sentinel id"
        if counts is not None and not counts.equal(topk.flatten().bincount(minlength=layout.E).to(counts.dtype)):
            return "tokens_per_expert is not the bincount of topk_experts_sk"
        return None

    def _combine_refusal(self, rows: Tensor, weights: Tensor | None, zero_copy: bool) -> str | None:
        if dead := self._alive():
            return dead
        if self.H % _TILE and not self.relaxed:
            return f"H={self.H} is no multiple of {_TILE}"
        if zero_copy and rows.data_ptr() != self._rows.data_ptr():
            return "with zero_copy, hidden_nvsh must alias the Buffer's rows"
        wanted: dict[str, _Wanted] = {"hidden_nvsh": (rows, tuple(self._rows.shape), torch.bfloat16)}
        if weights is not None:
            wanted["route_weights_nvs"] = (weights, tuple(self._weights.shape), torch.float32)
        return self._mismatch(wanted)

    def _mismatch(self, wanted: dict[str, _Wanted]) -> str | None:
        """The first tensor whose shape, dtype, layout or device is not the wanted one."""
        for name, (tensor, _, _) in wanted.items():
            if isinstance(tensor, Tensor) and tensor.device != self.device:
                return f"{name} is on {tensor.device}, this Buffer is on {self.device}"
        return mismatch(wanted)

    def _weights_refusal(self, weights: Sequence[Tensor], scales: Sequence[Tensor | None]) -> str | None:
        """Why weight tensors ``[experts, X, Y]`` and their scales are refused, or None."""
        if dead := self._alive():
            return dead
        if len({weight.dtype for weight in weights}) > 1:
            return f"weights have different dtypes: {[weight.dtype for weight in weights]}"
        given = [scale for scale in scales if scale is not None]
        if len(given) not in (0, len(scales)):
            return f"{len(given)} of {len(scales)} scale tensors are given; give all or none"
        if given and weights[0].dtype not in (torch.uint8, torch.int8):
            return f"scales are only legal with uint8 or int8 weights, not {weights[0].dtype}"
        for tensor in [*weights, *given]:
            if not tensor.is_contiguous() and tensor.shape[0] != self.layout.R:
                return "a weight tensor is not contiguous"
        if self.relaxed:
            return None
        # What upstream's kernels need: they move whole tiles, and scales in whole 16 KiB pieces.
        if any(size % _TILE for weight in weights for size in weight.shape[-2:]):
            return f"weight rows and columns must be multiples of {_TILE}: {[tuple(w.shape) for w in weights]}"
        if any(scale[0].nbytes % _SCALE_BYTES for scale in given):
            return f"scale bytes of an expert must be a multiple of {_SCALE_BYTES}"
        return None

    def _make_plan(self, topk: Tensor) -> tuple[MoonEPCommPlan, Tensor]:
        layout = self.layout
        topk = topk.cpu()
        # Counts are all that ranks must know of each other: each derives the same allocation from them.
        mine = topk.flatten().bincount(minlength=layout.E)
        counts = torch.stack(self.group.exchange("counts", mine))
        if len(set(counts.sum(1).tolist())) > 1:
            raise AssertionError(f"ranks dispatch different numbers of routes: {counts.sum(1).tolist()}")
        local = plan_rank(topk, counts, self.rank, layout)
        groups, rows, dup_counts = self._duplicates(local.raw)
        tensors = {
            **{n: getattr(local, n) for n in ("dst", "experts_to_copy", "zero_fill_ranges", "remote_stats")},
            **{"dup_groups": groups, "dup_loffs": rows, "dup_counts": dup_counts},
        }
        plan = MoonEPCommPlan(
            **{name: tensor.to(self.device) for name, tensor in tensors.items()},
            N=layout.capacity,
            R=layout.R,
            E=layout.E,
            NvS=layout.num_rows,
            K=layout.K,
            B=layout.num_slots if layout.generation == "A" else None,
        )
        return plan, local.cu_seqlens.to(self.device)

    def _duplicates(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The dedup lists of this rank; entries after the valid prefix are poison."""
        layout = self.layout
        everybody = torch.stack(self.group.exchange("destinations", raw)).view(-1, layout.K)
        here = everybody // layout.num_rows == self.rank
        count = here.sum(dim=1)
        several = count > 1
        order = (~here[several]).int().argsort(dim=1, stable=True)  # rows on this rank first, k ascending
        rows = (everybody[several] % layout.num_rows).gather(1, order)
        extra = count[several] - 1
        groups = torch.full((layout.num_rows, 3), _POISON, dtype=torch.int32)
        loffs = torch.full((layout.num_rows,), _POISON, dtype=torch.int32)
        first = extra.cumsum(0) - extra
        groups[: len(extra)] = torch.stack([rows[:, 0], first, extra], dim=1).int()
        is_duplicate = torch.arange(layout.K - 1) < extra[:, None]
        loffs[: int(extra.sum())] = rows[:, 1:][is_duplicate].int()
        return groups, loffs, torch.tensor([len(extra), int(extra.sum())], dtype=torch.int32)

    def _scatter(self, hidden: Tensor, weights: Tensor | None, moves: Moves) -> None:
        """Primaries' payload and all weights to their rows, zero padding, then copy to duplicates."""
        with self.leases.writing("rows", range(self.layout.R)):
            put(self.group, "dispatch", self._all_rows, hidden, moves.sends)
            if weights is not None:
                put(self.group, "dispatch weights", self._all_weights, weights.flatten(), moves.weights)
        # Duplicates are copied from primary rows, which peers write: only from here on are they all there.
        self.group.fence("dispatch exit", self._all_rows)
        with self.leases.reading("rows", self.rank):
            self._rows.index_fill_(0, moves.zero, 0)
            if weights is not None:
                self._weights.index_fill_(0, moves.zero, 0)
            primary, duplicate = moves.copies
            self._rows[duplicate] = self._rows[primary]

    def _prologue(self, moves: Moves) -> None:
        """Add duplicates to their primaries in float32, in list order, and round once."""
        total = self._rows[moves.heads].float()
        # One round for each place in the list: no row is added to twice in it, so the order of the sum is fixed.
        for group, duplicate in moves.sums:
            total[group] += self._rows[duplicate].float()
        self._rows[moves.heads] = total.bfloat16()

    def _gather(self, moves: Moves) -> Tensor:
        """Read each primary's sum, and add up over k in float32: bf16 ``[S, H]``."""
        with contextlib.ExitStack() as reads:
            for owner in range(self.layout.R):
                reads.enter_context(self.leases.reading("sums", owner, by=owner))
            fetched = get(self.group, "combine", self._all_rows, moves.reads, moves.num_primaries)
        # In float32 and k by k, not in one sum over rows: C1 promises this order, and an order shows in the bits.
        out = torch.zeros(self.layout.S, self.H, device=self.device)
        for token, place in moves.order:
            out[token] += fetched[place].float()
        return out.bfloat16()

    def _push(self, plan: MoonEPCommPlan, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Put rows of local tensors ``[E/R, ...]`` into pools ``[R, E/R, ...]`` of the ranks that copy them."""
        moves = moves_of(plan, self.rank, self.device)
        with self.leases.writing("slots", range(self.layout.R)):
            for local, pool in pairs:
                sends = [(expert, slot) for slot, expert in moves.pushes]
                put(self.group, "prefetch", pool, local, sends)

    def _reduce_all(
        self, plan: MoonEPCommPlan, pairs: dict[str, tuple[Tensor, Tensor]], asynchronous: bool
    ) -> Any:
        """Reduce (gradients of owned experts, buffer of all ranks) of each projection, then clear the slots."""
        copies = plan.experts_to_copy.cpu()
        mine = (copies[self.rank] >= 0).to(self.device)

        def work() -> tuple[()]:
            if self.device.type == "cuda":  # on the CPU, agreeing was one
                self.group.fence("reduce entry", self._all_rows)
            for name, (grads, buffer) in pairs.items():
                self._reduce(name, copies, grads, buffer)
            # Owners read my slots: they are cleared when every owner has.
            self.group.fence("reduce read", self._all_rows)
            for _, buffer in pairs.values():
                buffer[self.rank][mine] = 0
            return ()

        _, event = self._lane.run(work, [tensor for pair in pairs.values() for tensor in pair], asynchronous)
        return event if asynchronous else None

    def _reduce(self, name: str, copies: Tensor, grads: Tensor, buffer: Tensor) -> None:
        """Add every slot's gradient to its owner's, in ascending (rank, slot); R1.

        Args:
            name: of the projection.
            copies: ``[R, slots]``, on the host.
            grads: ``[E/R, ...]`` of the owned experts, changed in place.
            buffer: ``[R, slots, ...]``; this rank's slots are row ``rank``.
        """
        first = self.rank * self.layout.experts_per_rank
        mine = (copies >= first) & (copies < first + len(grads))
        slots = [torch.nonzero(row)[:, 0] for row in mine]
        places = torch.arange(int(mine.sum())).split([len(s) for s in slots])
        reads = [(p.to(self.device), s.to(self.device)) for p, s in zip(places, slots, strict=True)]
        # All are fetched before any is added: the order of the sum is then that of the list, whoever was quicker.
        received = get(self.group, f"reduce {name}", buffer, reads, int(mine.sum()))
        for expert, grad in zip((copies[mine] - first).tolist(), received, strict=True):
            grads[expert] += grad


def mismatch(wanted: dict[str, _Wanted]) -> str | None:
    """The first tensor whose shape, dtype or layout is not the wanted one."""
    for name, (tensor, shape, dtype) in wanted.items():
        if not isinstance(tensor, Tensor):
            return f"{name} is {type(tensor).__name__}, a tensor is needed"
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            return f"{name} is {tensor.dtype} {tuple(tensor.shape)}, contiguous {dtype} {shape} is needed"
    return None
