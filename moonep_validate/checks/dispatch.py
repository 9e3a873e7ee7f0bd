"""Did every token arrive, bit for bit, where the build's own plan says?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from moonep_validate.checks import Compared, check, differ_bits
from moonep_validate.facts import Step


@check("D1", "dispatch")
def payload(s: Step) -> Iterator[Compared]:
    """Each planned row holds its token's bits and route weight."""
    rows, weights = s.tap("dispatch", "rows"), s.tap("dispatch", "row_weights")
    hidden, route_weights = s.tap("dispatch", "hidden"), s.tap("dispatch", "topk_weights")
    inside = s.in_range
    rank, row = torch.from_numpy(s.rank_of[inside]), torch.from_numpy(s.row_of[inside])
    routes = np.flatnonzero(inside)
    token = torch.from_numpy(routes // s.case.K)

    def place(i: tuple[int, ...]) -> dict[str, int]:
        return {**s.route_place(int(routes[i[0]])), **({"column": i[1]} if len(i) > 1 else {})}

    yield differ_bits("hidden", hidden.flatten(0, 1)[token], rows[rank, row], place)
    want = route_weights.flatten()[torch.from_numpy(routes)]
    yield differ_bits("route weight", want, weights[rank, row], place)


@check("D2", "dispatch")
def zero_padding(s: Step) -> Iterator[Compared]:
    """Padding rows are zero, with zero weight."""
    occupied = s.row_route >= 0
    inside = s.row_group < s.layout.num_groups
    rank, row = np.nonzero(inside & ~occupied)
    index = (torch.from_numpy(rank), torch.from_numpy(row))

    def place(i: tuple[int, ...]) -> dict[str, int]:
        return {"rank": int(rank[i[0]]), "row": int(row[i[0]]), **({"column": i[1]} if len(i) > 1 else {})}

    for name in ("rows", "row_weights"):
        got = s.tap("dispatch", name)[index]
        yield differ_bits(f"padding {name}", torch.zeros_like(got), got, place)
    if not len(rank):
        yield Compared(int(inside.sum()))  # no padding is an answer too: every row inside a group is occupied
