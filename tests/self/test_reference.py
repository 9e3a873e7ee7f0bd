"""The reference Buffer of generation B keeps the contract where our own cases do not look."""

from __future__ import annotations

import gc
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.data.problem import Batch, batch
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.run import run_case
from moonep_validate.reference import moonep_a, moonep_b
from moonep_validate.reference.moves import moves_of
from moonep_validate.reference.transport import MoonEPCommPlan
from moonep_validate.worlds import threads
from moonep_validate.worlds.comm import Comm

CASE = Case.parse("genB+R3+E6+K4+S5+H24+pad4+zipf:1.0")


class Buffer(moonep_b.Buffer):
    relaxed = True  # sizes that hardware refuses


def spmd(body: Callable[[Comm, Any, Batch], Any], case: Case = CASE, buffer_class: Any = Buffer) -> list[Any]:
    """Run on all ranks with a fresh Buffer; results per rank, or the exception."""
    results: list[Any] = [None] * case.R

    def on_rank(comm: Comm) -> None:
        buffer = buffer_class(case.S, case.H, case.K, case.E, case.R, token_padding=case.pad, group=comm)
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


def fresh(buffer: Any, tokens: Batch, **options: Any) -> tuple[Any, ...]:
    result: tuple[Any, ...] = buffer.dispatch(tokens.hidden, tokens.topk_weights, tokens.topk_ids, **options)
    return result


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ep_ranks": 4}, "num_ep_ranks=4, but the group has 2 ranks"),
        ({"E": 7}, "E=7 is not divisible by R=2"),
        ({"K": 33}, "K=33 experts per token: must be 1 to 32"),
        ({"token_padding": 0}, "pad is 0, an int above 0 is needed"),
        ({"token_padding": 2.0}, "pad is 2.0, an int above 0 is needed"),
        ({"num_sms": 0}, "num_sms is 0, an int above 0 is needed"),
        ({"comm_stream_priority": "high"}, "comm_stream_priority must be an int"),
        ({"enable_pdl": 1}, "enable_pdl a bool"),
        ({"S": 0}, "S is 0, an int above 0 is needed"),
    ],
)
@pytest.mark.parametrize("module", [moonep_a, moonep_b])
def test_constructor_refuses_bad_arguments_on_every_rank(module: Any, arguments: Any, message: str) -> None:
    def on_rank(comm: Comm) -> None:
        module.Buffer(**{"S": 4, "H": 128, "K": 2, "E": 4, "num_ep_ranks": 2, "group": comm, **arguments})

    for outcome in threads.run(on_rank, 2, 20):
        assert isinstance(outcome.error, AssertionError)
        assert message in str(outcome.error)


def test_strict_stand_ins_refuse_what_only_hardware_refuses() -> None:
    def on_rank(comm: Comm) -> None:
        with pytest.raises(AssertionError, match="is no multiple of 4: R must be even"):
            moonep_b.Buffer(4, 128, 2, 3, 3, group=comm)
        buffer: Any = moonep_b.Buffer(4, 24, 2, 12, 3, group=comm)
        tokens = batch(Case.parse("genB+R3+E12+K2+S4+H24"), comm.rank)
        rows, weights, _, plan = fresh(buffer, tokens)  # H=24 can be dispatched but not combined
        with pytest.raises(AssertionError, match="H=24 is no multiple of 128"):
            buffer.combine(plan, rows, weights)
        local, pool = torch.zeros(4, 64, 128).bfloat16(), torch.zeros(3, 4, 64, 128).bfloat16()
        names = ("gate", "up", "down")
        arguments = {f"local_{n}_weight": local for n in names} | {f"{n}_prefetch_buffer": pool for n in names}
        with pytest.raises(AssertionError, match="must be multiples of 128"):
            buffer.prefetch_weight(plan, **arguments)

    for outcome in threads.run(on_rank, 3, 20):
        assert outcome.error is None, outcome.error


def test_packed_weights_need_all_scales_and_only_they_take_them() -> None:
    def on_rank(comm: Comm) -> None:
        case = Case.parse("genA+R2+E4+K2+S3")
        buffer: Any = moonep_a.Buffer(3, 128, 2, 4, 2, group=comm)
        plan = fresh(buffer, batch(case, comm.rank))[3]
        weight, scale = torch.zeros(6, 128, 128, dtype=torch.uint8), torch.zeros(6, 128, 128, dtype=torch.uint8)
        weights = {f"full_{name}_weight": weight for name in ("gate", "up", "down")}
        with pytest.raises(AssertionError, match="2 of 3 scale tensors are given; give all or none"):
            buffer.prefetch_weight(plan, **weights, full_gate_scale=scale, full_up_scale=scale)
        scales = {f"full_{name}_scale": scale for name in ("gate", "up", "down")}
        with pytest.raises(AssertionError, match="scales are only legal with uint8 or int8 weights"):
            buffer.prefetch_weight(plan, **{n: w.bfloat16() for n, w in weights.items()}, **scales)
        small = {n: s[:, :64] for n, s in scales.items()}
        with pytest.raises(AssertionError, match="scale bytes of an expert must be a multiple of 16384"):
            buffer.prefetch_weight(plan, **weights, **{n: s.contiguous() for n, s in small.items()})
        with pytest.raises(AssertionError, match=r"a weight tensor has 5 rows, E\+B = 6 are needed"):
            buffer.prefetch_weight(plan, **{n: w[:5] for n, w in weights.items()})

    for outcome in threads.run(on_rank, 2, 20):
        assert outcome.error is None, outcome.error


