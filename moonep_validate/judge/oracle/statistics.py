"""What does a plan cost? The figures that users of MoonEP tune by."""

from __future__ import annotations

from typing import Any

import numpy as np

from moonep_validate.judge.oracle.plan import ExpectedPlan


def plan_stats(plan: ExpectedPlan, bytes_per_expert: int) -> dict[str, Any]:
    """Figures of one plan.

    Args:
        plan: all ranks.
        bytes_per_expert: see ``WeightFormat.expert_bytes``.

    Returns:
        ``slots_used``: copies of experts in the whole group; ``slots_used_per_rank`` and ``slots`` (there are).
        ``experts_read_remotely``: (rank, expert) pairs computed without a slot (generation A only).
        ``rows_moved``: rows computed away from their expert's home rank; ``rows`` in all.
        ``load_imbalance``: largest home load over the mean, i.e. what the plan evens out.
        ``padding_rows``, and ``padding_ratio`` = padding rows / all rows of the groups.
        ``capacity_utilisation``: the fullest rank's last group end / NvS.
        ``prefetch_bytes`` in the group, and ``prefetch_bytes_max_rank`` = received by the busiest rank.
    """
    layout = plan.layout
    home = layout.home(np.arange(layout.E))
    slots = (plan.experts_to_copy >= 0).sum(axis=1)
    stay = plan.alloc[np.arange(layout.E), home].sum()
    rows = layout.R * layout.capacity
    ends = plan.cu_seqlens[:, -1]
    home_load = np.bincount(home, weights=plan.alloc.sum(axis=1), minlength=layout.R)
    return {
        "slots_used": int(slots.sum()),
        "slots_used_per_rank": slots.tolist(),
        "slots": layout.R * layout.num_slots,
        "experts_read_remotely": int(plan.remote_stats[:, 0].sum() - slots.sum()),
        "rows": rows,
        "rows_moved": int(rows - stay),
        "load_imbalance": float(home_load.max() / layout.capacity),
        "padding_rows": int(ends.sum() - rows),
        "padding_ratio": float((ends.sum() - rows) / ends.sum()),
        "capacity_utilisation": float(ends.max() / layout.num_rows),
        "prefetch_bytes": int(slots.sum()) * bytes_per_expert,
        "prefetch_bytes_max_rank": int(slots.max()) * bytes_per_expert,
    }
