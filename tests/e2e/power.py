"""How much does `compare` see? Faulty checkpoints and healthy pairs: ``python -m tests.e2e.power [PROMPTS] [SEEDS]``.

Prints the tables of docs/served.md. All sides are transformers on the tiny model, so that the answer is about the
statistics alone: the baseline with its own choice of kernels, candidates with other ones (other orders of sums).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from moonep_validate.served.answers import GREEDY, Answers
from moonep_validate.served.pair import judge_pair
from moonep_validate.served.prompts import Prompt, make_prompts
from moonep_validate.served.record import AGAIN, record
from moonep_validate.served.speakers.transformers import Transformers
from tests.e2e.tiny import FAULTS, VOCAB, make

#: Kernels of healthy candidates; the first ones are those of faulty candidates too.
HEALTHY: tuple[dict[str, str], ...] = (
    {"experts_implementation": "batched_mm"},
    {"attn_implementation": "eager"},
    {"attn_implementation": "eager", "experts_implementation": "batched_mm"},
)
#: Tokens of an answer: places depend on each other, prompts do not, so more of them say little.
TOKENS = 12


def answers(model: Path, dtype: str, prompts: list[Prompt], base: Answers | None, **options: str) -> Answers:
    """All that one side says."""
    forced = {name: one.tokens.tolist() for name, one in base.run(GREEDY).items()} if base else None
    found = record(Transformers(str(model), dtype, **options), prompts, forced=forced, again=() if base else AGAIN)
    found.name = f"{model.name} {options}"
    return found


def rows(folder: Path, count: int, seed: int, faults: bool) -> Iterator[tuple[str, str, str, str, str]]:
    """Type, candidate, and the status without and with a third opinion, and the typical drift over noise."""
    right = make(folder / "right")
    prompts = [
        replace(one, max_tokens=min(one.max_tokens, TOKENS)) for one in make_prompts(VOCAB, count, seed, 256)
    ]
    third = answers(right, "float32", prompts, None)
    for dtype in ("float32", "bfloat16"):
        base = answers(right, dtype, prompts, third)
        other = answers(right, dtype, prompts, third, **HEALTHY[1])
        for kind in HEALTHY:
            candidate = answers(right, dtype, prompts, third, **kind)
            yield dtype, f"healthy, {', '.join(kind.values())}", *judged(base, candidate, other, third)
        for fault in FAULTS if faults else ():
            candidate = answers(make(folder / fault, fault), dtype, prompts, third, **HEALTHY[0])
            yield dtype, fault, *judged(base, candidate, other, third)


def judged(base: Answers, candidate: Answers, healthy: Answers, third: Answers) -> tuple[str, str, str]:
    """Statuses by a healthy side and by a third opinion; drift over noise of the latter, or the largest drift."""
    by_healthy = judge_pair(base, candidate, [healthy])
    by_third = judge_pair(base, candidate, reference=third)
    test = by_third.test
    size = f"{by_third.drift.largest:.2g}" + (f" ({test.ratio:.3g} x noise)" if test else "")
    return by_healthy.status, by_third.status, size


def main() -> None:
    """Print one line for each candidate."""
    count, seeds = (int(one) for one in (*sys.argv[1:], *("64", "1")[len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            for row in rows(Path(folder), count, seed, faults=seed == 0):
                sys.stdout.write(f"| {seed} | " + " | ".join(row) + " |\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
