"""How is a plan or a difference drawn? Small pictures in SVG, which a page holds in itself, in its colours.

Each function gives a whole ``<svg>`` element with a title for those who do not see it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 340, 190, 52, 34, 10
_TICKS = 4


def _svg(width: float, height: float, title: str, body: Iterable[str]) -> str:
    inner = "".join(body)
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{inner}</svg>'
    )


def _words(x: float, y: float, text: str, kind: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{kind}">{escape(text)}</text>'


def _short(value: float) -> str:
    """A number of an axis: ``1.5k``, ``20M``."""
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{sign}"
    return f"{value:.3g}"


def _round_up(value: float) -> float:
    """The next number whose quarters are short; 1 for nothing."""
    if value <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(step * size for step in (1, 2, 4, 8, 10) if step * size >= value * (1 - 1e-9))


def _frame(x_most: float, y_most: float, x_name: str, ticks_x: bool = True) -> list[str]:
    """Lines of a grid with numbers; nought is at the lower left."""
    parts = []
    for tick in range(_TICKS + 1):
        y = _HEIGHT - _BOTTOM - tick / _TICKS * (_HEIGHT - _BOTTOM - _TOP)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - 6}"/>')
        parts.append(_words(_LEFT - 6, y + 4, _short(tick / _TICKS * y_most), "end"))
        if ticks_x:
            x = _LEFT + tick / _TICKS * (_WIDTH - _LEFT - 14)
            parts.append(_words(x, _HEIGHT - _BOTTOM + 15, _short(tick / _TICKS * x_most), "middle"))
    return [*parts, _words((_LEFT + _WIDTH) / 2, _HEIGHT - 4, x_name, "middle")]


def ranks(before: Sequence[int], after: Sequence[int], title: str) -> str:
    """Bars of each rank: rows of its own experts, and rows that it computes; of many ranks the fullest."""
    step = -(-len(before) // 32)
    pairs = [(max(before[at : at + step]), max(after[at : at + step])) for at in range(0, len(before), step)]
    most = _round_up(max(*before, *after))
    wide, tall = (_WIDTH - _LEFT - 10) / len(pairs), _HEIGHT - _BOTTOM - _TOP
    parts = _frame(0, most, "rank" if step == 1 else f"rank (the fullest of {step} each)", ticks_x=False)
    for place, (was, now) in enumerate(pairs):
        for side, (value, kind) in enumerate(((was, "before"), (now, "after"))):
            x, height = _LEFT + wide * (place + 0.1 + 0.4 * side), value / most * tall
            parts.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{_HEIGHT - _BOTTOM - height:.1f}" '
                f'width="{wide * 0.38:.1f}" height="{height:.1f}"/>'
            )
        if len(pairs) <= 16 or place % 4 == 0:
            parts.append(_words(_LEFT + wide * (place + 0.5), _HEIGHT - _BOTTOM + 15, str(place * step), "middle"))
    return _svg(_WIDTH, _HEIGHT, title, parts)


def max_vio(loads: Sequence[int]) -> float:
    """(largest load of a rank - mean) / mean."""
    return max(loads) * len(loads) / sum(loads) - 1 if sum(loads) else 0.0


def over_max_vio(points: Iterable[tuple[float, float]], title: str) -> str:
    """Dots of cases over MaxVio; those that fall on one another are one."""
    points = list(points)
    x_most, y_most = (_round_up(max([0.0, *(point[axis] for point in points)])) for axis in (0, 1))
    seen: dict[tuple[int, int], int] = {}
    for x, y in points:
        at = (
            round(_LEFT + x / x_most * (_WIDTH - _LEFT - 14)),
            round(_HEIGHT - _BOTTOM - y / y_most * (_HEIGHT - _BOTTOM - _TOP)),
        )
        seen[at] = seen.get(at, 0) + 1
    dots = [
        f'<circle class="dot" cx="{x}" cy="{y}" r="{min(2.5 + count**0.5 / 2, 7):.1f}"/>'
        for (x, y), count in seen.items()
    ]
    return _svg(_WIDTH, _HEIGHT, title, [*_frame(x_most, y_most, "MaxVio of the routing"), *dots])


def heat(spread: Mapping[str, Any], title: str) -> str:
    """The map of a difference: a panel for each leading index, lines down, columns to the right."""
    panels, cell = spread["panels"], 4
    high, wide = len(panels[0]), len(panels[0][0])
    cell = max(4, min(14, 256 // max(wide, high)))
    parts, gap, across = [], 10, max(1, 640 // (wide * cell + 10))
    for place, panel in enumerate(panels):
        left, top = place % across * (wide * cell + gap), place // across * (high * cell + gap)
        parts.append(f'<rect class="empty" x="{left}" y="{top}" width="{wide * cell}" height="{high * cell}"/>')
        for line, marks in enumerate(panel):
            parts += _runs(marks, left, top + line * cell, cell)
    rows = -(-len(panels) // across)
    width = min(across, len(panels)) * (wide * cell + gap) - gap
    return _svg(width, rows * (high * cell + gap) - gap, title, parts)


def _runs(marks: str, left: int, top: int, cell: int) -> list[str]:
    """One rectangle for neighbours of one mark."""
    parts, begin = [], 0
    for at in range(1, len(marks) + 1):
        if at < len(marks) and marks[at] == marks[begin]:
            continue
        if marks[begin] in "123456789":
            shade = 0.25 + int(marks[begin]) / 12
            parts.append(
                f'<rect class="wrong" x="{left + begin * cell}" y="{top}" width="{(at - begin) * cell}" '
                f'height="{cell}" fill-opacity="{shade:.2f}"/>'
            )
        begin = at
    return parts
