"""Which options do several commands share, and which job do they name?"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from moonep_validate.cases.case import CaseError

if TYPE_CHECKING:
    from moonep_validate.pipeline.job import Job

#: What all commands print to; a fixed width where nobody looks, so that output can be compared.
console = Console(width=None if sys.stdout.isatty() else 120)

CaseOption = Annotated[list[str] | None, typer.Option("--case", help="A case line; may be repeated.")]
FaultOption = Annotated[
    list[str] | None, typer.Option("--fault", help="Seed a fault, e.g. slot-not-filled:rank=1.")
]
DeadlineOption = Annotated[float, typer.Option(min=0.1, help="Seconds a rank may run without a sign of life.")]
ModuleOption = Annotated[
    str | None, typer.Option(help="Importable module with MoonEP's Buffer; else the reference.")
]
ApiOption = Annotated[str | None, typer.Option(help="API generation A or B, where signatures do not tell.")]
PolicyOption = Annotated[
    str | None, typer.Option(help="upstream: also gate on upstream's exact plan and rounding; legal.")
]
SubjectOption = Annotated[
    str, typer.Option(help="reference, vllm, sglang, or MODULE:CLASS of an engine's integration.")
]
PathOption = Annotated[
    str | None, typer.Option("--sglang-path", help="Folder with the package sglang; first on the import path.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="Where tensors live: cpu or cuda; by default cpu, for an engine cuda if there are GPUs."),
]
WorldOption = Annotated[
    str | None, typer.Option(help="threads or processes: where ranks run; by default the subject's own way.")
]
RecordOption = Annotated[
    str, typer.Option("--record", help="What to keep of large tensors: plan, digest, columns[:N] or full.")
]
RanksOption = Annotated[int | None, typer.Option(min=1, help="Only the cases of so many ranks.")]
RequireOption = Annotated[
    list[str] | None,
    typer.Option(help="STAGE=PACKAGE that must really run, e.g. load=vllm or transport=moonep; else exit code 1."),
]
WaiversOption = Annotated[
    str | None, typer.Option(help="File of known defects of an engine; none: no waivers; else those we ship.")
]
ExpertsOption = Annotated[str, typer.Option(help="Who computes expert rows: torch, deep_gemm, MODULE:FUNCTION.")]
RelaxedOption = Annotated[bool, typer.Option("--relaxed", help="Also run cases that real hardware refuses.")]

DestructiveOption = Annotated[
    bool, typer.Option("--destructive", help="Also give bad input that may trap, hang or end the process.")
]

#: What ``job_of`` reads and a command does not offer.
NO_OPTIONS: dict[str, Any] = {
    "subject": "reference",
    **dict.fromkeys(("sglang_path", "moonep_module", "api", "policy", "waivers", "fault")),
    "relaxed": False,
    "destructive": False,
    "experts": "reference",
}


def job_of(options: Mapping[str, Any]) -> Job:
    """The job of a command, from its own parameters."""
    from moonep_validate.pipeline.job import make_job

    given = {name: options[name] for name in ("api", "policy", "relaxed", "destructive", "deadline", "device")}
    for name, known in (("api", ("A", "B")), ("policy", ("upstream", "legal")), ("device", ("cpu", "cuda"))):
        if given[name] is not None:
            one_of(f"--{name}", given[name], known)
    with console.status("starting"):
        return make_job(
            options["moonep_module"],
            faults=options["fault"] or (),
            subject=options["subject"],
            path=options["sglang_path"],
            waivers="" if options["waivers"] == "none" else options["waivers"],
            experts=options["experts"],
            world=options.get("world"),
            keep=options.get("record", "full"),
            **given,
        )


def one_of(option: str, value: str, known: Iterable[str]) -> None:
    """Refuse a value that an option does not know.

    Raises:
        CaseError: with the known ones.
    """
    if value not in known:
        raise CaseError(f"{option} is {value!r}; known: {', '.join(known)}")
