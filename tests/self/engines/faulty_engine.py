"""``fake_engine`` with one defect at a time: the seed of a case is the place of its defect in ``DEFECTS``.

So one pool of workers serves all defects. Each is a real kind of bug of engines, or of integrations of MoonEP.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import gelu

from moonep_validate.cases.case import Case
from moonep_validate.subjects.engines import tap
from moonep_validate.subjects.engines.integration import Checkpoint, Started

if TYPE_CHECKING:
    from tests.self.engines.fake_engine import Good, Layer
else:
    from fake_engine import Good, Layer

__version__ = "1.0"

DEFECTS: dict[str, type[Layer]] = {}


def defect(layer: type[Layer]) -> type[Layer]:
    DEFECTS[layer.__name__] = layer
    return layer


@defect
class None_(Layer):  # noqa: N801
    """Honest."""


@defect
class TapsRemoved(Layer):
    """Honest; each pass runs without taps too, and raises if the result is another one."""

    def forward(self, *given: Any) -> Tensor:
        watching, hidden = tap.current, given[0].clone()
        tap.watch(None)
        plain = super().forward(*given)
        tap.watch(watching)
        tapped = super().forward(*given)
        assert torch.equal(plain, tapped), "the taps changed the result"
        assert torch.equal(hidden, given[0]), "the taps changed the input"
        return tapped


@defect
class PrefetchSkipped(Layer):
    def prefetch(self, buffer: Any, plan: Any) -> None: ...


@defect
class PrefetchOnce(Layer):
    """Slots keep what the first step put there."""

    filled = False

    def prefetch(self, buffer: Any, plan: Any) -> None:
        if not self.filled:
            super().prefetch(buffer, plan)
        self.filled = True


@defect
class SourceRowForSlot(Layer):
    def row(self, group: int, plan: Any) -> int:
        return group if group < self.case.E else int(plan.experts_to_copy[self.rank][group - self.case.E])


@defect
class PadsBeforeTokens(Layer):
    def pad(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        tokens = len(given[0])
        hidden, weights, ids = (part.roll(len(part) - tokens, 0) for part in super().pad(*given))
        return hidden, weights, ids


@defect
class PadsOfGarbage(Layer):
    def pad(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weights, ids = super().pad(*given)
        hidden[len(given[0]) :] = 3.0
        return hidden, weights, ids


@defect
class PadsOfWeightOne(Layer):
    def pad(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weights, ids = super().pad(*given)
        weights[len(given[0]) :] = 1.0
        return hidden, weights, ids


@defect
class InvalidIdsWrap(Layer):
    """-1 becomes the last expert, and keeps its weight."""

    def pad(self, hidden: Tensor, weights: Tensor, ids: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        return super().pad(hidden, weights, ids % self.case.E, capacity)


@defect
class InvalidIdsKept(Layer):
    """-1 goes to dispatch as it is."""

    def pad(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weights, ids = super().pad(*given)
        ids[: len(given[2])] = given[2]
        return hidden, weights, ids

    def count(self, ids: Tensor) -> Tensor:
        return super().count(ids[ids >= 0])


@defect
class InvalidIdsWeighted(Layer):
    """-1 becomes expert 0, and keeps its weight."""

    def pad(self, hidden: Tensor, weights: Tensor, ids: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        return super().pad(hidden, weights, ids.clamp(min=0), capacity)


@defect
class PadsNotCounted(Layer):
    def pad(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.tokens = len(given[0])
        return super().pad(*given)

    def count(self, ids: Tensor) -> Tensor:
        return super().count(ids[: self.tokens])


@defect
class OwnCapacity(Layer):
    """Each rank chooses a Buffer by its own token count."""

    def capacity(self, token_counts: list[int]) -> int:
        return super().capacity([token_counts[self.rank]])


@defect
class OwnCapacityOfSeveral(OwnCapacity):
    """The same, with all Buffers in the pool already."""

    def capacity(self, token_counts: list[int]) -> int:
        for count in (4, 16):
            self.engine.buffer(self.case, count)
        return super().capacity(token_counts)


@defect
class OwnCapacityInOneBuffer(OwnCapacity):
    """The same in one Buffer, which is as large as the largest capacity."""

    def forward(self, *given: Any) -> Tensor:
        largest = self.engine.buffer(self.case, self.case.S)
        self.engine.buffers = dict.fromkeys(range(self.case.S + 1), largest)
        try:
            return super().forward(*given)
        finally:
            self.engine.buffers = {self.case.S: largest}


@defect
class OwnCapacityWaits(OwnCapacity):
    """The same: one rank has the Buffer of its tokens already, and another builds one and waits for it."""

    def capacity(self, token_counts: list[int]) -> int:
        self.engine.buffer(self.case, 4)
        return super().capacity(token_counts)


@defect
class BucketTooSmall(Layer):
    """A Buffer for half the tokens, which are dispatched all."""

    def capacity(self, token_counts: list[int]) -> int:
        self.wanted = super().capacity(token_counts)
        return self.wanted // 2

    def pad(self, hidden: Tensor, weights: Tensor, ids: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        return super().pad(hidden, weights, ids, self.wanted)


@defect
class WeightTwice(Layer):
    def weighted(self, y: Tensor, weight: Tensor) -> Tensor:
        return y * weight * weight


@defect
class WeightNever(Layer):
    def weighted(self, y: Tensor, weight: Tensor) -> Tensor:
        return y


@defect
class GeluForSilu(Layer):
    """Equal on whole numbers of the fill ``ints``; so only ``fill:real`` can see it."""

    def experts(self, *given: Any) -> Tensor:
        module: Any = sys.modules[Layer.__module__]
        before, module.silu = module.silu, gelu
        try:
            return super().experts(*given)
        finally:
            module.silu = before


@defect
class TailRead(Layer):
    """The row behind the last group goes into every row, times zero."""

    def experts(self, rows: Tensor, row_weights: Tensor, ends: Tensor, plan: Any) -> Tensor:
        return super().experts(rows, row_weights, ends, plan) + 0 * rows[int(ends[-1])]


@defect
class GateAndUpSwapped(Layer):
    def load(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        own = super().load(checkpoint)
        return {**own, "gate": own["up"], "up": own["gate"]}


@defect
class FirstExpertNotLoaded(Layer):
    def load(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        return super().load(lambda: (part for part in checkpoint() if part[0] > 0))


@defect
class RanksReversed(Layer):
    """The experts of all ranks are gathered in the wrong order."""

    def gather(self, full: Tensor, own: Tensor) -> None:
        dist.all_gather(list(full.chunk(self.case.R))[::-1], own)


@defect
class ReloadIgnored(Layer):
    loaded = False

    def reload(self, checkpoint: Checkpoint) -> None:
        if not self.loaded:
            super().reload(checkpoint)
        self.loaded = True


@defect
class ReloadRefused(Layer):
    """Honest: an update is refused, and changes nothing."""

    loaded = False

    def reload(self, checkpoint: Checkpoint) -> None:
        if self.loaded:
            raise NotImplementedError("no weight updates")
        super().reload(checkpoint)
        self.loaded = True


@defect
class ReloadMistyped(ReloadRefused):
    """An update stumbles, which refuses nothing."""

    def reload(self, checkpoint: Checkpoint) -> None:
        if self.loaded:
            raise AttributeError("'Layer' object has no attribute 'ful'")
        super().reload(checkpoint)


@defect
class ReloadNotGathered(Layer):
    """A reload changes this rank's experts, and leaves the copies that other ranks hold of them."""

    loaded = False

    def gather(self, full: Tensor, own: Tensor) -> None:
        if self.loaded:
            full.chunk(self.case.R)[self.rank].copy_(own)
        else:
            super().gather(full, own)

    def reload(self, checkpoint: Checkpoint) -> None:
        super().reload(checkpoint)
        self.loaded = True


