"""How fast is the suite? Ratios measured in one run, on one core; absolute times depend on the machine."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from moonep_validate.case import Case
from moonep_validate.contract import Ints, Layout
from moonep_validate.engine import Job, run_case
from moonep_validate.oracle.plan import make_plan
from moonep_validate.routing import topk_ids

_LARGE = Case.parse("genB+R16+E896+K16+S4096+pad128+zipf:1.0")
_SMALL = Case.parse("genB+R4+E16+K4+S16")
_NAIVE_TOKENS = (128, 256, 512)
_REPEATS = 5


def core(console: Console, naive: Path | None) -> None:
    """Plan speed against the naive loop, growth with S, and small cases a minute.

    Args:
        naive: file with ``naive_plan(topk, layout)``; it is part of the tests, not of the package.
    """
    torch.set_num_threads(1)

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say("one core, medians; the ratios are measured in this run")
    sizes = {tokens: _plan_seconds(_LARGE.but(S=tokens)) for tokens in (1024, 2048, _LARGE.S)}
    for tokens, seconds in sizes.items():
        growth = f", {seconds / sizes[tokens // 2]:.2f}x for twice the tokens" if tokens // 2 in sizes else ""
        say(f"plan R=16 E=896 K=16 S={tokens}: {seconds * 1000:.0f} ms{growth}")
    if naive is None:
        say("naive loop: not run (tests/self/naive_plan.py is not here: run in a checkout, or give --naive)")
    else:
        _against_naive(say, _load(naive), sizes[_LARGE.S])
    run_case(Job(), _SMALL)
    seconds = _median(lambda: run_case(Job(), _SMALL))
    say(f"small case {_SMALL}, recorded and judged: {seconds * 1000:.0f} ms, {60 / seconds:.0f} a minute")


def _against_naive(say: Callable[[str], None], naive_plan: Callable[[Ints, Layout], Any], fast: float) -> None:
    """The loop is linear in S plus a constant for the tables: fit both, and extrapolate to the large case."""
    measured = []
    for tokens in _NAIVE_TOKENS:
        case = _LARGE.but(S=tokens)
        routing, layout = _routing(case), Layout.of(case)
        measured.append(_once(partial(naive_plan, routing, layout)))
    slope, constant = np.polyfit(_NAIVE_TOKENS, measured, 1)
    whole = slope * _LARGE.S + constant
    say(f"naive loop: {', '.join(f'S={s} {t:.2f} s' for s, t in zip(_NAIVE_TOKENS, measured, strict=True))}")
    say(f"naive loop at S={_LARGE.S}, extrapolated linearly: {whole:.0f} s, {whole / fast:.0f}x the fast plan")


def _routing(case: Case) -> Ints:
    return np.stack([topk_ids(case, rank).numpy() for rank in range(case.R)]).astype(np.int64)


def _plan_seconds(case: Case) -> float:
    routing, layout = _routing(case), Layout.of(case)
    return _median(lambda: make_plan(routing, layout))


def _median(function: Callable[[], object]) -> float:
    return statistics.median(_once(function) for _ in range(_REPEATS))


def _once(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _load(path: Path) -> Callable[[Ints, Layout], Any]:
    spec = importlib.util.spec_from_file_location("naive_plan", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[Ints, Layout], Any] = module.naive_plan
    return function
