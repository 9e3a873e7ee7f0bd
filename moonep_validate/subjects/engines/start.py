"""Which serving engines are known, and how does one become a subject?

An engine runs in worker processes only. It gets the ``moonep`` that can be imported; where there is none, our
stand-in, as a real package on the workers' import path.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.formats.stored import FORMATS
from moonep_validate.judge.stages import STAGES, owned_by
from moonep_validate.scenarios import SCENARIOS
from moonep_validate.sessions.protocols import EngineDoor
from moonep_validate.sessions.rig import Rig
from moonep_validate.subjects import NOTHING, Subject
from moonep_validate.subjects.engines import tap
from moonep_validate.subjects.engines.integration import Integration, Started
from moonep_validate.subjects.engines.layer import LayerSession, uninitialised_memory_is_poison
from moonep_validate.subjects.provenance import provenance
from moonep_validate.trace.trace import Part

#: Tells a worker which device its tensors live on.
DEVICE = "MOONEP_VALIDATE_DEVICE"
KNOWN = {
    "vllm": "moonep_validate.subjects.engines.vllm:Vllm",
    "sglang": "moonep_validate.subjects.engines.sglang:Sglang",
}
_SHIM = Path(__file__).parents[1] / "shim"
#: What an Integration must have.
_MEMBERS = ("name", "rounds", "supports", "environment", "start", "open", "make_layer", "probes", "close")
_started: dict[str, Integration] = {}


def integration(engine: str) -> Integration:
    """The integration of a known engine, or of MODULE:CLASS.

    Raises:
        CaseError: if there is none.
    """
    module, colon, name = KNOWN.get(engine, engine).partition(":")
    if not colon:
        raise CaseError(f"--subject {engine}: known are reference, {', '.join(KNOWN)}, or MODULE:CLASS")
    try:
        made: Integration = getattr(importlib.import_module(module), name)()
    except Exception as error:
        raise CaseError(f"--subject {engine} cannot be made: {type(error).__name__}: {error}") from None
    if lacks := [wanted for wanted in _MEMBERS if not hasattr(made, wanted)]:
        raise CaseError(f"--subject {engine} is no Integration: it lacks {', '.join(lacks)}")
    return made


def package(engine: str) -> str:
    """The importable package of an engine: the ``package`` that its integration declares, else its ``name``.

    Raises:
        CaseError: see ``integration``.
    """
    made = integration(engine)
    return str(getattr(made, "package", made.name))


def generations(engine: str) -> tuple[str, ...]:
    """The API generations of MoonEP that an engine calls: the ``generations`` of its integration, else A.

    Raises:
        CaseError: if it declares others than A and B; else see ``integration``.
    """
    declared = tuple(getattr(integration(engine), "generations", ("A",)))
    if not declared or not set(declared) <= {"A", "B"}:
        raise CaseError(f"--subject {engine}: its integration declares generations {declared}; known: A, B")
    return declared


def on_device(device: str) -> dict[str, str]:
    """Variables that tell workers of another device than the CPU."""
    return {DEVICE: device} if device != "cpu" else {}


def environment(engine: str, path: str | None, device: str) -> dict[str, str]:
    """Variables of the workers: the import path, with our stand-in where no real ``moonep`` is installed."""
    shim = [] if importlib.util.find_spec("moonep") else [str(_SHIM)]
    paths = [*([path] if path else []), *shim, *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {DEVICE: device, "PYTHONPATH": os.pathsep.join(paths)}
    return {**integration(engine).environment(device), **ours}


def start(engine: str, rank: int, size: int, device: str) -> dict[str, Any]:
    """Import and initialise an engine in this worker, and say what it is; once per process.

    Returns:
        JSON data: ``{"error"}``, or ``{"engine", "moonep", "mismatch"}`` with two parts.
    """
    try:
        moonep = importlib.import_module("moonep")
        mine = integration(engine)
        begun = mine.start(rank, size, device)
    except (Exception, SystemExit) as error:
        return {"error": f"{engine} cannot run here: {type(error).__name__}: {str(error) or 'no message'}"}
    tap.install(moonep.Buffer)
    with uninitialised_memory_is_poison():
        pass  # the first time costs seconds, which the deadline of a case has no room for
    _started[engine] = mine
    policy = getattr(moonep, "__moonep_policy__", "legal")
    origin = getattr(moonep, "__moonep_origin__", "real")
    parts = {
        "engine": Part("real", seams=begun.seams, rounds=mine.rounds, **asdict(provenance(begun.module))),
        "moonep": Part(origin, policy=policy, **asdict(provenance(moonep))),
    }
    answer: dict[str, Any] = {name: asdict(part) for name, part in parts.items()}
    return {**answer, "mismatch": mismatch(engine, begun, moonep.Buffer)}


def reset(engine: str) -> None:
    """Clean up after a case in which a rank raised; collective, as closing is."""
    tap.watch(None)
    _started[engine].close()
    tap.forget()


def mismatch(engine: str, begun: Started, buffer: type) -> str | None:
    """Why the engine's calls do not fit this Buffer, told from the engine's source and the Buffer's signatures."""
    for method, passed in begun.expects.items():
        function = buffer.__init__ if method == "Buffer" else getattr(buffer, method)  # type: ignore[misc]
        parameters = inspect.signature(inspect.unwrap(function)).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            continue
        if unknown := [name for name in passed if name not in parameters]:
            where = "Buffer" if method == "Buffer" else f"Buffer.{method}"
            return (
                f"{engine} passes {', '.join(unknown)} to moonep's {where}, which takes "
                f"{', '.join(name for name in parameters if name != 'self')}: they are of different "
                "API generations; install the moonep revision that this engine was written for"
            )
    return None


