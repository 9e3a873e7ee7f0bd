"""Does an engine hand MoonEP its tokens, ids and weights as the contract asks, and leave nothing behind?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import mode

import numpy as np
import torch
from torch import Tensor

from moonep_validate.judge.checks import Compared, axes, differ, differ_bits
from moonep_validate.judge.facts import Absent, Missing, Step, tally
from moonep_validate.judge.registry import check


def _tokens(s: Step, rank: int) -> int:
    """Real tokens of a rank."""
    return int(s.call("layer", rank).info.get("tokens", s.case.S))


@check("I8", "load", needs="full")
def loaded_bytes(s: Step) -> Iterator[Compared]:
    """A rank's weights are the checkpoint's bytes, in expert order (generation A: all experts, B: its own)"""
    for name in s.stored_names("load", "local_"):
        want = s.tap("load", f"local_{name}").flatten(0, 1)
        for rank in range(s.case.R):
            first, held = _held(s, rank, name)
            place = lambda i: {"rank": rank, "expert": first + i[0], "weight_row": i[1], "weight_column": i[2]}  # noqa: B023, E731
            yield differ_bits(f"{name} weight", want[first : first + len(held)], held, place)


def _held(s: Step, rank: int, name: str) -> tuple[int, Tensor]:
    """The first expert of which a rank held the weights after its load, and these weights, in order."""
    count, everybody = s.case.experts_per_rank, s.layout.num_home_groups == s.case.E
    first = 0 if everybody else rank * count
    if "prefetch" not in s.ops():  # groups that are computed alone
        return first, s.one("experts", rank, f"weight_{name}")[: s.layout.num_home_groups]
    # Own rows are as they were before prefetch; what it changed of others is U2's.
    own = s.one("prefetch", rank, f"local_{name}")
    if not everybody or f"full_{name}" in s.call("prefetch", rank).info.get("changed", []):
        return rank * count, own
    held = s.one("experts", rank, f"weight_{name}")[: s.case.E].clone()
    held[rank * count : (rank + 1) * count] = own
    return first, held


@check("I1", "prepare", needs="digest", about_callers=True)
def padded_tokens(s: Step) -> Iterator[Compared]:
    """Each rank dispatches its own tokens first, then rows of zero with zero weight"""
    for rank in range(s.case.R):
        n = _tokens(s, rank)
        at = lambda i: {"rank": rank, "token": i[0], "column": i[1]}  # noqa: B023, E731
        given, sent = s.one("layer", rank, "hidden"), s.one("dispatch", rank, "hidden")
        if len(sent) < n:
            yield differ("dispatched tokens", [n], [len(sent)], lambda i: {"rank": rank})  # noqa: B023
            continue
        yield differ_bits("dispatched token", given[:n], sent[:n], at)
        pads = lambda i: {"rank": rank, "token": n + i[0], "column": i[1]}  # noqa: B023, E731
        for name in ("hidden", "topk_weights"):
            got = s.one("dispatch", rank, name)[n:]
            yield differ(f"padding {name}", torch.zeros_like(got), got, pads)


@check("I2", "prepare", about_callers=True)
def legal_ids(s: Step) -> Iterator[Compared]:
    """Expert ids and weights arrive as given; an invalid id becomes a legal one of weight zero"""
    for rank in range(s.case.R):
        n = _tokens(s, rank)
        at = lambda i: {"rank": rank, "token": i[0], "k": i[1]}  # noqa: B023, E731
        ids, got = s.one("layer", rank, "topk_ids")[:n], s.one("dispatch", rank, "topk_ids")
        if len(got) < n:
            raise Missing(f"rank {rank} dispatched {len(got)} of {n} tokens: I1")
        valid = (ids >= 0) & (ids < s.case.E)
        illegal = (got < 0) | (got >= s.case.E)
        yield differ(f"dispatched expert id, in 0..{s.case.E - 1}", "legal", got, at, bad=illegal)
        yield differ("dispatched expert id", torch.where(valid, ids, got[:n]), got[:n], at)
        want = torch.where(valid, s.one("layer", rank, "topk_weights")[:n], 0)
        yield differ_bits("dispatched route weight", want, s.one("dispatch", rank, "topk_weights")[:n], at)


@check("I3", "prepare", needs="digest", about_callers=True)
def counted_ids(s: Step) -> Iterator[Compared]:
    """tokens_per_expert counts the ids that are dispatched, padding included"""
    for rank in range(s.case.R):
        if not s.has("dispatch", "tokens_per_expert"):
            raise Absent("no engine counted the tokens of this step")
        want = tally(s.one("dispatch", rank, "topk_ids").clamp(min=0).numpy(), s.case.E)
        at = lambda i: {"rank": rank, "expert": i[0]}  # noqa: B023, E731
        yield differ("tokens_per_expert", want, s.one("dispatch", rank, "tokens_per_expert"), at)


@check("I4", "prepare", about_callers=True)
def same_capacity(s: Step) -> Iterator[Compared]:
    """Every rank dispatches into a Buffer of the same capacity"""
    sizes = capacities(s)
    if len(sizes) > sum(s.has_call("dispatch", rank) for rank in sizes) and disagree(sizes):
        places, got = [*sizes], np.array([max(size) for size in sizes.values()])
        what = "capacity of a rank's Buffer, against most ranks"
        yield differ(what, np.full(len(got), mode(got.tolist())), got, lambda i: {"rank": places[i[0]]})
    s.calls("dispatch")  # on every rank, or on none
    forms = s.noted("dispatch", "hidden")
    got = np.array([int(form["shape"][0]) if (form := forms.get(rank)) else -1 for rank in range(s.case.R)])
    if -1 in got:
        raise Missing(f"rank {got.tolist().index(-1)} has no dispatch.hidden in step {s.name!r}")
    yield differ("dispatched tokens, against most ranks", np.full(s.case.R, mode(got.tolist())), got, axes("rank"))


def capacities(s: Step) -> dict[int, set[int]]:
    """Rank -> how many tokens it dispatched; where it came to no dispatch, for how many it built Buffers."""
    sent = {rank: {form["shape"][0]} for rank, form in s.noted("dispatch", "hidden").items() if form["shape"]}
    return {rank: sizes for rank in range(s.case.R) if (sizes := sent.get(rank) or _built(s, rank))}


def _built(s: Step, rank: int) -> set[int]:
    """Capacities that a rank asked Buffers for; that of the one alone which it did not get, if there is one."""
    calls = [call for call in s.calls_of(rank) if call.op == "construct" and "S" in call.info]
    refused = [call for call in calls if call.error or not call.done]
    return {call.info["S"] for call in refused or calls}


def disagree(sizes: Mapping[int, set[int]]) -> bool:
    """Whether no capacity is one of every rank that has any."""
    return bool(sizes) and not set.intersection(*sizes.values())


@check("I6", "prefetch", about_callers=True)
def prefetch_in_time(s: Step) -> Iterator[Compared]:
    """Prefetch runs between dispatch and combine, and all three use the same plan"""
    order = []
    for rank in range(s.case.R):
        if not s.case.refusal:
            s.call("layer", rank)  # or this step is no whole pass; a sampled one is
        calls = s.calls_of(rank)
        ops = [call.op for call in calls if call.op in ("dispatch", "prefetch", "combine")]
        s.call("dispatch", rank)  # both on this rank, or on none
        s.call("combine", rank)
        strange = [
            call.op for call in calls if call.info.get("same_plan") is False and not call.info.get("replay")
        ]
        strayed = any(call.info.get("same_weights") is False for call in calls) and "prefetch" in ops
        order.append(
            ", ".join(ops)
            + (f"; {strange[0]} with another plan" if strange else "")
            + ("; into other weights than the experts read" if strayed else "")
        )
    want = np.array(["dispatch, prefetch, combine"] * s.case.R)
    yield differ("calls in order", want, np.array(order), axes("rank"))


@check("I15", "life", about_callers=True)
def buffers_destroyed(s: Step) -> Iterator[Compared]:
    """Every Buffer that was built has been destroyed when the engine is closed"""
    got = np.array([call.info["living"] for call in s.calls("buffers")])
    yield differ("Buffers never destroyed", np.zeros(s.case.R, int), got, axes("rank"))
