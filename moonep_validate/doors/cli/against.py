"""What ``plan --against`` prints: rows of the fullest rank three ways, a line a routing, and the median of all."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from moonep_validate.errors import CaseError
from moonep_validate.tools.against import Against, Speeds

#: Routings that are shown one by one on the terminal.
_SHOWN = 40


def speeds_of(link: float | None, gemm: float | None, hidden: int, intermediate: int) -> Speeds | None:
    """The machine that options name.

    Raises:
        CaseError: if one of both is missing.
    """
    if (link is None) != (gemm is None):
        raise CaseError("--link-gbs and --gemm-tflops: the break-even needs both")
    return None if link is None or gemm is None else Speeds(link, gemm, 6.0 * hidden * intermediate)


def show_against(console: Console, found: Sequence[Against]) -> None:
    """A table, and what is true of all of it."""
    head = ("layer", "step", "mean rows", "plain EP", "static", "MoonEP", "MaxVio", "prefetch MiB")
    timed = found[0].gain is not None
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (*head, *(("break-even MaxVio", "plain/MoonEP time") if timed else ())):
        table.add_column(name, justify="right")
    for one in found[:_SHOWN]:
        values = (one.layer, one.step, one.mean, one.plain, f"{one.static:.1f}", one.moonep, f"{one.max_vio:.3f}")
        more = (f"{one.break_even:.3f}", f"{one.gain:.2f}") if timed else ()
        table.add_row(*map(str, values), f"{one.prefetch_bytes / 2**20:.1f}", *more)
    console.print(table)
    if len(found) > _SHOWN:
        console.print(f"and {len(found) - _SHOWN} more: --json has all", highlight=False)
    for line in summary(found):
        console.print(line, highlight=False, soft_wrap=True)


def summary(found: Sequence[Against]) -> list[str]:
    """Fullest rank over the mean, median and most, and how many routings are beyond the break-even."""
    ways: dict[str, Callable[[Against], float]] = {
        "plain EP": lambda one: one.plain / one.mean,
        "static redundancy": lambda one: one.static / one.mean,
        "MoonEP": lambda one: one.moonep / one.mean,
    }
    lines = []
    for name, of in ways.items():
        ratios = [of(one) for one in found]
        lines.append(
            f"{name}: fullest rank / mean: median {statistics.median(ratios):.3f}, most {max(ratios):.3f}"
        )
    if gains := [one.gain for one in found if one.gain is not None]:
        worth = sum(gain > 1 for gain in gains)
        lines.append(f"MoonEP's plan is worth its prefetch in {worth} of {len(gains)} routings")
    return lines


def write_json(found: Sequence[Against]) -> None:
    """One line a routing."""
    for one in found:
        sys.stdout.write(json.dumps(vars(one)) + "\n")
