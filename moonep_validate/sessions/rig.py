"""What does a scenario hold in its hands? A rig opens sessions, gives batches, and owns all poisoning.

Memory is poisoned only where the contract leaves its content undefined (docs/contract.md, I10): the returned
tail, unused slots, the pads and tails of expert outputs, scratch of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.data.problem import CPU, Batch, batch, expert_weights
from moonep_validate.data.transforms import Weights, transformed_weights
from moonep_validate.faults import Seams
from moonep_validate.reference.moves import rows_of
from moonep_validate.sessions.inputs import Inputs
from moonep_validate.sessions.protocols import BufferDoor, EngineDoor, LayerDoor
from moonep_validate.sessions.schedule import Launch, interleaving, launches
from moonep_validate.trace.trace import Recorder, Relation
from moonep_validate.worlds.comm import Comm

NAN = float("nan")
_BYTE_POISON = 0xA5  # a usual pair of E2M1 codes: bytes have no value that says "never written"
_FIRST_OF_OTHERS = 16  # no scenario has as many layers of its own


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
    open_session: Callable[[Rig], LayerDoor]
    poison_value: float = NAN
    relations: list[Relation] = field(default_factory=list)
    layers: dict[int, Weights] = field(default_factory=dict)
    device: torch.device = CPU
    experts: str = "reference"

    @property
    def data(self) -> Inputs:
        """Other tensors of the case than its batch."""
        return Inputs(self.case, self.comm.rank)

    def but(self, **changes: int | str | None) -> Rig:
        """A rig whose case has other fields: its sessions and batches are of that case, and judged so."""
        return replace(self, case=self.case.session(**changes), recorder=self.recorder.of(changes))

    def among(self, *groups: Sequence[int]) -> Rig:
        """A rig for the ranks of one of some groups, the one that this rank is in; collective.

        Args:
            groups: ranks of this rig, of each group in the order of its own ranks; each rank is in one.
        """
        comm = self.comm.split(groups)
        made = self.but(R=comm.size)
        ranks = comm.exchange("ranks of the group", self.comm.rank)
        return replace(made, comm=comm, recorder=made.recorder.of({"ranks": ranks}))

    @contextmanager
    def open(self) -> Iterator[LayerDoor]:
        """A session that is closed at the end, unless its rank has failed by then.

        A rank that failed leaves its session open: closing is collective, and its peers may not come.
        """
        with self.recorder.call("open", "open"):
            session = self.open_session(self)
        yield session
        with self.recorder.call("close", "close"):
            session.close()

    @contextmanager
    def open_buffer(self) -> Iterator[BufferDoor]:
        """As ``open``, with the single stages of a Buffer.

        Raises:
            TypeError: if the subject has no such door; its ``supports`` should have said so.
        """
        with self.open() as session:
            if not isinstance(session, BufferDoor):
                raise TypeError(_no_door(self.case, session, "Buffer"))
            yield session

    @contextmanager
    def open_engine(self) -> Iterator[EngineDoor]:
        """As ``open``, with what an engine can do around a Buffer.

        Raises:
            TypeError: if the subject has no such door; its ``supports`` should have said so.
        """
        with self.open() as session:
            if not isinstance(session, EngineDoor):
                raise TypeError(_no_door(self.case, session, "engine"))
            yield session

    def launches(self, count: int, buffers: int, seed: int) -> list[Launch]:
        """How each batch in flight is launched, see ``schedule.launches``."""
        return launches(count, buffers, seed)

    def launch_order(self, batches: Sequence[Launch], seed: int) -> list[tuple[str, int]]:
        """In which order, see ``schedule.interleaving``; behind a seam, so that a fault can break a rule of it."""
        order: list[tuple[str, int]] = self.seams.around("schedule", interleaving)(batches, seed)
        return order

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

    def poison(self, tensor: Tensor, nan: int | None = None) -> None:
        """Fill undefined memory; bytes get a pattern, or ``nan``, the byte that decodes to NaN."""
        usual = _BYTE_POISON if nan is None or self.poison_value == self.poison_value else nan
        tensor.fill_(self.poison_value if tensor.is_floating_point() else usual)

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


def _no_door(case: Case, session: LayerDoor, door: str) -> str:
    return (
        f"the scenario {case.scenario} needs the {door} door, and a {type(session).__name__} has none; "
        "declare it in needs= of the scenario, so that the case is not run on this subject"
    )
