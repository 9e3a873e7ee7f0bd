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
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.formats.stored import FORMATS
from moonep_validate.judge.stages import STAGES, owned_by
from moonep_validate.scenarios import SCENARIOS
from moonep_validate.sessions.protocols import EngineDoor
from moonep_validate.sessions.rig import Rig
from moonep_validate.subjects import NOTHING, Subject
from moonep_validate.subjects.ask import ask
from moonep_validate.subjects.engines import tap
from moonep_validate.subjects.engines.integration import Integration, Started
from moonep_validate.subjects.engines.layer import LayerSession, uninitialised_memory_is_poison
from moonep_validate.subjects.vouch import part_of
from moonep_validate.trace.schema import build
from moonep_validate.trace.trace import Part
from moonep_validate.worlds import launch

#: Tells a worker which device its tensors live on.
DEVICE = "MOONEP_VALIDATE_DEVICE"
KNOWN = {
    "vllm": "moonep_validate.subjects.engines.vllm:Vllm",
    "sglang": "moonep_validate.subjects.engines.sglang:Sglang",
}
#: What mends a torchvision whose library does not load; the guide has the recipe of each engine.
_TORCHVISION = "install the torchvision of that build, or, for vLLM, pip uninstall torchvision; see docs/guide.md"
_SHIM = Path(__file__).parents[1] / "shim"
#: What an Integration must have.
_MEMBERS = ("name", "rounds", "supports", "environment", "start", "open", "make_layer", "probes", "close")
_started: dict[str, Integration] = {}
_parts_here: dict[str, tuple[Part, Part]] = {}


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


@dataclass(frozen=True)
class Declared:
    """What an integration says before its engine is imported.

    Attributes:
        package: the importable package of the engine: the ``package`` that the integration has, else its ``name``.
        generations: the API generations of MoonEP that it calls: its ``generations``, else A.
        environment: variables of the workers.
    """

    package: str
    generations: tuple[str, ...]
    environment: dict[str, str]


def declared(engine: str, device: str = "cpu") -> Declared:
    """What an engine's integration declares; one from outside is asked in another process, once.

    Raises:
        CaseError: if it declares other generations than A and B; else see ``integration``.
    """
    return _declared(engine, device, os.environ.get("PYTHONPATH"), launch.current_folder())


@lru_cache(maxsize=8)
def _declared(engine: str, device: str, *places: str | None) -> Declared:
    arguments = {"engine": engine, "device": device}
    own = engine in KNOWN or ":" not in engine
    if not own:
        return ask(Declared, "engine", arguments, f"--subject {engine}")
    return build(Declared, answer(**arguments))


def answer(engine: str, device: str) -> dict[str, Any]:
    """A ``Declared`` as JSON data, made in this process.

    Raises:
        CaseError: see ``declared``.
    """
    made = integration(engine)
    calls = tuple(getattr(made, "generations", ("A",)))
    if not calls or not set(calls) <= {"A", "B"}:
        raise CaseError(f"--subject {engine}: its integration declares generations {calls}; known: A, B")
    variables = {str(name): str(value) for name, value in made.environment(device).items()}
    return asdict(Declared(str(getattr(made, "package", made.name)), calls, variables))


def refusal(engine: str, case: Case) -> str:
    """Why the integration of an engine that was started here cannot run a case, or empty.

    That of a known engine is asked where the run is judged; that of an engine from outside on its ranks only.
    """
    return "" if engine in KNOWN else str(_started[engine].supports(case) or "")


def on_device(device: str) -> dict[str, str]:
    """Variables that tell workers of another device than the CPU."""
    return {DEVICE: device} if device != "cpu" else {}


def environment(engine: str, path: str | None, device: str) -> dict[str, str]:
    """Variables of the workers: the import path, with our stand-in where no real ``moonep`` is installed."""
    shim = [] if importlib.util.find_spec("moonep") else [str(_SHIM)]
    paths = [*([path] if path else []), *shim, *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {DEVICE: device, "PYTHONPATH": os.pathsep.join(paths)}
    return {**declared(engine, device).environment, **ours}


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
        return {"error": f"{engine} cannot run here: {type(error).__name__}: {_advised(error)}"}
    tap.install(moonep.Buffer)
    with uninitialised_memory_is_poison():
        pass  # the first time costs seconds, which the deadline of a case has no room for
    _started[engine] = mine
    policy = getattr(moonep, "__moonep_policy__", "legal")
    parts = {
        "engine": part_of(begun.module, seams=begun.seams, rounds=mine.rounds),
        "moonep": part_of(moonep, moonep.Buffer, policy=policy),
    }
    _parts_here[engine] = (parts["engine"], parts["moonep"])
    found: dict[str, Any] = {name: asdict(part) for name, part in parts.items()}
    return {**found, "mismatch": mismatch(engine, begun, moonep.Buffer)}


def _advised(error: BaseException) -> str:
    """What an engine's import raised, and what to do where many people meet it."""
    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    text = str(error) or "no message"
    if any("torchvision::nms" in str(one) for one in causes):
        text += f" (torchvision was built for another torch than {torch.__version__}: {_TORCHVISION})"
    return text


def parts_here(engine: str) -> tuple[Part, Part]:
    """What this worker imported: the engine and its ``moonep``, of an engine that was started here."""
    return _parts_here[engine]


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
        return integration(engine).supports(case) if engine in KNOWN else None

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
