"""What does a scenario hold in its hands? A rig opens sessions, gives batches, and owns all poisoning.

Memory is poisoned only where the contract leaves its content undefined (docs/contract.md, I10): the returned
tail, unused slots, the pads and tails of expert outputs, scratch of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from moonep_validate.case import Case
from moonep_validate.faults import Seams
from moonep_validate.problem import Batch, batch
from moonep_validate.trace import Recorder, Relation
from moonep_validate.worlds.comm import Comm

NAN = float("nan")


class Session(Protocol):
    """One live subject on one rank."""

    def forward(self, step: str, batch: Batch, layer: int = 0) -> Tensor:
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
    """

    case: Case
    comm: Comm
    recorder: Recorder
    seams: Seams
    open_session: Callable[[Rig], Session]
    poison_value: float = NAN
    relations: list[Relation] = field(default_factory=list)

    @contextmanager
    def open(self) -> Iterator[Session]:
        """A session that is closed at the end, unless its rank has failed by then."""
        with self.recorder.call("open", "open"):
            session = self.open_session(self)
        yield session
        with self.recorder.call("close", "close"):
            session.close()

    def batch(self) -> Batch:
        """This rank's tokens."""
        return batch(self.case, self.comm.rank)

    def poison(self, tensor: Tensor) -> None:
        """Fill undefined memory."""
        tensor.fill_(self.poison_value)

    def promise(self, step: str, base: str, *taps: str) -> None:
        """Promise that taps (``op.name``) of ``step`` equal those of ``base`` bit for bit."""
        self.relations.append(Relation(step, base, taps))
