"""The command ``plan``. It only wires, and does without torch where it can, so that a plan comes at once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.cases.layout import Layout
from moonep_validate.doors.cli.against import show_against, speeds_of, write_json
from moonep_validate.doors.cli.options import console, one_of

if TYPE_CHECKING:
    from moonep_validate.doors.report.plan_page import Drawn
    from moonep_validate.judge.oracle.plan import ExpectedPlan
    from moonep_validate.tools.against import Speeds
    from moonep_validate.tools.plan_input import Planned


def plan(
    case: Annotated[
        str | None, typer.Option("--case", help="A case line; beside --input it gives the sizes.")
    ] = None,
    input: Annotated[
        Path | None, typer.Option("--input", help="JSON Lines, one routing a line, or - for standard input.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One line of JSON per routing.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="A page to write, in place of the tables.")] = None,
    hidden: Annotated[
        int | None, typer.Option(min=1, help="Hidden size of an expert [case's H, or 3584].")
    ] = None,
    intermediate: Annotated[
        int | None, typer.Option(min=1, help="Intermediate size of an expert [case's I, or 3072].")
    ] = None,
    weight_format: Annotated[str, typer.Option("--format", help="Weight format, a word of a case.")] = "bf16",
    against: Annotated[
        bool, typer.Option("--against", help="What balance is worth: plain EP, static redundancy, MoonEP.")
    ] = False,
    layers: Annotated[int, typer.Option(min=1, help="Of --against: routings a step, one a layer.")] = 1,
    redundant: Annotated[
        int, typer.Option(min=0, help="Of --against: replicas a rank that static redundancy has.")
    ] = 1,
    link_gbs: Annotated[
        float | None, typer.Option("--link-gbs", min=0.001, help="Of --against: GB/s into one rank.")
    ] = None,
    gemm_tflops: Annotated[
        float | None, typer.Option("--gemm-tflops", min=0.001, help="Of --against: TFLOP/s of one rank's experts.")
    ] = None,
) -> None:
    """Show what MoonEP will do with a routing."""
    if json and html:
        raise CaseError("--json and --html: give one of them")
    from moonep_validate.doors.report.plan_page import Drawn
    from moonep_validate.doors.report.plan_table import show_plan
    from moonep_validate.formats.stored import FORMATS
    from moonep_validate.judge.oracle.statistics import plan_stats
    from moonep_validate.tools.plan_input import plan_json

    if case is None and input is None:
        raise CaseError("plan needs either --case or --input")
    one_of("--format", weight_format, tuple(FORMATS))
    whole = Case.parse(case) if case else None
    hidden, intermediate = hidden or (whole.H if whole else 3584), intermediate or (whole.I if whole else 3072)
    size = FORMATS[weight_format].expert_bytes(hidden, intermediate)
    if against:
        if html:
            raise CaseError("--against and --html: give one of them")
        speeds = speeds_of(link_gbs, gemm_tflops, hidden, intermediate)
        _against(_planned(whole, input), size, layers, redundant, speeds, json)
        return
    drawn: list[Drawn] = []
    for number, one in _planned(whole, input):
        stats, name = plan_stats(one, size), f"line {number}" if number else str(whole)
        if html:
            drawn.append(Drawn(name, one, stats))
        elif json:
            sys.stdout.write(plan_json(one, stats) + "\n")
        else:
            show_plan(console, one, stats, name)
    if html:
        _write(html, drawn)


def _planned(case: Case | None, path: Path | None) -> Iterator[tuple[int, ExpectedPlan]]:
    """Number of the line, or 0, and plan of each routing; what is odd about a line is said beside them."""
    from moonep_validate.tools.plan_input import read_routings

    with _opened(path) as source:
        layout = Layout.of(case) if case else None
        for number, one, remark in (
            [_of_case(case)] if source is None else read_routings(source, str(path), layout)
        ):
            yield number, one
            if remark:
                sys.stderr.write(f"moonep-validate: line {number}: {remark}\n")


def _against(
    plans: Iterable[tuple[int, ExpectedPlan]],
    size: int,
    layers: int,
    redundant: int,
    speeds: Speeds | None,
    json: bool,
) -> None:
    """What balance is worth on all routings.

    Raises:
        CaseError: if they are not whole steps of one model.
    """
    from moonep_validate.tools.against import against

    try:
        found = against([plan for _, plan in plans], size, layers, redundant, speeds)
    except ValueError as error:
        raise CaseError(f"--against: {error}") from None
    if json:
        write_json(found)
    else:
        show_against(console, found)


def _write(out: Path, drawn: list[Drawn]) -> None:
    """The page of all plans, if there is any."""
    if not drawn:
        raise CaseError("--html: there is no routing to draw")
    from moonep_validate.doors.cli.report import write_page
    from moonep_validate.doors.report.plan_page import plan_page

    write_page(out, plan_page(drawn))
    console.print(f"wrote {out}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _opened(path: Path | None) -> Iterator[BinaryIO | None]:
    if path is None:
        yield None
    elif str(path) == "-":
        yield sys.stdin.buffer
    elif not path.is_file():
        raise CaseError(f"--input {path} is not a file; write - for standard input")
    else:
        with path.open("rb") as opened:
            yield opened


def _of_case(case: Case | None) -> Planned:
    import numpy as np

    from moonep_validate.data.routing import topk_ids
    from moonep_validate.judge.oracle.plan import make_plan
    from moonep_validate.tools.plan_input import Planned

    assert case is not None
    topk = np.stack([topk_ids(case, rank).numpy() for rank in range(case.R)])
    return Planned(0, make_plan(topk, Layout.of(case)), "")
