"""How much memory does a rank need? Bytes of experts, slots and buffers, before anything is allocated.

Experts and slots follow from shapes and the weight format. The buffers are upstream's (MoonEP ``api.py``, both
generations): physical bytes of one rank; mappings of other ranks' memory cost address space only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moonep_validate.cases.case import CaseError
from moonep_validate.cases.layout import Layout
from moonep_validate.formats.kimi_k3 import Geometry
from moonep_validate.formats.stored import FORMATS

MODELS = {"kimi-k3": Geometry()}
#: GiB that CUDA reports as the total of a GPU, a little less than on its label.
GPUS = {"h100": 79.1, "h200": 139.8, "b200": 178.3}
GIB = 2**30
#: Allocation granularity of CUDA's virtual memory functions on today's GPUs.
GRANULARITY = 2 * 2**20
_INT = 4


@dataclass(frozen=True)
class Line:
    """One kind of memory of a rank: what, its bytes, and where the number comes from."""

    what: str
    nbytes: int
    why: str


@dataclass(frozen=True)
class Footprint:
    """Memory of one rank with one API generation."""

    layout: Layout
    lines: tuple[Line, ...]

    @property
    def total(self) -> int:
        """Bytes of all lines."""
        return sum(line.nbytes for line in self.lines)

    def fits(self, gpu_bytes: int) -> bool:
        """Whether all of it goes into a GPU that holds nothing else."""
        return self.total <= gpu_bytes

    def to_json(self, gpu_bytes: int | None) -> dict[str, Any]:
        """The plan as one JSON value."""
        fit = {} if gpu_bytes is None else {"fits": self.fits(gpu_bytes), "left_bytes": gpu_bytes - self.total}
        return {
            "generation": self.layout.generation,
            "rows": self.layout.num_rows,
            "lines": [vars(line) for line in self.lines],
            "total_bytes": self.total,
            **fit,
        }


def plan(
    geometry: Geometry,
    generation: str,
    ep: int,
    weight_format: str,
    tokens: int,
    pad: int = 128,
    slots: int | None = None,
) -> Footprint:
    """The memory of one rank.

    Args:
        geometry: the model's routed experts.
        generation: ``"A"`` or ``"B"``.
        ep: ranks of the expert-parallel group; must divide the experts.
        weight_format: of ``FORMATS``.
        tokens: the most tokens a rank dispatches at once (S).
        pad: ``token_padding``.
        slots: redundant experts per rank, generation A only.

    Raises:
        CaseError: for a format that is not known, or sizes that no MoonEP build accepts.
    """
    if weight_format not in FORMATS:
        raise CaseError(f"--format is {weight_format!r}; known: {', '.join(FORMATS)}")
    layout = Layout(generation, ep, geometry.num_experts, geometry.top_k, tokens, pad, slots)
    size = FORMATS[weight_format].expert_bytes(geometry.latent, geometry.intermediate)
    own = layout.experts_per_rank
    lines = (
        Line(
            "experts",
            own * geometry.moe_layers * size,
            f"{own} of {layout.E} experts in {geometry.moe_layers} layers",
        ),
        Line("slots", layout.num_slots * size, f"{layout.num_slots} experts, one pool for all layers"),
        Line(
            "row buffer",
            _mapped(hidden_bytes(layout, geometry.latent)),
            f"{layout.num_rows} rows of {geometry.latent} BF16",
        ),
        Line("route weights and counts", _mapped(meta_bytes(layout)), "shared with the peers"),
        Line("local tables", local_bytes(layout), "histograms and destinations"),
        Line("saved plan", plan_bytes(layout), "one; training keeps one per layer"),
    )
    return Footprint(layout, lines)


def gpu_bytes(name: str) -> int:
    """The memory of a GPU, by name or as a number of GiB.

    Raises:
        CaseError: for neither.
    """
    if name.lower() in GPUS:
        return round(GPUS[name.lower()] * GIB)
    try:
        size = float(name)
    except ValueError:
        size = -1.0
    if not 0 < size < 2**20:
        raise CaseError(f"--gpu is {name!r}; known: {', '.join(GPUS)}, or a number of GiB")
    return round(size * GIB)


def hidden_bytes(layout: Layout, width: int) -> int:
    """Dispatched rows in BF16, before rounding up to the granularity."""
    return layout.num_rows * width * 2


def meta_bytes(layout: Layout) -> int:
    """The buffer of small data that peers write: route weights, counts, plan, scratch, barriers, source rows."""
    rows, routes = layout.num_rows, layout.capacity
    plan = 3 * layout.E * layout.R + 3 * layout.R * layout.num_groups + layout.R * layout.num_slots + 2 * layout.R
    words = _align(_align(rows) + layout.R * layout.E) + plan
    return _INT * (_align(words) + 3 * _align(routes) + 3 + rows)


def local_bytes(layout: Layout) -> int:
    """Tables that only the rank itself uses."""
    blocks = -(-layout.capacity // 2048)
    words = layout.E * layout.R + layout.R + layout.R**2 + layout.E * blocks
    return _INT * (words + 2 * layout.R * layout.S + layout.R * layout.capacity + 2)


def plan_bytes(layout: Layout) -> int:
    """A plan that is kept, e.g. for the backward pass."""
    fixed = layout.capacity + layout.R * layout.num_slots + 2 * layout.num_groups + 2
    return _INT * (fixed + 4 * layout.num_rows + 2)


def _align(words: int) -> int:
    return -(-words // 4) * 4


def _mapped(nbytes: int) -> int:
    return -(-nbytes // GRANULARITY) * GRANULARITY
