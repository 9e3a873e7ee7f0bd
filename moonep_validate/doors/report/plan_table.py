"""How does a plan look? Tables of ranks and groups, and the figures of its cost; torch is not imported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moonep_validate.judge.oracle.plan import ExpectedPlan

_LARGE = 32


def show_plan(console: Console, plan: ExpectedPlan, stats: dict[str, object], title: str) -> None:
    """What MoonEP will do with a routing."""
    layout = plan.layout
    console.print(f"[bold]{escape(title)}[/bold]", highlight=False, soft_wrap=True)
    console.print(
        f"generation {layout.generation}: R={layout.R} ranks, E={layout.E} experts, K={layout.K}, S={layout.S} "
        f"tokens a rank, padding {layout.pad}, {layout.num_slots} slots a rank, NvS={layout.num_rows} rows",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        "rank",
        "home load",
        "computes",
        "moved in",
        "slots hold experts",
        "copies of mine",
        "padding",
        "last row",
    ):
        table.add_column(name, justify="left" if "hold" in name else "right")
    for rank in range(layout.R):
        own = range(rank * layout.experts_per_rank, (rank + 1) * layout.experts_per_rank)
        rows = int(plan.alloc[:, rank].sum())
        slots = [int(expert) for expert in plan.experts_to_copy[rank] if expert >= 0]
        end = int(plan.cu_seqlens[rank, -1])
        table.add_row(
            str(rank),
            str(int(plan.alloc[own].sum())),
            str(rows),
            str(rows - int(plan.alloc[own, rank].sum())),
            _listed(slots),
            str(int(plan.remote_stats[rank, 1])),
            str(end - rows),
            f"{end} of {layout.num_rows}",
        )
    console.print(table)
    if layout.R * layout.E <= _LARGE * _LARGE // 4:
        _show_groups(console, plan)
    for name, value in stats.items():
        console.print(f"  {name.replace('_', ' ')}: {_figure(name, value)}", highlight=False)


def _show_groups(console: Console, plan: ExpectedPlan) -> None:
    """The groups with rows of every rank."""
    experts = plan.layout.group_experts(plan.experts_to_copy)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "group", "expert", "rows", "padding", "ends at", ""):
        table.add_column(name, justify="right" if name else "left")
    for rank, ends in enumerate(plan.cu_seqlens):
        begin = 0
        for group, end in enumerate(ends.tolist()):
            if end > begin:
                padding = int(plan.zero_fill_ranges[rank, group, 1])
                kind = "slot" if group >= plan.layout.num_home_groups else ""
                values = (rank, group, experts[rank, group], end - begin - padding, padding, end)
                table.add_row(*map(str, values), kind)
            begin = end
    console.print(table)


def _listed(values: Sequence[int]) -> str:
    shown = " ".join(map(str, values[:_LARGE]))
    return (shown + f" and {len(values) - _LARGE} more" if len(values) > _LARGE else shown) or "-"


def _figure(name: str, value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, int) and "bytes" in name:
        return f"{value:,} ({value / 2**20:.1f} MiB)"
    if isinstance(value, Iterable):
        return _listed(list(value))
    return str(value)
