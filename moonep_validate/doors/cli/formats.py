"""The commands about bytes and files: ``checkpoint`` and ``memory``. They only wire."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from moonep_validate.cases.case import CaseError
from moonep_validate.doors.cli.options import console

if TYPE_CHECKING:
    from moonep_validate.formats.kimi_k3 import Geometry
    from moonep_validate.tools.checkpoint import Progress, Report
    from moonep_validate.tools.memory import Footprint

#: Findings that are printed; all of them are counted, and in the JSON.
SHOWN = 20

JsonOption = Annotated[bool, typer.Option("--json", help="One line of JSON.")]


def checkpoint(
    folder: Annotated[Path, typer.Argument(help="Folder with config.json and safetensors files.")],
    ep: Annotated[
        int | None, typer.Option(min=1, help="Expert-parallel ranks: also print the bytes of each.")
    ] = None,
    headers_only: Annotated[
        bool,
        typer.Option(
            "--headers-only", help="Names, shapes and dtypes, from the head of every file; do not read the data."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Inspect a checkpoint of MXFP4 experts: is all of it there, and does it hold plausible bytes?"""
    from moonep_validate.tools.checkpoint import inspect, refuse_ranks
    from moonep_validate.tools.config import read_config

    if ep is not None:
        refuse_ranks(ep, read_config(folder).num_experts)
    report = _with_progress(lambda told: inspect(folder, not headers_only, told))
    if json:
        sys.stdout.write(dumps(report.to_json(ep)) + "\n")
    else:
        _show_report(report, ep)
    raise typer.Exit(int(bool(report.findings)))


def memory(
    model: Annotated[str, typer.Option(help="kimi-k3, or a folder with a checkpoint's config.json.")] = "kimi-k3",
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.")] = 16,
    weight_format: Annotated[str, typer.Option("--format", help="Weight format, a word of a case.")] = "mxfp4",
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens a rank dispatches at once.")] = 4096,
    layers: Annotated[int | None, typer.Option(min=1, help="MoE layers on a rank [all of the model].")] = None,
    pad: Annotated[int, typer.Option(min=1, help="token_padding of the Buffer.")] = 128,
    slots: Annotated[int | None, typer.Option(min=1, help="Slots a rank, generation A only [E/R].")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="h100, h200, b200 or a number of GiB: exit code 1 if a plan does not fit.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print the bytes that each rank needs for experts, slots and buffers, and whether they fit a GPU."""
    from moonep_validate.tools.checkpoint import refuse_ranks
    from moonep_validate.tools.memory import gpu_bytes, plan

    geometry = _model(model)
    refuse_ranks(ep, geometry.num_experts)
    geometry = replace(geometry, moe_layers=layers) if layers else geometry
    size = gpu_bytes(gpu) if gpu else None
    plans = [
        plan(geometry, generation, ep, weight_format, tokens, pad, slots if generation == "A" else None)
        for generation in "AB"
    ]
    if json:
        head = {"model": model, "ep": ep, "format": weight_format, "tokens": tokens, "gpu_bytes": size}
        sys.stdout.write(dumps({**head, "plans": [one.to_json(size) for one in plans]}) + "\n")
    else:
        _show_memory(plans, f"{model}, EP {ep}, {weight_format}, {tokens} tokens a rank", size, gpu)
    raise typer.Exit(int(size is not None and not all(one.fits(size) for one in plans)))


def _model(name: str) -> Geometry:
    from moonep_validate.tools.config import CHECKED, read_config
    from moonep_validate.tools.memory import MODELS

    if name in MODELS:
        return MODELS[name]
    if not Path(name).is_dir():
        raise CaseError(f"--model is {name!r}; known: {', '.join(MODELS)}, or the folder of a checkpoint")
    return read_config(Path(name), (*CHECKED, "top_k"))


def _with_progress(inspection: Callable[[Progress], Report]) -> Report:
    """Run an inspection under a bar with the time left; on stderr, so that the output stays clean."""
    from rich import progress

    columns = (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn())
    text = progress.TextColumn("{task.description}", markup=False)
    stderr = Console(stderr=True)
    with progress.Progress(*columns, text, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("reading headers", total=None)
        return inspection(
            lambda done, total, name: bar.update(task, completed=done, total=total, description=name)
        )


def _show_report(report: Report, ep: int | None) -> None:
    summary, one = report.to_json(ep), report.geometry
    read = "read" if report.content else "not read (--headers-only)"
    _print(f"{report.folder}: {summary['tensors']} tensors, {_size(summary['bytes'])}; data {read}")
    _print(
        f"routed experts: {summary['expert_tensors']} tensors, {_size(summary['expert_bytes'])}; the config says "
        f"{one.num_experts} experts in {one.moe_layers} layers, hidden {one.hidden}, latent {one.latent}, "
        f"intermediate {one.intermediate}"
    )
    for rank, size in enumerate(summary.get("expert_bytes_per_rank", ())):
        _print(f"  rank {rank}: {_size(size)} of routed experts")
    for finding in report.findings[:SHOWN]:
        _print(f"{finding.id} {finding.where}: {finding.message}")
    if more := len(report.findings) - SHOWN:
        _print(f"... and {more} more; --json has all" if more > 0 else "")
    counts = ", ".join(f"{count} of {id}" for id, count in sorted(Counter(f.id for f in report.findings).items()))
    _print(f"{len(report.findings)} findings: {counts}" if counts else "no findings")


def _show_memory(plans: list[Footprint], title: str, size: int | None, gpu: str | None) -> None:
    _print(title)
    for one in plans:
        _print(f"generation {one.layout.generation}")
        for line in one.lines:
            _print(f"  {line.what:26}{_size(line.nbytes):>30}  {line.why}")
        _print(f"  {'total a rank':26}{_size(one.total):>30}")
        if size is not None:
            left = size - one.total
            _print(
                f"  {'fits' if left >= 0 else 'does not fit'} {gpu} ({_size(size)}): {_size(abs(left))} "
                + ("are left for everything else" if left >= 0 else "are missing")
            )
    _print("not counted: attention, shared experts, embeddings, KV cache, activations")


def _print(text: str) -> None:
    if text:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _size(nbytes: int) -> str:
    """Decimal and binary, since GPUs are sold in one and filled in the other."""
    if nbytes < 10**6:
        return f"{nbytes} bytes"
    if nbytes < 10**9:
        return f"{nbytes / 10**6:.1f} MB ({nbytes / 2**20:.1f} MiB)"
    return f"{nbytes / 10**9:.1f} GB ({nbytes / 2**30:.1f} GiB)"
