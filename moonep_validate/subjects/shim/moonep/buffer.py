"""The helpers that integrations import from ``moonep.buffer``."""

from moonep_validate.reference.moonep_a.buffer import *  # noqa: F403
from moonep_validate.reference.moonep_a.buffer import __all__ as __all__