def engine_subject(
    engine: str,
    calls: tuple[str, ...],
    moonep: Part | None,
    part: Part | None,
    not_run: str | None,
    device: str,
) -> Subject:
    """A serving engine's MoE layer.

    Args:
        engine: its name.
        calls: the API generations of MoonEP that it calls.
        moonep, part: what stands behind ``moonep`` and the engine; None if it cannot run.
        not_run: why it cannot run here, or None.
        device: ``cpu`` or ``cuda``.
    """
    nothing = Part("none", engine, "unknown")

    def supports(case: Case) -> str | None:
        if not_run:
            return not_run
        if case.generation not in calls:
            return f"gen{case.generation}: {engine} calls MoonEP's generation {calls[0]}; use gen{calls[0]}"
        if case.generation not in tap.GENERATIONS:
            return f"gen{case.generation}: taps on an engine know MoonEP's generation A only"
        if "buffer" in SCENARIOS[case.scenario.name].needs:
            return f"the scenario {case.scenario} calls a Buffer by itself; an engine has no such door"
        if case.model.name != "moe":
            return f"model {case.model} runs on the embedded reference; leave --subject out"
        if FORMATS[case.format.name].scale:
            return f"format {case.format}: an integration is given BF16 weights; leave {case.format} out"
        return integration(engine).supports(case)

    ours = "" if moonep and moonep.origin == "real" else ", moonep was this project's stand-in"
    cpu = "ranks were CPU processes with gloo" if device == "cpu" else "one GPU a rank"
    return Subject(
        name=engine,
        supports=supports,
        open=lambda rig: _open(engine, rig, device),
        parts=_parts(moonep or nothing, part or nothing),
        generations=calls,
        proves=f"the MoE layer of {engine} {part.version if part else ''} is right on these cases",
        leaves_open=f"{cpu}{ours}; router, attention and scheduling of the engine did not run",
    )


def _parts(moonep: Part, engine: Part) -> Mapping[str, Part]:
    parts = {stage.name: moonep if stage.owner == "moonep" else engine for stage in STAGES.values()}
    return parts | dict.fromkeys(owned_by("model"), NOTHING)


def _open(engine: str, rig: Rig, device: str) -> EngineDoor:
    return LayerSession(rig, _started[engine], device)
