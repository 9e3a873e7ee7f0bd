"""Faults of the plan: what dispatch returns beside its rows is wrong, the rows themselves are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moonep_validate.faults import Next, fault


def _with_plan(result: tuple[Any, ...], **fields: Any) -> tuple[Any, ...]:
    """The results with other fields in the plan, where it was made; a replay keeps the plan that it was given."""
    made = result[2] is not None  # to return another object would be a fault of dispatch, A2
    return (*result[:3], replace(result[3], **fields), *result[4:]) if made else result


@fault("routes-swap-experts", on="buffer.dispatch", stage="plan", bugs="B20 B22 K06")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """The plan of one rank sends its first and its last route to each other's row."""
    result = call(*args, **kwargs)
    dst = result[3].dst.clone()
    raw = torch.where(dst < 0, -dst - 1, dst)
    dst[0], dst[-1] = raw[-1], raw[0]
    return _with_plan(result, dst=dst)


@fault("row-used-twice", on="buffer.dispatch", stage="plan", bugs="B36 K10")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """Two routes of one rank share a row; one row is nobody's."""
    result = call(*args, **kwargs)
    dst = result[3].dst.clone()
    dst[-1] = dst[0]
    return _with_plan(result, dst=dst)


@fault("row-behind-last-group", on="buffer.dispatch", stage="plan", bugs="B48 K13")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """A destination lies in the undefined rows after the last group."""
    result = call(*args, **kwargs)
    dst, rows = result[3].dst.clone(), result[3].NvS
    dst[0] = (int(dst[0]) // rows + 1) * rows - 1
    return _with_plan(result, dst=dst)


@fault("cu-seqlens-are-starts", on="buffer.dispatch", stage="plan", bugs="K13")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """cu_seqlens holds the starts of the groups instead of their ends."""
    result = call(*args, **kwargs)
    if result[2] is None:
        return result
    starts = torch.cat([torch.zeros_like(result[2][:1]), result[2][:-1]])
    return (*result[:2], starts, *result[3:])


@fault("slot-table-differs", on="buffer.dispatch", stage="plan", bugs="K12 K21")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """One rank has another experts_to_copy than its peers."""
    result = call(*args, **kwargs)
    return _with_plan(result, experts_to_copy=result[3].experts_to_copy.roll(1, dims=0))


@fault("own-expert-in-slot", on="buffer.dispatch", stage="plan", bugs="B23 K21", ranks="all")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """The last slot of each rank names an expert that the rank owns."""
    result = call(*args, **kwargs)
    table = result[3].experts_to_copy.clone()
    table[:, -1] = torch.arange(len(table)) * (result[3].E // len(table))
    return _with_plan(result, experts_to_copy=table)


@fault("zero-fill-off-by-one", on="buffer.dispatch", stage="plan", bugs="K08 K13")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """Each padding range starts one row late."""
    result = call(*args, **kwargs)
    ranges = result[3].zero_fill_ranges.clone()
    ranges[:, 0] += (ranges[:, 1] > 0).int()
    return _with_plan(result, zero_fill_ranges=ranges)


@fault("stats-count-own", on="buffer.dispatch", stage="plan", bugs="B45 B46 K13")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """remote_stats counts one expert too many."""
    result = call(*args, **kwargs)
    return _with_plan(result, remote_stats=result[3].remote_stats + 1)


@fault("duplicates-not-marked", on="buffer.dispatch", stage="plan", bugs="K10")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """Every route of one rank is marked as primary."""
    result = call(*args, **kwargs)
    dst = result[3].dst
    return _with_plan(result, dst=torch.where(dst < 0, -dst - 1, dst))


@fault("dedup-list-reversed", on="buffer.dispatch", stage="plan", bugs="K10 K28")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """The duplicates of a token are listed in descending k."""
    result = call(*args, **kwargs)
    rows = result[3].dup_loffs.clone()
    for _primary, first, count in result[3].dup_groups[: int(result[3].dup_counts[0])].tolist():
        rows[first : first + count] = rows[first : first + count].flip(0)
    return _with_plan(result, dup_loffs=rows)


@fault("dedup-list-short", on="buffer.dispatch", stage="plan", bugs="K09 K10")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """One rank's last group of duplicates is missing from its count."""
    result = call(*args, **kwargs)
    counts = result[3].dup_counts
    return _with_plan(result, dup_counts=(counts - 1).clamp(min=0))


@fault("groups-dealt-evenly", on="buffer.dispatch", stage="plan", bugs="K13 B46")
def _(call: Next, *args: Any, **kwargs: Any) -> Any:
    """One rank's cu_seqlens deal its rows evenly to all groups, whatever the plan says."""
    rows, weights, cu_seqlens, plan, *rest = call(*args, **kwargs)
    if cu_seqlens is not None:
        groups = len(cu_seqlens)
        cu_seqlens = (torch.arange(1, groups + 1) * int(cu_seqlens[-1]) // groups).to(cu_seqlens)
    return rows, weights, cu_seqlens, plan, *rest


@fault(
    "plan-size-wrong",
    on="buffer.dispatch",
    stage="plan",
    bugs="K13 K14",
    words={"size": ("N", "R", "E", "NvS", "K")},
)
def _(call: Next, *args: Any, size: str = "N", **kwargs: Any) -> Any:
    """One rank's plan names a size that is one too large; its tensors are right."""
    result = call(*args, **kwargs)
    return _with_plan(result, **{size: getattr(result[3], size) + 1})
