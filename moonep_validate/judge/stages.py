"""Which stages does a layer pass through, in which order, and who owns each where an engine runs?"""

from __future__ import annotations

from dataclasses import dataclass

#: Who can own a stage: MoonEP, the engine around it, the model around the experts, or each of them.
OWNERS = ("moonep", "engine", "model", "any")


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        owner: one of ``OWNERS``.
        does: one sentence for a user.
    """

    name: str
    owner: str
    does: str

    def __post_init__(self) -> None:
        assert self.owner in OWNERS


_ORDER = (
    Stage("life", "any", "Buffers are built, refuse bad input, and are destroyed; every call returns."),
    Stage("load", "engine", "The engine's loader fills the weights of its experts from a checkpoint."),
    Stage("router", "model", "The model's router chooses K experts for each token, and weighs them."),
    Stage("latent", "model", "The model projects each token to the width that is dispatched."),
    Stage("prepare", "engine", "The engine pads its tokens, and makes their ids legal."),
    Stage("plan", "moonep", "MoonEP decides where each route is computed, and which experts fill the slots."),
    Stage("dispatch", "moonep", "MoonEP sends each token to the rows that the plan says."),
    Stage("prefetch", "moonep", "MoonEP copies the weights of redundant experts into slots."),
    Stage("experts", "engine", "The experts compute each row of their groups."),
    Stage("combine", "moonep", "MoonEP adds the rows of each token, and sends the sum back."),
    Stage("layer", "engine", "The whole layer, from its tokens to its output."),
    Stage("norm", "model", "The model norms the sum of the routed experts."),
    Stage("shared", "model", "The model's shared expert computes the tokens in their own place."),
    Stage("output", "model", "The model projects the normed sum back, and adds the shared expert."),
    Stage("reduce", "moonep", "MoonEP adds the gradients of redundant experts to their owner's."),
)
#: In the order of the pipeline, by name.
STAGES: dict[str, Stage] = {stage.name: stage for stage in _ORDER}
#: Stage -> its place in the pipeline.
PLACE: dict[str, int] = {name: place for place, name in enumerate(STAGES)}


def owned_by(owner: str) -> tuple[str, ...]:
    """The names of an owner's stages, in order."""
    assert owner in OWNERS
    return tuple(stage.name for stage in STAGES.values() if stage.owner == owner)
