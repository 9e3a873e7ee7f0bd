"""Generated cases for tests: the strategy of ``moonep_validate.studies.search``, always the same draws."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, given, seed, settings

from moonep_validate.cases.case import Case
from moonep_validate.studies.search import case_strategy


def for_each_case(
    count: int,
    visit: Callable[[Case], object],
    draw_seed: int = 0,
    portable: bool = False,
    generations: str = "AB",
) -> None:
    """Call ``visit`` with ``count`` cases; hypothesis's shrinker is off, since shrink.py is ours for all sources."""

    def one(case: Case) -> None:
        visit(case)

    profile = settings(
        max_examples=count,
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    seed(draw_seed)(profile(given(case_strategy(tuple(generations), portable))(one)))()
