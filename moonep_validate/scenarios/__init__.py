"""Which calls are made? SPMD scripts over a rig, and the relations that they promise between steps."""

from moonep_validate.scenarios import base, buffer, engine, relations
from moonep_validate.scenarios.registry import SCENARIOS, Scenario

__all__ = ["SCENARIOS", "Scenario", "base", "buffer", "engine", "relations"]