@defect
class SlotsOfLatestLayer(Layer):
    """All layers prefetch the weights of the layer that was made last."""

    latest: ClassVar[dict[str, Tensor]] = {}

    def reload(self, checkpoint: Checkpoint) -> None:
        super().reload(checkpoint)
        type(self).latest = self.full

    def prefetch(self, buffer: Any, plan: Any) -> None:
        mine, self.full = self.full, self.latest
        super().prefetch(buffer, plan)
        for name, slots in self.full.items():
            mine[name][self.case.E :] = slots[self.case.E :]
        self.full = mine


@defect
class PrefetchIntoCopy(Layer):
    """Slots are filled in one copy of the weights, and read in another, whose slots stay as they were made."""

    def prefetch(self, buffer: Any, plan: Any) -> None:
        mine = self.full
        self.full = {name: full.clone() for name, full in mine.items()}
        super().prefetch(buffer, plan)
        self.full = mine


@defect
class PrefetchIntoOtherCopy(PrefetchIntoCopy):
    """The same, and what is read holds expert 0."""

    def prefetch(self, buffer: Any, plan: Any) -> None:
        for full in self.full.values():
            full[self.case.E :] = full[0]
        super().prefetch(buffer, plan)


@defect
class WeightsOfFirstLife(Layer):
    """What was loaded is kept by its shapes, and outlives its layer."""

    kept: ClassVar[dict[Any, dict[str, Tensor]]] = {}

    def load(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        own = super().load(checkpoint)
        return self.kept.setdefault(tuple(tensor.shape for tensor in own.values()), own)


@defect
class ExpertsOfFirstLife(Layer):
    """Routes are counted for as many experts as the first layer of the process had."""

    experts_then: ClassVar[list[int]] = []

    def count(self, ids: Tensor) -> Tensor:
        self.experts_then.append(self.case.E)
        counts = super().count(ids)
        counts[self.experts_then[0] :] = 0
        return counts


class _Buffer:
    """A Buffer whose combine gets another plan."""

    def __init__(self, buffer: Any, plan: Any) -> None:
        self.buffer, self.plan = buffer, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.buffer, name)

    def combine(self, plan: Any, rows: Tensor) -> Any:
        return self.buffer.combine(self.plan, rows)


