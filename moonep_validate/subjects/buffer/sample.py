"""Which rows of the experts are kept where not all are? A few, whole, with the weights of their groups."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moonep_validate.sessions.protocols import GroupedRows
from moonep_validate.trace.recording import sampled_rows
from moonep_validate.trace.trace import Call


def put_sample(call: Call, sent: GroupedRows, weights: Mapping[str, Tensor], out: Tensor) -> None:
    """Keep some rows whole, in and out, with the weights of their groups; P1 judges these."""
    sample = sampled_rows(sent.end)
    if "valid" in call.tensors:  # most rows of groups that are computed alone may be padding
        occupied = call.tensors["valid"].nonzero()[:, 0]
        sample = occupied[sampled_rows(len(occupied))]
    sample = sample.to(out.device)
    groups = torch.searchsorted(sent.cu_seqlens.long(), sample, right=True)
    used, place = groups.unique(return_inverse=True)
    row_weights = None if sent.row_weights is None else sent.row_weights[sample]
    call.whole(sample=sample, sample_group=place, rows=sent.rows[sample], row_weights=row_weights, out=out[sample])
    call.whole(**{name: weight[used] for name, weight in weights.items()})
