"""What do both generations of the reference Buffer share? Everything but their slots.

Row payloads, rounding points, aliasing of zero-copy views, the undefined tail and the in-place prologue of
combine are as docs/contract.md says (section Buffer). Where upstream is undefined on bad input, this refuses on
every rank. Limits of the hardware (multiples of 128, plan broadcast) are refused too, unless ``relaxed``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moonep_validate.case import CaseError
from moonep_validate.contract import Layout
from moonep_validate.reference.planner import plan_rank
from moonep_validate.worlds.comm import agree, all_to_all, barrier
from moonep_validate.worlds.dist import as_comm

PROJECTIONS = ("gate", "up", "down")
_TILE, _SCALE_BYTES = 128, 16384
_POISON = -1  # all bits set: NaN in bf16 and float32, an impossible row in int32

_Wanted = tuple[Any, tuple[int, ...], torch.dtype]


class Event:
    """What an asynchronous call returns; on the CPU the work is done by then."""

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait for the work."""

    def synchronize(self) -> None:
        """Wait for the work."""

    def query(self) -> bool:
        """Whether the work is done."""
        return True


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
        options: ``num_sms``, ``comm_stream_priority``, ``enable_pdl`` of the real library; checked, then ignored.
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
        self._rows = _poisoned((self.layout.num_rows, H), torch.bfloat16)
        self._weights = _poisoned((self.layout.num_rows,), torch.float32)

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
        self._scatter(hidden_sh, route_weights_sk, plan)
        barrier(self.group, "dispatch exit")
        weights = None
        if route_weights_sk is not None:
            weights = self._weights if router_weights_zero_copy else self._weights.clone()
        result = (self._rows if zero_copy else self._rows.clone(), weights, cu_seqlens, plan)
        return (*result, Event()) if async_finish else result

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
        if not zero_copy:
            self._rows.copy_(hidden_nvsh)
        self._prologue(plan)
        barrier(self.group, "combine prologue")
        raw = _decoded(plan)
        primary = plan.dst >= 0
        token = torch.arange(plan.N)[primary] // plan.K
        wanted = [raw[primary], raw if route_weights_nvs is not None else raw[:0]]
        sources = [self._rows, self._weights if route_weights_nvs is None else route_weights_nvs]
        fetched, weights = self._fetch("combine", sources, wanted)
        out = torch.zeros(self.layout.S, self.H)
        order = torch.arange(plan.N)[primary] % plan.K
        for k in range(plan.K):
            out[token[order == k]] += fetched[order == k].float()
        gathered = None if route_weights_nvs is None else weights.view(self.layout.S, plan.K)
        return out.bfloat16(), gathered, Event() if async_finish else None

    def destroy(self) -> None:
        """Collective on the first call, then without effect."""
        if not self.destroyed:
            self.destroyed = True
            barrier(self.group, "destroy")

    def _agree(self, name: str, problem: str | None) -> None:
        if refusal := agree(self.group, name, problem):
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
            return mismatch(wanted) if same else "the plan was made for a Buffer of another geometry"
        if topk is None:
            return "topk_experts_sk is needed when no plan is given"
        wanted["topk_experts_sk"] = (topk, (layout.S, layout.K), torch.int32)
        if problem := mismatch(wanted):
            return problem
        if len(bad := topk[(topk < 0) | (topk >= layout.E)]):
            return f"expert id {int(bad[0])} is outside 0..{layout.E - 1}; there is no sentinel id"
        if counts is not None and not counts.equal(topk.flatten().bincount(minlength=layout.E).int()):
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
        if any(size % _TILE for weight in weights for size in weight.shape[-2:]):
            return f"weight rows and columns must be multiples of {_TILE}: {[tuple(w.shape) for w in weights]}"
        if any(scale[0].nbytes % _SCALE_BYTES for scale in given):
            return f"scale bytes of an expert must be a multiple of {_SCALE_BYTES}"
        return None

    def _make_plan(self, topk: Tensor) -> tuple[MoonEPCommPlan, Tensor]:
        layout = self.layout
        mine = topk.flatten().bincount(minlength=layout.E)
        counts = torch.stack(self.group.exchange("counts", mine))
        if len(set(counts.sum(1).tolist())) > 1:
            raise AssertionError(f"ranks dispatch different numbers of routes: {counts.sum(1).tolist()}")
        local = plan_rank(topk, counts, self.rank, layout)
        groups, rows, dup_counts = self._duplicates(local.raw)
        plan = MoonEPCommPlan(
            dst=local.dst,
            experts_to_copy=local.experts_to_copy,
            zero_fill_ranges=local.zero_fill_ranges,
            remote_stats=local.remote_stats,
            dup_groups=groups,
            dup_loffs=rows,
            dup_counts=dup_counts,
            N=layout.capacity,
            R=layout.R,
            E=layout.E,
            NvS=layout.num_rows,
            K=layout.K,
            B=layout.num_slots if layout.generation == "A" else None,
        )
        return plan, local.cu_seqlens

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

    def _scatter(self, hidden: Tensor, weights: Tensor | None, plan: MoonEPCommPlan) -> None:
        """Primaries' payload and all weights to their rows, zero padding, then copy to duplicates."""
        raw = _decoded(plan)
        primary = plan.dst >= 0
        token = torch.arange(plan.N) // plan.K
        targets, values = [self._rows], [(raw[primary], hidden[token[primary]])]
        if weights is not None:
            targets, values = [*targets, self._weights], [*values, (raw, weights.flatten())]
        self._store("dispatch", targets, values)
        for first, count in plan.zero_fill_ranges.tolist():
            self._rows[first : first + count] = 0
            if weights is not None:
                self._weights[first : first + count] = 0
        groups = plan.dup_groups[: int(plan.dup_counts[0])].long()
        source = groups[:, 0].repeat_interleave(groups[:, 2])
        self._rows[plan.dup_loffs[: int(plan.dup_counts[1])].long()] = self._rows[source]

    def _prologue(self, plan: MoonEPCommPlan) -> None:
        """Add duplicates to their primaries in float32, in list order, and round once."""
        groups = plan.dup_groups[: int(plan.dup_counts[0])].long()
        primary, first, count = groups.unbind(dim=1)
        total = self._rows[primary].float()
        for place in range(int(count.max()) if len(count) else 0):
            has = count > place
            rows = plan.dup_loffs[first[has] + place].long()
            total[has] += self._rows[rows].float()
        self._rows[primary] = total.bfloat16()

    def _reduce(self, name: str, copies: Tensor, grads: Tensor, buffer: Tensor) -> None:
        """Add every slot's gradient to its owner's, in ascending (rank, slot); R1.

        Args:
            copies: ``[R, slots]``.
            grads: ``[E/R, ...]`` of the owned experts, changed in place.
            buffer: ``[R, slots, ...]``; this rank's slots are row ``rank``.
        """
        per_rank = self.layout.experts_per_rank
        mine = buffer[self.rank]
        sent = [
            mine[(copies[self.rank] >= 0) & (copies[self.rank] // per_rank == h)] for h in range(self.layout.R)
        ]
        for source, received in enumerate(all_to_all(self.group, f"reduce {name}", sent)):
            experts = copies[source][(copies[source] >= 0) & (copies[source] // per_rank == self.rank)]
            for expert, grad in zip(experts.tolist(), received, strict=True):
                grads[expert - self.rank * per_rank] += grad

    def _clear(self, copies: Tensor, buffers: Sequence[Tensor]) -> None:
        """Zero the consumed slots of this rank; R2."""
        barrier(self.group, "reduce read")
        for buffer in buffers:
            buffer[self.rank][copies[self.rank] >= 0] = 0

    def _store(self, name: str, targets: Sequence[Tensor], values: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write (rank * NvS + row, value) pairs into tensors of any rank, one list of pairs per tensor."""
        split = [self._by_rank(raw) for raw, _ in values]
        sent = [
            [
                (row[chosen], value[chosen])
                for (_, value), (chosen, row) in zip(values, [s[d] for s in split], strict=True)
            ]
            for d in range(self.layout.R)
        ]
        for received in all_to_all(self.group, name, sent):
            for target, (row, value) in zip(targets, received, strict=True):
                target[row] = value

    def _fetch(self, name: str, sources: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor]:
        """Read rows of tensors of any rank; each of ``wanted`` is rank * NvS + row."""
        split = [self._by_rank(raw) for raw in wanted]
        requests = [[row[chosen] for chosen, row in [s[d] for s in split]] for d in range(self.layout.R)]
        asked = all_to_all(self.group, f"{name} index", requests)
        answers = [[source[row] for source, row in zip(sources, rows, strict=True)] for rows in asked]
        out = [
            torch.empty((len(raw), *source.shape[1:]), dtype=source.dtype)
            for raw, source in zip(wanted, sources, strict=True)
        ]
        for d, answer in enumerate(all_to_all(self.group, name, answers)):
            for tensor, part, ranks in zip(out, answer, split, strict=True):
                tensor[ranks[d][0]] = part
        return out

    def _by_rank(self, raw: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each rank: (places of its entries, row of every entry)."""
        rank, row = raw // self.layout.num_rows, raw % self.layout.num_rows
        return [(torch.nonzero(rank == d)[:, 0], row) for d in range(self.layout.R)]


def mismatch(wanted: dict[str, _Wanted]) -> str | None:
    """The first tensor whose shape, dtype or layout is not the wanted one."""
    for name, (tensor, shape, dtype) in wanted.items():
        if not isinstance(tensor, Tensor):
            return f"{name} is {type(tensor).__name__}, a tensor is needed"
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            return f"{name} is {tensor.dtype} {tuple(tensor.shape)}, contiguous {dtype} {shape} is needed"
    return None


def _decoded(plan: MoonEPCommPlan) -> Tensor:
    return torch.where(plan.dst < 0, -plan.dst - 1, plan.dst).long()


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return torch.full(shape, _POISON, dtype=integers).view(dtype)
