"""How fast is the suite? Ratios measured in one run, on one core; absolute times depend on the machine."""

from __future__ import annotations

import importlib.util
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.cases.layout import Ints, Layout
from moonep_validate.data.routing import topk_ids
from moonep_validate.judge.checks import CHECKS, run_check
from moonep_validate.judge.facts import Step
from moonep_validate.judge.oracle.plan import ExpectedPlan, make_plan
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.judge import judge
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.record import open_trace, record
from moonep_validate.pipeline.run import run_case
from moonep_validate.pipeline.selection import too_few_gpus
from moonep_validate.trace.trace import Call, Trace

_LARGE = Case.parse("genB+R16+E896+K16+S4096+H8+pad128+zipf:1.0")
_SMALL = Case.parse("genB+R4+E16+K4+S16")
_NAIVE_TOKENS = (128, 256, 512)
_REPEATS = 5
_PROCESSES, _MANY, _SEEDS, _ROUNDS = 2, 200, 6, 10


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
    _plan_checks(say)
    for case in (_SMALL, _SMALL.but(I=32)):
        _small_cases(say, case)


def worlds(console: Console) -> None:
    """Small cases a second of four ranks as processes against threads, and what a pool costs to start."""
    rates, case = {}, _SMALL
    for world in ("threads", "processes"):
        job = Job(world=world)
        start = time.perf_counter()
        assert run_case(job, case)[1].ok
        if world == "processes":
            console.print(f"first case in {world}: {time.perf_counter() - start:.1f} s", highlight=False)
        cases = [case.but(seed=seed) for seed in range(_SEEDS)] * _ROUNDS
        for one in cases[:_SEEDS]:
            run_case(job, one)
        start = time.perf_counter()
        for one in cases:
            run_case(job, one)
        rates[world] = len(cases) / (time.perf_counter() - start)
    for world, rate in rates.items():
        console.print(f"{case} in {world}: {rate:.1f} cases a second", highlight=False)
    ratio = rates["threads"] / rates["processes"]
    console.print(f"a case in processes takes {ratio:.2f}x its time in threads", highlight=False)


def _small_cases(say: Callable[[str], None], case: Case) -> None:
    with ProcessPoolExecutor(_PROCESSES, mp_context=get_context("spawn")) as pool:
        rate = sum(60 / seconds for seconds in pool.map(partial(_many_small, case), [_MANY] * _PROCESSES))
    say(f"{case}, recorded and judged in {_PROCESSES} processes (pytest -n {_PROCESSES}): {rate:.0f} a minute")


def _many_small(case: Case, many: int) -> float:
    """Seconds per small case, over many with a few seeds in turn: cases of a profile share their weights too."""
    cases = [case.but(seed=seed) for seed in range(_SEEDS)]
    for one in cases:
        run_case(Job(), one)
    start = time.perf_counter()
    for number in range(many):
        run_case(Job(), cases[number % _SEEDS])
    return (time.perf_counter() - start) / many


def _plan_checks(say: Callable[[str], None]) -> None:
    """All checks of the plan stage on the large plan, as if a subject had returned it."""
    trace = _plan_trace(_LARGE)
    checks = [check for check in CHECKS.values() if check.stage == "plan"]
    start = time.perf_counter()
    step = Step(trace, "base")
    results = [run_check(check, step, trace) for check in checks]
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # of the whole process so far
    bad = [result for result in results if result.status not in ("passed", "not_applicable")]
    assert not bad, bad
    say(f"all {len(checks)} plan checks on the plan of S={_LARGE.S}: {seconds:.2f} s, process peak {peak:.0f} MiB")


def _plan_trace(case: Case) -> Trace:
    """A trace of one dispatch whose plan is the oracle's; rows are 8 columns of zeros."""
    routing, layout = _routing(case), Layout.of(case)
    plan = make_plan(routing, layout)
    trace = open_trace(Job(), case)
    for rank in range(layout.R):
        tensors = {
            "topk_ids": torch.from_numpy(routing[rank]).int(),
            "dst": torch.from_numpy(plan.dst[rank]),
            "cu_seqlens": torch.from_numpy(plan.cu_seqlens[rank]).int(),
            "experts_to_copy": torch.from_numpy(plan.experts_to_copy).int(),
            "zero_fill_ranges": torch.from_numpy(plan.zero_fill_ranges[rank]).int(),
            "remote_stats": torch.from_numpy(plan.remote_stats[rank]).int(),
            "rows": torch.zeros(layout.num_rows, case.H, dtype=torch.bfloat16),
            **_duplicate_lists(plan, rank),
        }
        call = Call("base", "dispatch", done=True)
        call.put_as_is(**tensors)  # their form too: a tensor without one cannot be judged
        trace.calls.append([call])
    return trace


def _duplicate_lists(plan: ExpectedPlan, rank: int) -> dict[str, torch.Tensor]:
    """``dup_groups``, ``dup_loffs``, ``dup_counts`` of one rank."""
    layout = plan.layout
    raw, dst = plan.raw.reshape(-1), plan.dst.reshape(-1)
    here = raw // layout.num_rows == rank
    token, row = np.arange(raw.size) // layout.K, raw % layout.num_rows
    primary = np.zeros(raw.size // layout.K, np.int64)
    primary[token[here & (dst >= 0)]] = row[here & (dst >= 0)]
    tokens, first, count = np.unique(token[here & (dst < 0)], return_index=True, return_counts=True)
    groups, rows = np.full((layout.num_rows, 3), -1), np.full(layout.num_rows, -1)
    groups[: len(tokens)] = np.stack([primary[tokens], first, count], axis=1)
    rows[: count.sum()] = row[here & (dst < 0)]
    counts = np.array([len(tokens), count.sum()])
    arrays = {"dup_groups": groups, "dup_loffs": rows, "dup_counts": counts}
    return {name: torch.from_numpy(array).int() for name, array in arrays.items()}


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


#: The width of the experts is small, since the transport is what is measured.
_K3 = "gen{generation}+R2+E896+K16+S4096+H3584+I128+pad128+lognormal:1.0+fill:real"


def k3(console: Console, device: str) -> None:
    """Kimi-K3's geometry through the reference on two ranks: what judging costs against the run itself.

    Args:
        console: where to print.
        device: ``cpu`` or ``cuda``.
    """
    if reason := too_few_gpus(make_job(Options(device=device)), 2):
        raise CaseError(reason)
    for generation in ("A", "B"):
        case = Case.parse(_K3.format(generation=generation))
        for keep in ("digest", "columns"):
            job = make_job(Options(world="processes", device=device, record=keep, deadline=300.0))
            record(job, case)  # starts the ranks, maps memory, makes the data
            begin = time.perf_counter()
            trace = record(job, case)
            middle = time.perf_counter()
            verdict = judge(trace)
            end = time.perf_counter()
            judged, ran = end - middle, middle - begin
            line = f"run {ran:.2f} s, judged {judged:.2f} s, {judged / ran:.2f} of the run"
            console.print(f"{case} --record {keep}: {verdict.status}, {line}", highlight=False, soft_wrap=True)
            if not verdict.ok:
                console.print(verdict.diagnosis, markup=False, highlight=False, soft_wrap=True)
