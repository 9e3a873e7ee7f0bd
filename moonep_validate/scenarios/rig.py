"""What does a scenario hold in its hands? A rig opens sessions, gives batches, and owns all poisoning.

Memory is poisoned only where the contract leaves its content undefined (docs/contract.md, I10): the returned
tail, unused slots, the pads and tails of expert outputs, scratch of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.data.problem import CPU, Batch, batch, expert_weights
from moonep_validate.data.transforms import Weights, transformed_weights
from moonep_validate.faults import Seams
from moonep_validate.reference.moves import rows_of
from moonep_validate.trace.trace import Recorder, Relation
from moonep_validate.worlds.comm import Comm

NAN = float("nan")
_BYTE_POISON = 0xA5
_NAN_SCALE = 0xFF
_FIRST_OF_OTHERS = 16


@dataclass(frozen=True)
class Dispatched:
    """What a dispatch gave one rank.

    Attributes:
        rows: ``[NvS, H]``.
        row_weights: ``[NvS]``, or None.
        cu_seqlens: ``[G]``; of a replay, that of the dispatch which made the plan.
        plan: the subject's plan object.
        turn: of rows that are a view: the write that they are promised, where the Buffer stamps leases.
    """

    rows: Tensor
    row_weights: Tensor | None
    cu_seqlens: Tensor
    plan: Any
    turn: int | None = None

    @property
    def end(self) -> int:
        """First row after the last group."""
        return int(self.cu_seqlens[-1])


class Session(Protocol):
    """One live subject on one rank; ``buffer`` and the single stages only where the subject has them."""

    buffer: Any

    def forward(self, step: str, batch: Batch, layer: int = 0, mark: bool = False, **flags: Any) -> Tensor:
        """Run dispatch, prefetch, experts and combine as one recorded step; returns ``[S, H]``."""

    def close(self) -> None:
        """Collective."""


@dataclass
class Rig:
    """Everything one rank's scenario needs.

    Attributes:
        open_session: the subject's ``open``.
        poison_value: what undefined memory is filled with from now on.
        relations: promises made so far, the same on every rank.
        layers: layers with transformed weights by number.
        device: where data is made; the CPU for an engine, which moves it as it likes.
        experts: name of the part that computes the expert rows, see ``experts.find``.
    """

    case: Case
    comm: Comm
    recorder: Recorder
    seams: Seams
    open_session: Callable[[Rig], Any]
    poison_value: float = NAN
    relations: list[Relation] = field(default_factory=list)
    layers: dict[int, Weights] = field(default_factory=dict)
    device: torch.device = CPU
    experts: str = "reference"

    @contextmanager
    def open(self, **changes: Any) -> Iterator[Any]:
        """A session that is closed at the end, unless its rank has failed by then.

        Args:
            changes: fields of the case in which this session differs; only ``slots`` is known to the judge.
        """
        with self.recorder.call("open", "open"):
            session = self.open_session(replace(self, case=self.case.but(**changes)) if changes else self)
        yield session
        with self.recorder.call("close", "close"):
            session.close()

    def batch(self, tokens: int | None = None) -> Batch:
        """This rank's tokens; as many as the case says, unless ``tokens`` says otherwise."""
        return batch(self.case, self.comm.rank, tokens, self.device)

    def here(self, tokens: Batch) -> Batch:
        """A batch on the device of this rank."""
        here = self.device
        hidden, ids, weights = (t.to(here) for t in (tokens.hidden, tokens.topk_ids, tokens.topk_weights))
        return replace(tokens, hidden=hidden, topk_ids=ids, topk_weights=weights)

    def layer(self, weights: Weights) -> int:
        """The number of a layer with transformed weights; above those of the case's own layers."""
        number = _FIRST_OF_OTHERS + len(self.layers)
        self.layers[number] = weights
        return number

    def expert_weights(self, rank: int, layer: int) -> dict[str, Tensor]:
        """Weights of the experts that ``rank`` owns in a layer, see ``problem.expert_weights``."""
        if layer in self.layers:
            return transformed_weights(self.case, rank, self.layers[layer])
        return expert_weights(self.case, rank, layer, self.device)

    def poison(self, tensor: Tensor) -> None:
        """Fill undefined memory; bytes get a byte pattern, since they have no NaN."""
        tensor.fill_(self.poison_value if tensor.is_floating_point() else _BYTE_POISON)

    def poison_scale(self, scale: Tensor) -> None:
        """Fill undefined E8M0 scales: they do have a NaN, and a large number is like any other byte."""
        scale.fill_(_NAN_SCALE if self.poison_value != self.poison_value else _BYTE_POISON)

    def poison_padding(self, rows: Tensor, end: int, ranges: Tensor) -> None:
        """Fill rows after the last group, and the padding rows of ``zero_fill_ranges``."""
        self.poison(rows[end:])
        rows.index_fill_(0, rows_of(ranges).to(rows.device), self.poison_value)

    def promise(
        self,
        id: str,
        step: str,
        base: str,
        *taps: str,
        tokens: Sequence[Sequence[int]] | None = None,
        terms: Mapping[str, int] | None = None,
    ) -> None:
        """Promise that taps (``op.name``) of ``step`` equal those of ``base`` bit for bit.

        Args:
            id: of the promise.
            step, base: names of steps.
            taps: which.
            tokens: which token of ``base`` each token equals, see ``Relation``.
            terms: step -> factor: a sum that takes the place of ``base``, equal by value.
        """
        places = None if tokens is None else tuple(map(tuple, tokens))
        self.relations.append(Relation(id, step, base, taps, places, tuple((terms or {}).items())))
