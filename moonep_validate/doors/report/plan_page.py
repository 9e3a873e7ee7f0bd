"""How does a plan look as a page? Rows of each rank before and after, slots and costs, for routings of a user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from moonep_validate.doors.report import plots
from moonep_validate.doors.report.template import rendered
from moonep_validate.judge.oracle.plan import ExpectedPlan

#: Routings that are drawn one by one; the others are in the table.
_DRAWN = 24
_OVER = ("rows_moved", "slots_used", "padding_rows", "prefetch_bytes_max_rank", "capacity_utilisation")


@dataclass(frozen=True)
class Drawn:
    """A plan with its name and figures, see ``plan_stats``."""

    name: str
    plan: ExpectedPlan
    stats: dict[str, Any]

    @property
    def before(self) -> list[int]:
        """Rows of each rank's own experts."""
        layout = self.plan.layout
        loads: list[int] = (
            self.plan.alloc.sum(axis=1).reshape(layout.R, layout.experts_per_rank).sum(axis=1).tolist()
        )
        return loads

    @property
    def after(self) -> list[int]:
        """Rows that each rank computes."""
        rows: list[int] = self.plan.alloc.sum(axis=0).tolist()
        return rows

    @property
    def sizes(self) -> str:
        """The geometry."""
        one = self.plan.layout
        sizes = f"R={one.R}, E={one.E}, K={one.K}, S={one.S}"
        return f"generation {one.generation}: {sizes}, {one.num_slots} slots a rank"


def plan_page(drawn: Sequence[Drawn]) -> str:
    """The whole page of some plans, at least one."""
    figures = [name for name in drawn[0].stats if not isinstance(drawn[0].stats[name], list)]
    points = [(one, plots.max_vio(one.before)) for one in drawn]
    return rendered(
        "plan.html.j2",
        rows=[(one.name, x, [_figure(one.stats[name]) for name in figures]) for one, x in points],
        figures=[name.replace("_", " ") for name in figures],
        drawn=[
            (one, _ranks(one), list(zip(one.before, one.after, one.stats["slots_used_per_rank"], strict=True)))
            for one in drawn[:_DRAWN]
        ],
        left=len(drawn) - _DRAWN,
        dots=[(name.replace("_", " "), _dots(points, name)) for name in _OVER] if len(drawn) > 1 else [],
    )


def _ranks(one: Drawn) -> Markup:
    return Markup(plots.ranks(one.before, one.after, f"rows of each rank, {one.name}"))


def _dots(points: Sequence[tuple[Drawn, float]], name: str) -> Markup:
    return Markup(plots.over_max_vio([(x, one.stats[name]) for one, x in points], name))


def _figure(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}"
