"""What do the sampled MoE layer calls of a served engine say? Traces of all ranks, judged without any engine.

A call counts only if every rank wrote it down. Calls in which two ranks hold the same tokens, as in an engine's
warm-up, are vacuous and left out where there are others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from moonep_validate.judge.registry import said
from moonep_validate.judge.verdict import Verdict, worst
from moonep_validate.pipeline.judge import judge
from moonep_validate.served.answers import Layers
from moonep_validate.served.taps.written import SUFFIX
from moonep_validate.trace.manifest import Manifest
from moonep_validate.trace.trace import Trace

RIGHT = "the MoE layers are right"


def collect(folder: Path) -> list[Trace]:
    """The calls that every rank wrote down, in order.

    Raises:
        TraceError: for a file that is damaged.
    """
    found: dict[str, list[Trace]] = defaultdict(list)
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        found[path.name.partition("-")[0]].append(Trace.load(path))
    return [_whole(ranks) for ranks in found.values() if len(ranks) == ranks[0].case.R]


def _whole(ranks: Sequence[Trace]) -> Trace:
    """One trace of those of the ranks."""
    first = ranks[0]
    other = [rank for rank, one in enumerate(ranks) if one.parts != first.parts]
    first.errors += [f"rank {rank} imported other parts than rank 0" for rank in other]
    first.calls = [next(filter(None, calls), []) for calls in zip(*(one.calls for one in ranks), strict=True)]
    return first


def stopped(folder: Path) -> str:
    """Why sampling ended early in a process, or empty."""
    return next((path.read_text(encoding="utf-8")[:300] for path in sorted(folder.glob("*.stopped"))), "")


def judged(traces: Sequence[Trace], stopped: str = "") -> tuple[Layers, list[tuple[Trace, Verdict]]]:
    """The verdict on all calls, and each with its own; ``stopped`` says why there are no more."""
    every = [(trace, judge(trace)) for trace in traces]
    telling = [(trace, verdict) for trace, verdict in every if verdict.status != "vacuous"] or every
    status = worst([verdict.status for _, verdict in telling]) if telling else "not_run"
    layers = sorted({_layer(trace) for trace, _ in telling})
    sentence = _sentence(telling, layers, status) + (f" (sampling ended early: {stopped})" if stopped else "")
    return Layers(len(telling), layers, status, sentence), telling


def _layer(trace: Trace) -> int:
    return int(trace.case.routing.args[0])


def _sentence(telling: Sequence[tuple[Trace, Verdict]], layers: Sequence[int], status: str) -> str:
    if not telling:
        return "no call of a MoE layer was sampled"
    which = f"in {len(telling)} sampled calls of MoE layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
    if status == "passed":
        return f"{RIGHT} {which}"
    bad = [(trace, verdict) for trace, verdict in telling if verdict.status == status]
    trace, verdict = bad[0]
    if not (first := verdict.first):
        return f"{status} {which}: {'; '.join(verdict.vacuous) or 'nothing was compared'}"
    what = str(first.findings[0]) if first.findings else first.reason
    more = f"; {len(bad)} of {len(telling)} sampled calls {status}"
    return f"MoE layer {_layer(trace)}, stage {first.stage} ({said(first.check)}): {what}{more}"


def save(found: Sequence[tuple[Trace, Verdict]], folder: Path) -> None:
    """Write a folder that `moonep-validate check` judges again; one that is there is replaced.

    Raises:
        OSError: if it cannot be written.
    """
    inside = folder / "traces"
    inside.mkdir(parents=True, exist_ok=True)
    for old in inside.glob("*.safetensors"):
        old.unlink()
    manifest = Manifest.of([str(trace.case) for trace, _ in found], "all")
    for trace, verdict in found:
        name = f"{trace.case}.safetensors"
        trace.save(inside / name)
        manifest = manifest.judged(trace, verdict.status, name)
    manifest.write(folder)
