"""What happened in a MoE layer of a served engine? Now and then one call is written down, as a trace of this rank.

It observes, and changes nothing: no poison, no faults. What goes wrong in it is noted in a file and ends the
sampling of this process; what the engine itself raises passes through. Judging is done later, by whoever reads the
folder (served/samples.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.served.taps.schedule import Amount, Schedule
from moonep_validate.served.taps.written import file_name, write
from moonep_validate.sessions.protocols import Dispatched
from moonep_validate.subjects.buffer.sample import put_sample
from moonep_validate.subjects.engines import notes
from moonep_validate.trace.recording import Recording
from moonep_validate.trace.trace import Call

_FULL, _COLUMNS = Recording.parse("full"), Recording.parse("columns")


@dataclass
class _Layer:
    """What a layer was given; what stays of a call until it is known whether it is kept."""

    key: int
    hidden: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


@dataclass
class _Sample:
    """One call that is being written down.

    Attributes:
        number: of the call.
        sizes: of its Buffer.
        rank, size: of this process in the group.
        capacity: S.
        recording: how much is kept.
        own: this rank's experts.
        full: the weights that the experts read, ``[E+B, ...]`` each.
    """

    number: int
    sizes: Mapping[str, Any]
    rank: int
    size: int
    capacity: int
    recording: Recording
    calls: list[Call] = field(default_factory=list)
    sent: Dispatched | None = None
    filled: dict[str, Tensor] = field(default_factory=dict)
    full: dict[str, Tensor] = field(default_factory=dict)

    @property
    def own(self) -> slice:
        count = self.sizes["E"] // self.size
        return slice(self.rank * count, (self.rank + 1) * count)

    def call(self, op: str, **info: Any) -> Call:
        one = Call("", op, info=info, recording=self.recording)
        self.calls.append(one)
        return one

    def finish(self, layer: int) -> tuple[Case, list[Call]]:
        """The case of this call and its calls, brought to the CPU.

        Raises:
            CaseError: for sizes that no case has.
        """
        for one in self.calls:
            one.step, one.done = f"layer {layer}, call {self.number}", True
            one.settle()
        sizes = self.sizes
        width = self.full["gate"].shape[1] if self.full else sizes["H"]  # without weights nobody knows
        line = f"genA+R{self.size}+E{sizes['E']}+K{sizes['K']}+S{self.capacity}+H{sizes['H']}+I{width}"
        line += f"+slots{sizes['B']}+pad{sizes['token_padding']}+sampled:{layer},{self.number}+fill:real"
        return Case.parse(line), self.calls


class Sampler:
    """The calls of this process.

    Args:
        folder: for the traces.
        amount: how many, and how large.
    """

    def __init__(self, folder: Path, amount: Amount) -> None:
        self._folder, self._amount = folder, amount
        self._schedule, self._spent, self._number = Schedule(amount.every, amount.most), 0.0, -1
        self._kept: list[int] = []
        self._layers: dict[int, int] = {}
        self._layer: _Layer | None = None
        self._weights_bytes, self._stopped = 0, False
        self.open: _Sample | None = None

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Observe: an error of ours ends the sampling, never the engine."""
        start = time.monotonic()
        try:
            yield
        except Exception as error:
            self._stop(f"{type(error).__name__}: {error}")
        self._spent += time.monotonic() - start
        if self.open is None and not self._stopped and self._spent > self._amount.seconds:
            self._stop(f"{self._amount.seconds} s are spent")

    def _stop(self, why: str) -> None:
        self.open, self._stopped = None, True
        with suppress(OSError):
            (self._folder / f"{os.getpid()}.stopped").write_text(why, encoding="utf-8")

    def given(self, key: int, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        """A layer begins; ``key`` is its own, and layers are numbered as they are first met, sampled or not."""
        self._layers.setdefault(key, len(self._layers))
        self._layer = _Layer(key, hidden, topk_ids, topk_weights)

    def asked(self, built: Mapping[str, Any], given: Mapping[str, Tensor | None], plan: Any) -> None:
        """A dispatch begins; every rank's has the same number. ``built`` is what the Buffer was built with."""
        self._number, self.open = self._number + 1, None
        hidden = given["hidden"]
        if self._stopped or hidden is None or not self._schedule.chooses(self._number) or _captured(hidden):
            return
        rank, size = _place(built.get("group"))
        sizes = {**built, "B": built["B"] or built["E"] // size}
        rows = 6 * size * len(hidden) * sizes["K"] * sizes["H"]
        small = rows + self._weights_bytes <= self._amount.megabytes * 2**20
        self.open = _Sample(self._number, sizes, rank, size, len(hidden), _FULL if small else _COLUMNS)
        notes.asked(self.open.call("dispatch"), given, plan)

    def dispatched(self, given: Mapping[str, Tensor | None], replayed: Any, out: Any) -> None:
        """It returned."""
        if self.open:
            self.open.sent = notes.dispatched(self.open.calls[-1], given, replayed, out)

    def filling(self, full: dict[str, Tensor], plan: Any) -> None:
        """A prefetch begins."""
        self._weights_bytes = sum(tensor.numel() * tensor.element_size() for tensor in full.values())
        if self._layer is None:
            self._layers.setdefault(full["gate"].data_ptr(), len(self._layers))
        if one := self.open:
            one.filled = one.full = full
            call = one.call("prefetch", same_plan=one.sent is not None and plan is one.sent.plan)
            notes.slots_before(call, full, one.own, one.sizes["E"], plan)

    def filled(self, full: dict[str, Tensor], plan: Any) -> None:
        """It returned."""
        if one := self.open:
            notes.slots_after(one.calls[-1], full, one.own, one.sizes["E"], plan)

    def reads(self, full: dict[str, Tensor]) -> None:
        """The experts say which weights they read; else those that the prefetch filled are taken for them."""
        if self.open:
            self.open.full = full

    def combining(self, rows: Tensor, row_weights: Tensor | None, plan: Any) -> None:
        """A combine begins, so the experts have ended."""
        if not (one := self.open) or one.sent is None:
            return
        given = notes.given_to_experts(one.sent, one.full)
        call = one.call("experts", same_weights=_same(one.filled, one.full))
        call.put(**given if one.recording.full else {"cu_seqlens": one.sent.cu_seqlens})
        if one.recording.full:
            call.put(out=rows)
        else:
            call.note(**given, out=rows)
            put_sample(call, one.sent, {f"weight_{name}": tensor for name, tensor in one.full.items()}, rows)
        mine = one.call("combine", same_plan=plan is one.sent.plan)
        notes.rows_before(mine, rows, row_weights, plan)

    def combined(self, rows: Tensor, row_weights: Tensor | None, plan: Any, out: Any, zero_copy: bool) -> None:
        """It returned; where no layer is watched, that was all."""
        if one := self.open:
            notes.combined(one.calls[-1], rows, row_weights, plan, out, zero_copy)
            if self._layer is None:
                self._write(one, one.filled["gate"].data_ptr() if one.filled else 0)

    def came(self, out: Tensor) -> None:
        """The layer returned."""
        layer, self._layer = self._layer, None
        if layer and (one := self.open):
            call = one.call("layer", tokens=len(layer.hidden))
            call.put(
                hidden=_padded(layer.hidden, one.capacity),
                topk_ids=_padded(layer.topk_ids.int(), one.capacity),
                topk_weights=_padded(layer.topk_weights.float(), one.capacity),
                out=_padded(out, one.capacity),
            )
            self._write(one, layer.key)

    def _write(self, one: _Sample, key: int) -> None:
        self.open = None
        case, calls = one.finish(self._layers.setdefault(key, len(self._layers)))
        write(self._folder / file_name(one.number, one.rank), case, one.rank, calls, str(one.recording))
        self._kept.append(one.number)
        for number in self._schedule.thinned(self._kept):
            self._kept.remove(number)
            (self._folder / file_name(number, one.rank)).unlink()


def _place(group: Any) -> tuple[int, int]:
    """Rank and size."""
    from torch import distributed

    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(group), distributed.get_world_size(group)


def _captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured: what is recorded then happens later, and without us."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _same(filled: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> bool:
    """Whether the experts read the very memory that the prefetch filled."""
    return all(name in filled and filled[name].data_ptr() == tensor.data_ptr() for name, tensor in read.items())


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """With zero rows behind, up to so many."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, rows - len(tensor)))
