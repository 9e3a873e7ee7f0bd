"""What ``bench ep`` prints: ratios of every way to compute the layer, stages of the reference, and thresholds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from moonep_validate.cases.case import Case, CaseError

if TYPE_CHECKING:
    from moonep_validate.studies.bench_ep import Point


def bench_ep(
    console: Console, max_vio: str, tokens: str, repeats: int, thresholds: Path | None, case: str | None
) -> int:
    """Sweep, print, and hold against thresholds: the exit code, 1 if one is not kept.

    Raises:
        CaseError: for values that cannot be meant; before anything is measured.
    """
    from moonep_validate.studies.bench_ep import BASE, sweep
    from moonep_validate.studies.thresholds import beyond, read_thresholds

    base = Case.parse(case or BASE)
    agreed = read_thresholds(thresholds, "cpu", base.R) if thresholds else None
    points = sweep(base, _numbers("--max-vio", max_vio), [int(x) for x in _numbers("--tokens", tokens)], repeats)
    _show(console, points)
    missed = beyond(agreed, points) if agreed else []
    for line in missed:
        console.print(line, highlight=False, soft_wrap=True)
    return int(bool(missed))


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")]
    except ValueError:
        raise CaseError(f"{option} is {text!r}: numbers with commas are needed") from None


def _show(console: Console, points: list[Point]) -> None:
    from moonep_validate.studies.bench_ep import ALL_TO_ALL, MOONEP, STAGES, WAYS

    others = [way for way in WAYS if way != ALL_TO_ALL]
    say = f"CPU ranks, gloo; layer over {ALL_TO_ALL} in the same turn, median (quartiles); moonep is our reference"
    console.print(say, highlight=False)
    table = Table("MaxVio", "tokens", *others, f"{MOONEP} cold", box=None, pad_edge=False)
    for point in points:
        cold = point.cold[MOONEP] / sorted(point.seconds[MOONEP])[len(point.seconds[MOONEP]) // 2]
        ratios = [_spread(point.ratio(way, ALL_TO_ALL)) for way in others]
        table.add_row(f"{point.max_vio:g}", str(point.tokens), *ratios, f"{cold:.1f}x")
    console.print(table)
    console.print("stages of the reference, each part of their sum", highlight=False)
    table = Table("MaxVio", "tokens", *STAGES, box=None, pad_edge=False)
    for point in points:
        shares = [_spread(point.share(stage)) for stage in STAGES]
        table.add_row(f"{point.max_vio:g}", str(point.tokens), *shares)
    console.print(table)


def _spread(quartiles: tuple[float, float, float]) -> str:
    middle, lower, upper = quartiles
    return f"{middle:.2f} ({lower:.2f}-{upper:.2f})"
