"""Where does a Buffer's work run? On a stream of its own on a GPU, in the calling thread on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=tuple[Any, ...])


class Event:
    """What an asynchronous call returns on the CPU, where the work is done by then; ``torch.cuda.Event`` else."""

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait for the work."""

    def synchronize(self) -> None:
        """Wait for the work."""

    def query(self) -> bool:
        """Whether the work is done."""
        return True


class Lane:
    """A side stream that joins the caller's stream where it begins and, unless asynchronous, where it ends.

    Args:
        device: of the Buffer.
        priority: of the stream.
    """

    def __init__(self, device: torch.device, priority: int) -> None:
        self.stream = torch.cuda.Stream(device, priority) if device.type == "cuda" else None

    def run(self, work: Callable[[], T], inputs: Sequence[Tensor | None], asynchronous: bool) -> tuple[T, Any]:
        """Run the work after what the caller's stream has been given so far.

        Args:
            work: returns a tuple, whose tensors belong to the caller.
            inputs: tensors that the work reads; they may be freed or overwritten once the caller has waited.
            asynchronous: the caller waits for the event itself.

        Returns:
            What the work returned, and the event of its end.
        """
        if self.stream is None:
            return work(), Event()
        caller = torch.cuda.current_stream()
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            results = work()
            event = self.stream.record_event()
        # The allocator knows a tensor's own stream only, and else would give memory away that the other reads.
        for tensor in inputs:
            if tensor is not None:
                tensor.record_stream(self.stream)
        for result in results:
            if isinstance(result, Tensor):
                result.record_stream(caller)
        if not asynchronous:
            caller.wait_event(event)
        return results, event
