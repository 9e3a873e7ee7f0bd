"""The helpers that integrations import from ``moonep.buffer``, and the Buffer of generation A."""

from moonep_validate.reference.memory import (
    create_nvl_dist_tensor,
    create_nvl_single_owner_tensor,
    pad_dim0_for_alignment,
    pad_to_granularity,
)
from moonep_validate.reference.moonep_a import Buffer, MoonEPCommPlan

__all__ = [
    "Buffer",
    "MoonEPCommPlan",
    "create_nvl_dist_tensor",
    "create_nvl_single_owner_tensor",
    "pad_dim0_for_alignment",
    "pad_to_granularity",
]