@defect
class PlanOfFirstStep(Layer):
    """All layers combine with the plan of the first step."""

    first: ClassVar[list[Any]] = []

    def forward(self, *given: Any) -> Tensor:
        if self.first:
            self.engine.buffers = {c: _Buffer(b, self.first[0]) for c, b in self.engine.buffers.items()}
        return super().forward(*given)

    def prefetch(self, buffer: Any, plan: Any) -> None:
        super().prefetch(buffer, plan)
        self.first.append(plan)


@defect
class CutOneLate(Layer):
    def cut(self, combined: Tensor, tokens: int) -> Tensor:
        return combined.roll(-1, 0)[:tokens]


@defect
class NotCut(Layer):
    def cut(self, combined: Tensor, tokens: int) -> Tensor:
        return combined


@defect
class PlanKeptAfterError(Layer):
    """As vLLM's ``_plan``: set by prepare, cleared by finalize, and checked by the next prepare."""

    plan: Any = None

    def prefetch(self, buffer: Any, plan: Any) -> None:
        super().prefetch(buffer, plan)
        self.plan = plan

    def pad(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        if self.plan is not None:
            raise RuntimeError("prepare was called twice")
        return super().pad(*given)

    def cut(self, combined: Tensor, tokens: int) -> Tensor:
        self.plan = None
        return super().cut(combined, tokens)


@defect
class WeightsKeptAfterError(Layer):
    """Route weights are put aside by prepare; after an exception, those of the broken step are used once more."""

    kept: Any = None

    def pad(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weights, ids = super().pad(*given)
        self.kept = weights if self.kept is None else self.kept.flip(0)
        return hidden, self.kept, ids

    def cut(self, combined: Tensor, tokens: int) -> Tensor:
        self.kept = None
        return super().cut(combined, tokens)


@defect
class BuffersLeft(Layer):
    """See ``Faulty.close``."""


@defect
class WithoutMoonEP(Layer):
    """Each rank computes its tokens densely."""

    def forward(self, hidden: Tensor, topk_weights: Tensor, topk_ids: Tensor, token_counts: list[int]) -> Tensor:
        out = torch.zeros(hidden.shape)
        for k in range(self.case.K):
            for token, expert in enumerate(topk_ids[:, k].tolist()):
                ends = (torch.arange(self.case.E) >= expert).int()
                weight = topk_weights[token, k : k + 1]
                out[token] += self.experts(hidden[token : token + 1], weight, ends, None)[0].float()
        return out.bfloat16()


@defect
class AcceptsFloat32(Layer):
    def pad(self, hidden: Tensor, weights: Tensor, ids: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        return super().pad(hidden.bfloat16(), weights, ids, capacity)


@defect
class RefusesEmptySteps(Layer):
    def capacity(self, token_counts: list[int]) -> int:
        if not any(token_counts):
            raise ValueError("no tokens")
        return super().capacity(token_counts)


@defect
class RefusesInvalidIds(Layer):
    """As a branch of SGLang: -1 is refused, on every rank."""

    def pad(self, hidden: Tensor, weights: Tensor, ids: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        if (ids < 0).any():
            raise ValueError("an expert id is -1")
        return super().pad(hidden, weights, ids, capacity)


@defect
class RaisesOnEveryRank(Layer):
    def experts(self, *given: Any) -> Tensor:
        raise ValueError("out of memory")


@defect
class RaisesOnOneRank(Layer):
    def experts(self, *given: Any) -> Tensor:
        if self.rank == 1:
            raise ValueError("out of memory")
        return super().experts(*given)


@defect
class NeverReturns(Layer):
    def experts(self, *given: Any) -> Tensor:
        while self.rank == 1:
            time.sleep(0.05)
        return super().experts(*given)


@defect
class SkipsWithoutTokens(Layer):
    """A rank without tokens makes no call, while its peers wait for it."""

    def forward(self, hidden: Tensor, *given: Any) -> Tensor:
        return super().forward(hidden, *given) if len(hidden) else hidden


@defect
class TokensReplaced(Layer):
    """The second rank's layer works on other tokens than it was given."""

    def forward(self, hidden: Tensor, *given: Any) -> Tensor:
        return super().forward(hidden.roll(1, 0) if self.rank else hidden, *given)


@defect
class TokensLeftOut(Layer):
    """Only the first half of the tokens is dispatched."""

    def forward(self, hidden: Tensor, weights: Tensor, ids: Tensor, token_counts: list[int]) -> Tensor:
        half = len(hidden) // 2
        counts = [count // 2 for count in token_counts]
        out = super().forward(hidden[:half], weights[:half], ids[:half], counts)
        return torch.cat([out, out])


@defect
class IdsOfInt64(Layer):
    def pad(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weights, ids = super().pad(*given)
        return hidden, weights, ids.long()


class Faulty(Good):
    name = "faulty_engine"

    def start(self, rank: int, size: int, device: str) -> Started:
        return Started(sys.modules[__name__])

    def open(self, case: Case) -> None:
        super().open(case)
        self.layer = list(DEFECTS.values())[
            case.seed % 1000
        ]  # later lives of the scenario ``lives`` add to the seed
        PlanOfFirstStep.first.clear()
        if case.seed < 1000:  # a case begins
            WeightsOfFirstLife.kept.clear()
            ExpertsOfFirstLife.experts_then.clear()

    def close(self) -> None:
        if self.layer is BuffersLeft:
            self.buffers.clear()
        super().close()


class NotInstalled(Good):
    def start(self, rank: int, size: int, device: str) -> Started:
        raise ImportError("libengine.so: cannot open shared object file")


class OtherTorchvision(Good):
    """As transformers does, whose lazy modules hide what torchvision raised."""

    def start(self, rank: int, size: int, device: str) -> Started:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'AutoProcessor'") from error


class OtherGeneration(Good):
    def start(self, rank: int, size: int, device: str) -> Started:
        return Started(json, expects={"Buffer": ("H", "local_first_pool")})
