"""The reference Buffer of generation B keeps the contract where our own cases do not look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moonep_validate.case import Case
from moonep_validate.problem import Batch, batch
from moonep_validate.reference.buffer_b import Buffer
from moonep_validate.worlds import threads
from moonep_validate.worlds.comm import Comm

CASE = Case.parse("genB+R3+E6+K4+S5+H24+pad4+zipf:1.0")


def spmd(body: Callable[[Comm, Buffer, Batch], Any], case: Case = CASE) -> list[Any]:
    """Run on all ranks with a fresh Buffer; results per rank, or the exception."""
    results: list[Any] = [None] * case.R

    def on_rank(comm: Comm) -> None:
        buffer = Buffer(case.S, case.H, case.K, case.E, case.R, token_padding=case.pad, group=comm)
        results[comm.rank] = body(comm, buffer, batch(case, comm.rank))

    for rank, outcome in enumerate(threads.run(on_rank, case.R, 20)):
        results[rank] = outcome.error or results[rank]
    return results


def raise_any(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def bits(tensor: Tensor) -> list[Any]:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).tolist()


def fresh(buffer: Buffer, tokens: Batch, **options: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
    return buffer.dispatch(tokens.hidden, tokens.topk_weights, tokens.topk_ids, **options)  # type: ignore[return-value]


def test_replay_sends_new_rows_by_an_old_plan_and_returns_the_same_plan() -> None:
    def body(comm: Comm, buffer: Buffer, tokens: Batch) -> None:
        rows, weights, cu_seqlens, plan = fresh(buffer, tokens)
        saved = plan.clone()
        other = replace(tokens, topk_ids=(tokens.topk_ids + 1) % 6)
        fresh(buffer, other)
        again, no_weights, no_ends, same = buffer.dispatch(tokens.hidden, plan=plan)
        end = int(cu_seqlens[-1])
        assert same is plan
        assert no_weights is None
        assert no_ends is None
        assert bits(again[:end]) == bits(rows[:end])
        for name in ("dst", "experts_to_copy", "zero_fill_ranges", "dup_groups", "dup_loffs", "dup_counts"):
            assert getattr(plan, name).equal(getattr(saved, name)), name
        _, weights_again, _, _ = buffer.dispatch(tokens.hidden, tokens.topk_weights, plan=plan)
        assert weights_again is not None
        assert bits(weights_again[:end]) == bits(weights[:end])

    raise_any(spmd(body))


def test_zero_copy_returns_the_buffer_and_a_copy_does_not() -> None:
    def body(comm: Comm, buffer: Buffer, tokens: Batch) -> None:
        rows, weights, _, _ = fresh(buffer, tokens)
        view, weight_view, _, _ = fresh(buffer, tokens, zero_copy=True, router_weights_zero_copy=True)
        assert view.data_ptr() == buffer.hidden_nvsh_buffer_view.data_ptr() != rows.data_ptr()
        assert weight_view.data_ptr() == buffer.router_weight_buffer_view.data_ptr() != weights.data_ptr()
        assert bits(view) == bits(rows)

    raise_any(spmd(body))


def test_combine_on_a_view_adds_duplicates_again_but_on_a_copy_is_repeatable() -> None:
    def body(comm: Comm, buffer: Buffer, tokens: Batch) -> tuple[bool, int]:
        rows, weights, _, plan = fresh(buffer, tokens)
        copy = rows.clone()
        first, gathered, _ = buffer.combine(plan, rows, weights)
        second, _, _ = buffer.combine(plan, rows, weights)
        assert bits(rows) == bits(copy)
        assert bits(first) == bits(second)
        assert gathered is not None
        assert bits(gathered) == bits(tokens.topk_weights)
        assert first.equal((tokens.hidden.float() * 4).bfloat16())  # identity experts: K times the token
        view, _, _, plan = fresh(buffer, tokens, zero_copy=True)
        once, _, _ = buffer.combine(plan, view, zero_copy=True)
        twice, _, _ = buffer.combine(plan, view, zero_copy=True)
        assert bits(once) == bits(first)
        return once.equal(twice), int(plan.dup_counts[0])

    results = raise_any(spmd(body))
    assert all(groups > 0 for _, groups in results)
    assert not any(equal for equal, _ in results)


def test_padding_is_zeroed_and_the_tail_is_left_alone() -> None:
    def body(comm: Comm, buffer: Buffer, tokens: Batch) -> None:
        buffer.hidden_nvsh_buffer_view.fill_(7.0)
        rows, weights, cu_seqlens, plan = fresh(buffer, tokens)
        end = int(cu_seqlens[-1])
        assert (rows[end:] == 7.0).all()
        for first, count in plan.zero_fill_ranges.tolist():
            assert bits(rows[first : first + count]) == [[0] * 24] * count
            assert bits(weights[first : first + count]) == [0] * count

    raise_any(spmd(body))


def test_dedup_lists_name_each_duplicate_once_in_order_of_k() -> None:
    def body(comm: Comm, buffer: Buffer, tokens: Batch) -> tuple[Any, Any]:
        plan = fresh(buffer, tokens)[3]
        groups = plan.dup_groups[: int(plan.dup_counts[0])].tolist()
        rows = plan.dup_loffs[: int(plan.dup_counts[1])].tolist()
        assert (plan.dup_groups[len(groups) :] == -1).all()
        return plan.dst.tolist(), {p: rows[s : s + n] for p, s, n in groups}

    results = raise_any(spmd(body))
    num_rows = 5 * 4 + 3 * 2 * 2
    for rank in range(3):
        expected: dict[int, list[int]] = {}
        for dst, _ in results:
            for token in range(5):
                raw = [d if d >= 0 else -d - 1 for d in dst[token * 4 : token * 4 + 4]]
                here = [r % num_rows for r in raw if r // num_rows == rank]
                if len(here) > 1:
                    expected[here[0]] = here[1:]
        assert results[rank][1] == expected
        assert expected


BAD_INPUT: dict[str, tuple[Callable[[Buffer, Batch, Any], Any], str]] = {
    "id too large": (
        lambda b, t, p: b.dispatch(t.hidden, t.topk_weights, torch.where(t.topk_ids == 0, 6, t.topk_ids)),
        "expert id 6 is outside 0..5",
    ),
    "sentinel": (
        lambda b, t, p: b.dispatch(t.hidden, t.topk_weights, torch.full_like(t.topk_ids, -1)),
        "expert id -1 is outside 0..5; there is no sentinel id",
    ),
    "transposed": (
        lambda b, t, p: b.dispatch(t.hidden, t.topk_weights, t.topk_ids.T.contiguous()),
        "topk_experts_sk is torch.int32 (4, 5)",
    ),
    "int64 ids": (
        lambda b, t, p: b.dispatch(t.hidden, t.topk_weights, t.topk_ids.long()),
        "topk_experts_sk is torch.int64",
    ),
    "float32 rows": (
        lambda b, t, p: b.dispatch(t.hidden.float(), t.topk_weights, t.topk_ids),
        "hidden_sh is torch.float32",
    ),
    "one row short": (lambda b, t, p: b.dispatch(t.hidden[:4], t.topk_weights, t.topk_ids), "(4, 24)"),
    "strided rows": (
        lambda b, t, p: b.dispatch(t.hidden.T.contiguous().T, t.topk_weights, t.topk_ids),
        "contiguous torch.bfloat16 (5, 24) is needed",
    ),
    "wrong counts": (
        lambda b, t, p: b.dispatch(t.hidden, t.topk_weights, t.topk_ids, torch.zeros(6, dtype=torch.int32)),
        "tokens_per_expert is not the bincount",
    ),
    "no plan and no ids": (lambda b, t, p: b.dispatch(t.hidden), "topk_experts_sk is needed"),
    "foreign plan": (lambda b, t, p: b.dispatch(t.hidden, plan=replace(p, NvS=p.NvS + 4)), "another geometry"),
    "sliced rows to combine": (lambda b, t, p: b.combine(p, torch.zeros(8, 24).bfloat16()), "hidden_nvsh is"),
    "zero copy of another tensor": (
        lambda b, t, p: b.combine(p, b.hidden_nvsh_buffer_view.clone(), zero_copy=True),
        "must alias the Buffer's rows",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_on_one_rank_is_refused_on_every_rank(name: str) -> None:
    call, message = BAD_INPUT[name]

    def body(comm: Comm, buffer: Buffer, tokens: Batch) -> None:
        plan = fresh(buffer, tokens)[3]
        if comm.rank == 1:
            call(buffer, tokens, plan)
        elif "combine" in name or "zero copy" in name:
            buffer.combine(plan, buffer.hidden_nvsh_buffer_view)
        else:
            fresh(buffer, tokens)

    results = spmd(body)
    for result in results:
        assert isinstance(result, AssertionError), result
        assert str(result).startswith("rank 1: ")
        assert message in str(result)


def test_life_cycle() -> None:
    def body(comm: Comm, buffer: Buffer, tokens: Batch) -> None:
        plan = fresh(buffer, tokens)[3]
        buffer.destroy()
        buffer.destroy()
        assert buffer.destroyed
        with pytest.raises(AssertionError, match="has been destroyed"):
            fresh(buffer, tokens)
        with pytest.raises(AssertionError, match="has been destroyed"):
            buffer.combine(plan, buffer.hidden_nvsh_buffer_view)

    raise_any(spmd(body))


def test_ranks_must_construct_the_same_buffer() -> None:
    def on_rank(comm: Comm) -> None:
        Buffer(5 + comm.rank, 24, 4, 6, 2, token_padding=4, group=comm)

    for outcome in threads.run(on_rank, 2, 20):
        assert isinstance(outcome.error, AssertionError)
        assert "ranks construct different Buffers" in str(outcome.error)
