"""Who is judged? A subject says what it supports, opens sessions and declares its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from moonep_validate import __version__
from moonep_validate.cases.case import Case
from moonep_validate.judge.stages import STAGES, owned_by
from moonep_validate.reference import moonep_a, moonep_b
from moonep_validate.scenarios import SCENARIOS
from moonep_validate.sessions.protocols import BufferDoor, LayerDoor
from moonep_validate.sessions.rig import Rig
from moonep_validate.subjects import experts
from moonep_validate.subjects.buffer.api import detect_generation, import_module
from moonep_validate.subjects.buffer.composed import ComposedSession
from moonep_validate.subjects.buffer.k3 import RoutedSession
from moonep_validate.trace.trace import Part


@dataclass(frozen=True)
class Subject:
    """One thing under test.

    Attributes:
        name: what the command line calls it.
        supports: case -> reason why it cannot run, or None.
        open: makes a session on one rank; collective.
        parts: stage -> what stands behind it.
        generations: which API generations it offers.
        proves, leaves_open: the two halves of the line that says what a pass means.
    """

    name: str
    supports: Callable[[Case], str | None]
    open: Callable[[Rig], LayerDoor]
    parts: Mapping[str, Part]
    generations: tuple[str, ...]
    proves: str
    leaves_open: str


class _RelaxedA(moonep_a.Buffer):
    relaxed = True


class _RelaxedB(moonep_b.Buffer):
    relaxed = True


_EXPERTS = Part("reference", "moonep_validate.reference.experts", __version__, policy="upstream")
#: What stands behind a stage that a subject does not have.
NOTHING = Part("none", "nothing", "-")
_OUR_EXPERTS, _NO_KERNEL = "experts were this project's reference, ", "no GPU kernel, "
_REFERENCE = Part("reference", "moonep_validate.reference", __version__, policy="upstream")


def _needs_engine(case: Case) -> str | None:
    if "engine" in SCENARIOS[case.scenario.name].needs:
        return f"the scenario {case.scenario} judges an engine around the Buffer; see --subject"
    return None


def _open_reference(rig: Rig) -> BufferDoor:
    buffer = _RelaxedA if rig.case.generation == "A" else _RelaxedB
    session = RoutedSession if rig.case.model.name == "k3" else ComposedSession
    return session(rig, buffer, rig.seams.of_comm(rig.comm))


REFERENCE = Subject(
    name="reference",
    supports=_needs_engine,
    open=_open_reference,
    parts={**dict.fromkeys(STAGES, _REFERENCE), "experts": _EXPERTS},
    generations=("A", "B"),
    proves="the suite's own reference transport and experts keep the contract on these cases",
    leaves_open=f"nothing outside this project ran: no MoonEP build, {_NO_KERNEL}no serving engine",
)


def module_subject(
    name: str, generation: str, part: Part, relaxed: bool, destructive: bool, device: str = "cpu"
) -> Subject:
    """Any importable module with MoonEP's ``Buffer``, with our experts around it.

    Args:
        name: of the module.
        generation: of its API.
        part: what was imported (identify.py); the module itself is imported in the workers only.
        relaxed: also run cases that real hardware refuses.
        destructive: also run bad input that may trap, hang or end the process.
        device: ``cpu`` or ``cuda``.
    """
    ranks = "GPU processes with NCCL" if device == "cuda" else "CPU processes with gloo"

    def supports(case: Case) -> str | None:
        if case.generation != generation:
            return f"{name} has API generation {generation}"
        if case.unportable and not relaxed:
            return f"not portable to hardware: {case.unportable}; see --relaxed"
        if "destructive" in SCENARIOS[case.scenario.name].needs and not destructive:
            return "it may trap, hang or end the process; see --destructive"
        if case.model.name != "moe":
            return f"model {case.model} runs on the embedded reference; leave --moonep-module out"
        return _needs_engine(case)

    def open_module(rig: Rig) -> BufferDoor:
        buffer = import_module(name).Buffer
        detect_generation(buffer, generation)
        return ComposedSession(rig, buffer, getattr(rig.comm, "group", None))

    ours = "this project's own stand-in " if part.origin != "real" else ""
    return Subject(
        name=name,
        supports=supports,
        open=open_module,
        parts={
            **dict.fromkeys(STAGES, part),
            **dict.fromkeys(owned_by("model"), NOTHING),
            "experts": _EXPERTS,
            "layer": _EXPERTS,
        },
        generations=(generation,),
        proves=f"{ours}{name} {part.version} keeps the contract on these cases",
        leaves_open=f"{_OUR_EXPERTS}ranks were {ranks}, no engine ran",
    )


def subject_with_experts(
    subject: Subject, name: str, part: Part | None, activations: Sequence[str], not_run: str | None
) -> Subject:
    """A subject with another part in the place of our reference experts.

    Args:
        subject: a Buffer with experts around it.
        name: of the part.
        part: what it is, or None where it cannot run.
        activations: that it has.
        not_run: why it cannot.
    """

    def supports(case: Case) -> str | None:
        return not_run or subject.supports(case) or experts.unsupported(name, activations, case)

    who = f"{part.package} {part.version}" if part else name
    return replace(
        subject,
        supports=supports,
        parts={**subject.parts, "experts": part or NOTHING},
        proves=f"the experts {who} compute the right rows on these cases; {subject.proves}",
        leaves_open=_without_experts(subject.leaves_open),
    )


def _without_experts(leaves_open: str) -> str:
    """What a pass leaves open once the experts are no longer ours."""
    text = leaves_open.replace(_OUR_EXPERTS, "").replace(_NO_KERNEL, "")
    return text.replace("nothing outside this project ran", "beside the experts, nothing outside this project ran")
