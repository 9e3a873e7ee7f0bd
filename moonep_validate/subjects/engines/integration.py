"""What does a serving engine look like to the suite? The few calls that differ between vLLM and SGLang.

An integration drives the engine's own code and nothing else: its factory, its weight loader, its forward pass. It
imports the engine inside its methods only, since it is looked up where no engine is installed. One object serves
all cases of a worker process; ``start`` runs once, so that an engine is imported and initialised once per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from moonep_validate.cases.case import Case

#: Yields all tensors of a layer: (expert, ``gate`` | ``up`` | ``down``, tensor); may be read more than once.
Checkpoint = Callable[[], Iterator[tuple[int, str, Tensor]]]


@dataclass(frozen=True)
class Started:
    """What an engine is, once it has been imported on a rank.

    Attributes:
        module: the engine's package, for provenance.
        seams: the engine's code that had to be replaced, one phrase each; none on a GPU.
        expects: ``Buffer`` for the constructor, or a method of it -> keyword arguments that the engine's own
            source passes.
    """

    module: Any
    seams: tuple[str, ...] = ()
    expects: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Probe:
    """One configuration or input that the engine must answer in a known way.

    Attributes:
        what: said in findings.
        refused: whether an exception is the right answer.
        call: builds or runs it.
    """

    what: str
    refused: bool
    call: Callable[[], object]


class MoELayer(Protocol):
    """One MoE layer on one rank, built by the engine's own factory and filled by its own loader."""

    def forward(self, hidden: Tensor, topk_weights: Tensor, topk_ids: Tensor, token_counts: list[int]) -> Tensor:
        """Run the layer as the engine does.

        Args:
            hidden: ``[T, H]`` bf16, T tokens of this rank, 0 allowed.
            topk_weights: ``[T, K]`` float32.
            topk_ids: ``[T, K]`` int32; -1 is an invalid route.
            token_counts: tokens of every rank in this step.

        Returns:
            ``[T, H]``.
        """

    def reload(self, checkpoint: Checkpoint) -> None:
        """Load other weights into the living layer, as a weight update of the engine does."""


class Integration(Protocol):
    """A serving engine on one rank.

    Attributes:
        name: what the command line calls it.
        rounds: rounding points of its BF16 experts beyond the reference (``ROUNDS`` of oracle/arithmetic.py).

    It may also declare ``package``, the importable package of the engine where that is not ``name``, and
    ``generations``, the API generations of MoonEP that it calls, by default ``("A",)``.
    """

    name: str
    rounds: tuple[str, ...]

    def supports(self, case: Case) -> str | None:
        """Why the engine's MoonEP code cannot run a case, or None; imports nothing."""

    def environment(self, device: str) -> dict[str, str]:
        """Variables that must be set before the engine is imported; imports nothing."""

    def start(self, rank: int, size: int, device: str) -> Started:
        """Import and initialise, collective; torch.distributed is initialised already, R ranks.

        Raises:
            Exception: whatever the import raises; the suite then says "not run" with it.
        """

    def open(self, case: Case) -> None:
        """Configure for a case: capacity ``case.S`` tokens a rank; no state of an earlier case is left."""

    def make_layer(self, case: Case, name: str, checkpoint: Checkpoint) -> MoELayer:
        """Build and load one MoE layer; collective.

        Args:
            case: the geometry.
            name: unique in the process.
            checkpoint: yields (expert, ``gate`` | ``up`` | ``down``, tensor) of all E experts: gate and up
                ``[I, H]``, down ``[H, I]``, bf16 on the CPU.
        """

    def probes(self, case: Case) -> list[Probe]:
        """Configurations and inputs with a known answer, the same on every rank."""

    def close(self) -> None:
        """Destroy what the case made, collective: pools, Buffers, registered layers, caches."""
