"""What can a user say about a run? Each option is declared once, here; no torch is needed to read it.

The command line, the pytest plugin (with ``--moonep-`` before the name) and ``make_job`` all take ``Options``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from moonep_validate.cases.case import CaseError
from moonep_validate.cases.profiles import PROFILES

#: The subject and the experts where none are named: our own.
REFERENCE = "reference"
#: Experts that are this project's or torch's; all others are code from outside.
OWN_EXPERTS = (REFERENCE, "float64", "torch")


@dataclass(frozen=True)
class Declared:
    """What an option is beside its name, type and default.

    Attributes:
        help: one sentence.
        choices: the values that it takes; empty for any.
        least: the smallest value of a number, or None.
        old: its name before; it still works, and says so.
    """

    help: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    old: str | None = None


def _option(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"declared": Declared(help, **more)})


@dataclass(frozen=True)
class Options:
    """The options of a run; those of text are None where nobody gave them.

    Raises:
        CaseError: for a value that an option does not know, or a number below its smallest.
    """

    case: tuple[str, ...] = _option((), "A case line; may be repeated.")
    profile: str | None = _option(None, f"Case list: {', '.join(PROFILES)}; by default the subject's own.")
    subject: str = _option(REFERENCE, "reference, vllm, sglang, or MODULE:CLASS of an engine's integration.")
    engine_path: str | None = _option(
        None, "Folder that holds the engine's package; first on the import path.", old="sglang_path"
    )
    world: str | None = _option(
        None, "Where ranks run; by default the subject's own way.", choices=("threads", "processes")
    )
    ranks: int | None = _option(None, "Only the cases of so many ranks.", least=1)
    device: str | None = _option(
        None, "Where tensors live; by default cpu, for an engine cuda if there are GPUs.", choices=("cpu", "cuda")
    )
    waivers: str | None = _option(
        None, "File of known defects of an engine; none: no waivers; else those we ship."
    )
    moonep_module: str | None = _option(None, "Importable module with MoonEP's Buffer; else the reference.")
    experts: str = _option(REFERENCE, "Who computes expert rows: torch, deep_gemm, MODULE:FUNCTION.")
    api: str | None = _option(None, "API generation, where signatures do not tell.", choices=("A", "B"))
    policy: str | None = _option(
        None, "upstream: also gate on upstream's exact plan and rounding.", choices=("upstream", "legal")
    )
    relaxed: bool = _option(False, "Also run cases that real hardware refuses.")
    destructive: bool = _option(False, "Also give bad input that may trap, hang or end the process.")
    fault: tuple[str, ...] = _option((), "Seed a fault, e.g. slot-not-filled:rank=1; may be repeated.")
    deadline: float = _option(30.0, "Seconds a rank may run without a sign of life.", least=0.1)
    record: str = _option("full", "What to keep of large tensors: plan, digest, columns[:N] or full.")
    require: tuple[str, ...] = _option(
        (), "STAGE=PACKAGE that must really run, e.g. load=vllm or transport=moonep; else exit code 1."
    )
    require_cases: int | None = _option(None, "Exit code 1 if fewer cases are judged.", least=1)

    def __post_init__(self) -> None:
        for name, (_, declared) in DECLARED.items():
            value = getattr(self, name)
            if declared.choices and value is not None and value not in declared.choices:
                raise CaseError(f"{spelled(name)} is {value!r}; known: {', '.join(declared.choices)}")
            if declared.least is not None and value is not None and value < declared.least:
                raise CaseError(f"{spelled(name)} is {value}; it must be at least {declared.least:g}")

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the options that differ from their default."""
        return tuple(name for name, (one, _) in DECLARED.items() if getattr(self, name) != one.default)


#: Options that name what is judged, or ask for it: where one is given, a run that judged nothing is an error.
ASKING = (
    "case",
    "profile",
    "subject",
    "engine_path",
    "moonep_module",
    "experts",
    "fault",
    "require",
    "require_cases",
)

#: Name -> field and declaration, in the order of ``--help``.
DECLARED: dict[str, tuple[Field[Any], Declared]] = {
    one.name: (one, one.metadata["declared"]) for one in fields(Options)
}


def spelled(name: str) -> str:
    """An option as it is typed on the command line."""
    return "--" + name.replace("_", "-")


def spelled_in_pytest(name: str) -> str:
    """An option as pytest takes it."""
    return "--moonep-" + name.replace("_", "-").removeprefix("moonep-")


def read(values: Mapping[str, Any], note: Callable[[str], None], spell: Callable[[str], str] = spelled) -> Options:
    """Options from what a parser found.

    Args:
        values: name -> value, of any of the options, by their old names too; None is not given.
        note: told in a sentence of each old name that was used.
        spell: how the parser spells a name.

    Raises:
        CaseError: if an option is given by both names; else see ``Options``.
    """
    found: dict[str, Any] = {name: values[name] for name in DECLARED if values.get(name) is not None}
    for name, (_, declared) in DECLARED.items():
        if declared.old is None or values.get(declared.old) is None:
            continue
        if name in found:
            raise CaseError(f"{spell(declared.old)} is the old name of {spell(name)}; give one of them")
        note(f"{spell(declared.old)} is now {spell(name)}; the old name goes with the next version")
        found[name] = values[declared.old]
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
    return Options(**given)
