"""MoonEP's ``Buffer`` of generation B, on collectives instead of mapped memory (docs/contract.md, Buffer).

Row payloads, rounding points, aliasing of zero-copy views, the undefined tail and the in-place prologue of
combine are as the contract says. Where upstream is undefined on bad input, this refuses on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moonep_validate.contract import Layout
from moonep_validate.reference.planner import plan_rank
from moonep_validate.worlds.comm import Comm, agree, all_to_all, barrier

_Wanted = tuple[Tensor, tuple[int, ...], torch.dtype]
_POISON = -1  # all bits set: NaN in bf16 and float32, an impossible row in int32


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

    def clone(self) -> MoonEPCommPlan:
        """Copy every tensor."""
        tensors: dict[str, Any] = {k: v.clone() for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)


class Buffer:
    """Collective: every rank constructs it with the same arguments, in the same order.

    Args:
        S, H, K, E, num_ep_ranks: sizes, see case.py.
        num_sms, comm_stream_priority, enable_pdl: tuning of the real library, accepted and ignored.
        token_padding: group alignment in rows.
        group: the ``Comm`` of the ranks.

    Raises:
        AssertionError: on every rank, if the arguments of any rank are refused.
    """

    def __init__(
        self,
        S: int,
        H: int,
        K: int,
        E: int,
        num_ep_ranks: int,
        num_sms: int | None = None,
        token_padding: int = 128,
        group: Comm | None = None,
        comm_stream_priority: int = -1,
        enable_pdl: bool = True,
    ) -> None:
        assert group is not None, "the reference Buffer needs a group"
        self.group, self.rank = group, group.rank
        arguments = (S, H, K, E, num_ep_ranks, token_padding)
        self._agree(
            "construct",
            None if num_ep_ranks == group.size else f"num_ep_ranks={num_ep_ranks}, {group.size} ranks are here",
        )
        everybody = group.exchange("construct", arguments)
        assert len(set(everybody)) == 1, f"ranks construct different Buffers: {everybody}"
        self.layout = Layout("B", num_ep_ranks, E, K, S, token_padding)
        self.H, self.destroyed = H, False
        self._rows = torch.full((self.layout.num_rows, H), _POISON, dtype=torch.int16).view(torch.bfloat16)
        self._weights = torch.full((self.layout.num_rows,), _POISON, dtype=torch.int32).view(torch.float32)

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
        *,
        inter_rank_sync: bool = True,
        zero_copy: bool = False,
        router_weights_zero_copy: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, MoonEPCommPlan]:
        """Send each token to the ranks of its experts.

        Args:
            hidden_sh: ``[S, H]`` bf16.
            route_weights_sk: ``[S, K]`` float32, or None to leave the weight area untouched.
            topk_experts_sk: ``[S, K]`` int32, needed without ``plan``.
            tokens_per_expert: ``[E]`` int32, must equal this rank's bincount.
            plan: replay an earlier plan; the third result is then None.

        Returns:
            ``[NvS, H]`` rows, ``[NvS]`` weights or None, ``[G]`` cu_seqlens or None, the plan. Rows after the
            last group are undefined.

        Raises:
            AssertionError: on every rank, if the input of any rank is refused.
        """
        self._agree(
            "dispatch", self._refusal(hidden_sh, route_weights_sk, topk_experts_sk, tokens_per_expert, plan)
        )
        cu_seqlens = None
        if plan is None:
            assert topk_experts_sk is not None
            plan, cu_seqlens = self._make_plan(topk_experts_sk)
        self._scatter(hidden_sh, route_weights_sk, plan)
        barrier(self.group, "dispatch exit")
        weights = None
        if route_weights_sk is not None:
            weights = self._weights if router_weights_zero_copy else self._weights.clone()
        return self._rows if zero_copy else self._rows.clone(), weights, cu_seqlens, plan

    def prefetch_weight(
        self,
        plan: MoonEPCommPlan,
        *,
        local_gate_weight: Tensor,
        local_up_weight: Tensor,
        local_down_weight: Tensor,
        gate_prefetch_buffer: Tensor,
        up_prefetch_buffer: Tensor,
        down_prefetch_buffer: Tensor,
    ) -> None:
        """Push the weights of my copied experts into the peers' slots (W1 to W5).

        Args:
            plan: of the dispatch that the experts will compute.
            local_gate_weight, local_up_weight, local_down_weight: ``[E/R, X, Y]`` each.
            gate_prefetch_buffer, up_prefetch_buffer, down_prefetch_buffer: ``[R, E/R, X, Y]``; only row
                ``rank`` is written by this rank's process.
        """
        assert not self.destroyed, "this Buffer has been destroyed"
        pairs = {
            "gate": (local_gate_weight, gate_prefetch_buffer),
            "up": (local_up_weight, up_prefetch_buffer),
            "down": (local_down_weight, down_prefetch_buffer),
        }
        for name, (local, pool) in pairs.items():
            shape = (self.layout.R, *local.shape)
            problem = (
                None if pool.shape == shape else f"{name}_prefetch_buffer is {tuple(pool.shape)}, not {shape}"
            )
            self._agree(f"prefetch {name}", problem)
            self._push(plan.experts_to_copy, local, pool, name)
        barrier(self.group, "prefetch exit")

    def combine(
        self,
        plan: MoonEPCommPlan,
        hidden_nvsh: Tensor,
        route_weights_nvs: Tensor | None = None,
        inter_rank_sync: bool = True,
        *,
        zero_copy: bool = False,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Sum each token's rows, unweighted, in the order and rounding of C1.

        Args:
            plan: of the dispatch.
            hidden_nvsh: ``[NvS, H]`` bf16; with ``zero_copy`` it must be the Buffer's own rows, which the
                prologue changes in place.
            route_weights_nvs: ``[NvS]`` float32 to gather back, or None.

        Returns:
            ``[S, H]`` bf16, ``[S, K]`` float32 or None, and None in place of an event.

        Raises:
            AssertionError: on every rank, if the input of any rank is refused.
        """
        self._agree("combine", self._combine_refusal(hidden_nvsh, zero_copy))
        if not zero_copy:
            self._rows.copy_(hidden_nvsh)
        self._prologue(plan)
        barrier(self.group, "combine prologue")
        raw = torch.where(plan.dst < 0, -plan.dst - 1, plan.dst).long()
        primary = plan.dst >= 0
        token = torch.arange(plan.N)[primary] // plan.K
        fetched = self._fetch("combine rows", self._rows, raw[primary])
        out = torch.zeros(self.layout.S, self.H)
        order = torch.arange(plan.N)[primary] % plan.K
        for k in range(plan.K):
            out[token[order == k]] += fetched[order == k].float()
        weights = None
        if route_weights_nvs is not None:
            weights = self._fetch("combine weights", route_weights_nvs, raw).view(self.layout.S, plan.K)
        return out.bfloat16(), weights, None

    def destroy(self) -> None:
        """Collective on the first call, then without effect."""
        if not self.destroyed:
            barrier(self.group, "destroy")
            self.destroyed = True

    def _agree(self, name: str, problem: str | None) -> None:
        refusal = agree(self.group, name, problem)
        assert refusal is None, refusal

    def _refusal(
        self,
        hidden: Tensor,
        weights: Tensor | None,
        topk: Tensor | None,
        counts: Tensor | None,
        plan: MoonEPCommPlan | None,
    ) -> str | None:
        """Why this rank's dispatch input is refused, or None."""
        layout = self.layout
        if self.destroyed:
            return "this Buffer has been destroyed"
        wanted: dict[str, _Wanted] = {"hidden_sh": (hidden, (layout.S, self.H), torch.bfloat16)}
        if weights is not None:
            wanted["route_weights_sk"] = (weights, (layout.S, layout.K), torch.float32)
        if plan is not None:
            same = (plan.N, plan.R, plan.E, plan.NvS) == (
                layout.capacity,
                layout.R,
                layout.E,
                layout.num_rows,
            )
            return _mismatch(wanted) if same else "the plan was made for a Buffer of another geometry"
        if topk is None:
            return "topk_experts_sk is needed when no plan is given"
        wanted["topk_experts_sk"] = (topk, (layout.S, layout.K), torch.int32)
        if problem := _mismatch(wanted):
            return problem
        if len(bad := topk[(topk < 0) | (topk >= layout.E)]):
            return f"expert id {int(bad[0])} is outside 0..{layout.E - 1}; there is no sentinel id"
        if counts is not None and not counts.equal(topk.flatten().bincount(minlength=layout.E).int()):
            return "tokens_per_expert is not the bincount of topk_experts_sk"
        return None

    def _combine_refusal(self, rows: Tensor, zero_copy: bool) -> str | None:
        if self.destroyed:
            return "this Buffer has been destroyed"
        if zero_copy and rows.data_ptr() != self._rows.data_ptr():
            return "with zero_copy, hidden_nvsh must alias the Buffer's rows"
        return _mismatch({"hidden_nvsh": (rows, tuple(self._rows.shape), torch.bfloat16)})

    def _make_plan(self, topk: Tensor) -> tuple[MoonEPCommPlan, Tensor]:
        layout = self.layout
        mine = topk.flatten().bincount(minlength=layout.E)
        counts = torch.stack(self.group.exchange("counts", mine))
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
        is_duplicate = (
            (torch.arange(layout.K - 1) < extra[:, None]) if layout.K > 1 else torch.zeros(len(extra), 0).bool()
        )
        loffs[: int(extra.sum())] = rows[:, 1:][is_duplicate].int()
        return groups, loffs, torch.tensor([len(extra), int(extra.sum())], dtype=torch.int32)

    def _scatter(self, hidden: Tensor, weights: Tensor | None, plan: MoonEPCommPlan) -> None:
        """Primaries' payload and all weights to their rows, zero padding, then copy to duplicates."""
        raw = torch.where(plan.dst < 0, -plan.dst - 1, plan.dst).long()
        primary = plan.dst >= 0
        token = torch.arange(plan.N) // plan.K
        self._store("dispatch rows", self._rows, raw[primary], hidden[token[primary]])
        if weights is not None:
            self._store("dispatch weights", self._weights, raw, weights.flatten())
        for first, count in plan.zero_fill_ranges.tolist():
            self._rows[first : first + count] = 0
            if weights is not None:
                self._weights[first : first + count] = 0
        source, duplicate = _pairs(plan)
        self._rows[duplicate] = self._rows[source]

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

    def _push(self, copies: Tensor, local: Tensor, pool: Tensor, name: str) -> None:
        per_rank = self.layout.experts_per_rank
        sent = []
        for d in range(self.layout.R):
            mine = copies[d][(copies[d] >= 0) & (copies[d] // per_rank == self.rank)]
            sent.append(local[mine.long() - self.rank * per_rank])
        received = all_to_all(self.group, f"prefetch {name}", sent)
        for source, tensor in enumerate(received):
            slots = torch.nonzero((copies[self.rank] >= 0) & (copies[self.rank] // per_rank == source))[:, 0]
            pool[self.rank, slots] = tensor

    def _store(self, name: str, target: Tensor, raw: Tensor, values: Tensor) -> None:
        """Write ``values`` to rows of any rank; ``raw`` is rank * NvS + row."""
        rank, row = raw // self.layout.num_rows, raw % self.layout.num_rows
        parts = [(row[rank == d], values[rank == d]) for d in range(self.layout.R)]
        rows = all_to_all(self.group, f"{name} index", [row for row, _ in parts])
        data = all_to_all(self.group, name, [value for _, value in parts])
        for where, what in zip(rows, data, strict=True):
            target[where] = what

    def _fetch(self, name: str, source: Tensor, raw: Tensor) -> Tensor:
        """Read rows of any rank; ``raw`` is rank * NvS + row."""
        rank, row = raw // self.layout.num_rows, raw % self.layout.num_rows
        asked = all_to_all(self.group, f"{name} index", [row[rank == d] for d in range(self.layout.R)])
        answers = all_to_all(self.group, name, [source[where] for where in asked])
        out = torch.empty((len(raw), *source.shape[1:]), dtype=source.dtype)
        for d, answer in enumerate(answers):
            out[rank == d] = answer
        return out


def _mismatch(wanted: dict[str, _Wanted]) -> str | None:
    """The first tensor whose shape, dtype or layout is not the wanted one."""
    for name, (tensor, shape, dtype) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            return f"{name} is {tensor.dtype} {tuple(tensor.shape)}, contiguous {dtype} {shape} is needed"
    return None


def _pairs(plan: MoonEPCommPlan) -> tuple[Tensor, Tensor]:
    """(primary row, duplicate row) for every duplicate on this rank."""
    groups = plan.dup_groups[: int(plan.dup_counts[0])].long()
    source = groups[:, 0].repeat_interleave(groups[:, 2])
    return source, plan.dup_loffs[: int(plan.dup_counts[1])].long()
