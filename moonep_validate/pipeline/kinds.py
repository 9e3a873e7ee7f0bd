"""What kinds of target are there, and which options do they refuse? Known before anything is imported."""

from __future__ import annotations

from dataclasses import dataclass

from moonep_validate.cases.case import CaseError
from moonep_validate.pipeline.options import OWN_EXPERTS, REFERENCE, Options, spelled


@dataclass(frozen=True)
class Kind:
    """What all targets of a kind share.

    Attributes:
        profile: its cases where none are named.
        world: where its ranks run by default.
        layer_door: judged through its own MoE layer, and not through bare calls of a Buffer.
        own_ranks: starts its ranks itself, when the job is made; so it cannot run on those of torchrun.
        embedded: our own code, all of whose collectives go through our ``Comm``.
        refuses: options that it does not take -> why, the end of a sentence that begins with their names.
    """

    profile: str
    world: str
    layer_door: bool
    own_ranks: bool
    embedded: bool
    refuses: dict[tuple[str, ...], str]


_FOR_ENGINES: dict[tuple[str, ...], str] = {
    ("engine_path", "waivers"): "go with an engine: --subject vllm, sglang or MODULE:CLASS"
}
_FOR_MODULES: dict[tuple[str, ...], str] = {("api", "policy", "relaxed", "destructive"): "go with --moonep-module"}

KINDS = {
    "reference": Kind("default", "threads", False, False, True, {**_FOR_ENGINES, **_FOR_MODULES}),
    "module": Kind("default", "processes", False, False, False, _FOR_ENGINES),
    "engine": Kind(
        profile="engine",
        world="processes",
        layer_door=True,
        own_ranks=True,
        embedded=False,
        refuses={
            ("record",): "goes with a Buffer; an engine's cases are small and recorded in full",
            ("moonep_module", "experts", "api", "policy", "relaxed", "destructive"): (
                "go without --subject; an engine takes the moonep that it can import, and has its own experts"
            ),
        },
    ),
}


def kind_name(options: Options) -> str:
    """Which of ``KINDS`` the options name."""
    if options.subject != REFERENCE:
        return "engine"
    return "reference" if options.moonep_module is None else "module"


def kind_of(options: Options) -> Kind:
    """The kind of target that the options name."""
    return KINDS[kind_name(options)]


def refuse(options: Options) -> None:
    """Stop at options that do not go together.

    Raises:
        CaseError: with what they go with.
    """
    given = set(options.given)
    for names, why in kind_of(options).refuses.items():
        if given & set(names):
            *most, last = map(spelled, names)
            raise CaseError(f"{', '.join(most)}{' and ' if most else ''}{last} {why}")
    if options.world == "threads":
        foreign = options.experts.partition(":")[0] not in OWN_EXPERTS
        if kind_of(options).world != "threads" or foreign:
            outside = options.experts if foreign else options.moonep_module or options.subject
            raise CaseError(f"--world threads: code from outside ({outside}) runs in processes only")
        if options.device == "cuda":
            raise CaseError("--world threads: on cuda each rank is a process with a GPU of its own; use processes")