def test_generation_a_refuses_training_with_few_slots() -> None:
    def on_rank(comm: Comm) -> None:
        buffer: Any = moonep_a.Buffer(3, 128, 2, 4, 2, B=1, group=comm)
        plan = fresh(buffer, batch(Case.parse("genA+R2+E4+K2+S3"), comm.rank))[3]
        grads = [torch.zeros(5, 1, 1)] * 3 + [torch.zeros(2, 1, 1, 1)] * 3
        with pytest.raises(AssertionError, match="training needs B = E/R slots"):
            buffer.reduce_grad(plan, *grads)

    for outcome in threads.run(on_rank, 2, 20):
        assert outcome.error is None, outcome.error


def test_a_buffer_that_is_collected_without_destroy_warns_if_asked() -> None:
    def on_rank(comm: Comm) -> None:
        moonep_b.Buffer(3, 128, 2, 4, 2, group=comm, explicitly_destroy=True)

    def run_and_collect() -> None:
        threads.run(on_rank, 2, 20)
        gc.collect()

    with pytest.warns(ResourceWarning, match="collected without destroy"):
        run_and_collect()


def test_helpers_that_integrations_import() -> None:
    from moonep_validate.reference.moonep_a import buffer as a
    from moonep_validate.reference.moonep_b import buffer as b

    for module in (a, b):
        assert module.pad_to_granularity(1) == 2 * 2**20
        assert module.pad_dim0_for_alignment((3, 1024), torch.uint8) == 2048
        assert module.pad_dim0_for_alignment((3, 1024), torch.bfloat16) == 1024
        tensor = module.create_nvl_dist_tensor((2, 5), torch.bfloat16, 1, 4)
        assert tuple(tensor.shape) == (8, 5)
        assert tuple(module.create_nvl_single_owner_tensor((2, 5), torch.int32, 0, 1, 4).shape) == (2, 5)
        assert module.Buffer.__module__.endswith(module.__name__.split(".")[-2])


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_derived_from_a_plan_follows_its_tensors(inference: bool) -> None:
    """Two ranks with one token each, both computed on rank 1; then the plan of rank 0 changes in place."""
    with torch.inference_mode(inference):
        plan = MoonEPCommPlan(
            dst=torch.tensor([5], dtype=torch.int32),
            experts_to_copy=torch.full((2, 1), -1, dtype=torch.int32),
            zero_fill_ranges=torch.zeros((2, 2), dtype=torch.int32),
            remote_stats=torch.zeros(2, dtype=torch.int32),
            dup_groups=torch.zeros((4, 3), dtype=torch.int32),
            dup_loffs=torch.zeros(4, dtype=torch.int32),
            dup_counts=torch.zeros(2, dtype=torch.int32),
            **{"N": 1, "R": 2, "E": 2, "NvS": 4, "K": 1},
        )
        rows = []
        for destination in (5, 5, 6):
            plan.dst.fill_(destination)
            rows.append([row.tolist() for _, row in moves_of(plan, 0, torch.device("cpu")).weights])
        changed = copy(plan)  # with row numbers in place of ids, as prefetch gets it
        object.__setattr__(changed, "experts_to_copy", torch.tensor([[-1], [0]], dtype=torch.int32))
        pushed = [
            [slot.tolist() for slot, _ in moves_of(one, 0, torch.device("cpu")).pushes] for one in (plan, changed)
        ]
    assert rows == [[[], [1]], [[], [1]], [[], [2]]]
    assert pushed == [[[], []], [[], [0]]]


@pytest.fixture
def unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world in which no rank can map the memory of another, as on several hosts: rows travel as messages."""
    monkeypatch.setattr(threads._Rank, "peers", lambda self, tensor: None)


@pytest.mark.parametrize("scenario", ["variants", "life", "packed", "grads", "replayed_plan", "combine_only"])
@pytest.mark.parametrize("generation", ["A", "B"])
def test_without_mapped_memory_rows_travel_as_messages(unmapped: None, generation: str, scenario: str) -> None:
    case = Case.parse(f"gen{generation}+R4+E12+K3+S7+H24+I8+pad4+hot:1+{scenario}+@slot_used")
    _, verdict = run_case(Job(), case)
    assert verdict.ok, verdict.diagnosis
    stamped = [result for result in verdict.results if result.check in ("H1", "H3")]
    assert stamped
    assert {result.status for result in stamped} == {"not_applicable"}
    assert any("memory is not mapped" in result.reason for result in stamped)


def test_without_stamps_the_order_of_reads_is_unknown_and_no_pass(unmapped: None) -> None:
    _, verdict = run_case(Job(), Case.parse("genB+R2+E6+K4+S7+H24+I8+hot:1+in_flight:1"))
    assert verdict.status == "unknown"
    assert not verdict.ok
