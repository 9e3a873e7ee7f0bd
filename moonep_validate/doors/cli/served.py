"""The command ``compare``: do two ways to serve one model say the same? It only wires."""

from __future__ import annotations

import shlex
import subprocess
import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonep_validate.doors.cli.options import console, note
from moonep_validate.errors import CaseError

if TYPE_CHECKING:
    from moonep_validate.served.answers import Answers, Who
    from moonep_validate.served.pair import PairVerdict

SIDE = "RECIPE.toml, http://HOST:PORT, transformers:DIR, vllm:DIR, or a file of answers (.jsonl)"
#: Findings of one check that are printed; all are in the JSON.
_SHOWN = 6


def compare(
    base: Annotated[str, typer.Argument(help=f"What is right: {SIDE}.")],
    candidate: Annotated[
        str | None, typer.Argument(help="What is judged; without it, answers are recorded.")
    ] = None,
    healthy: Annotated[
        list[str] | None, typer.Option(help="A further side that is known to be right; a measure of noise.")
    ] = None,
    reference: Annotated[str | None, typer.Option(help="A third opinion, in float32, better than both.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many of the built-in prompts to ask.")] = 32,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of engines that are started here.")] = "float32",
    prompts_file: Annotated[
        Path | None, typer.Option(help="Your own prompts, JSON Lines: name, tokens, group, max_tokens.")
    ] = None,
    power: Annotated[
        float | None,
        typer.Option(min=2.1, help="Ask so many prompts as show a drift of so many times the noise (95%)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the built-in prompts.")] = 0,
    deadline: Annotated[float, typer.Option(min=1.0, help="Seconds for all answers of one side.")] = 900.0,
    save: Annotated[
        Path | None,
        typer.Option(help="File for the candidate's answers (or the base's alone); a second try goes on from it."),
    ] = None,
    locate: Annotated[
        bool,
        typer.Option("--locate", help="Where the pair is red, judge the MoE layers of the candidate's engine."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="The verdict as one line of JSON.")] = False,
) -> None:
    """Do two ways to serve one model say the same, within the noise of that pair?"""
    from moonep_validate.served.answers import GREEDY
    from moonep_validate.served.noise import power_of, prompts_needed
    from moonep_validate.served.pair import judge_pair
    from moonep_validate.served.progress import Progress
    from moonep_validate.served.sides import Questions, answers_of

    count = prompts if power is None else prompts_needed(power)
    questions = Questions(count, seed, dtype, deadline, prompts_file, Progress())
    if not prompts_file and not base.endswith(".jsonl"):
        note(power_of(count))
    mine = answers_of(base, questions, save=save if candidate is None else None)
    if candidate is None:
        if save is None:
            raise CaseError("one side alone has nothing to be compared with: give a CANDIDATE, or --save FILE")
        console.print(f"{save}: {len(mine.run(GREEDY))} answers of {mine.who}", highlight=False, soft_wrap=True)
        return
    other = answers_of(candidate, questions, mine, save)
    more = [answers_of(one, questions, mine) for one in healthy or ()]
    third = answers_of(reference, questions, mine) if reference else None
    verdict = judge_pair(mine, other, more, third)
    if json:
        sys.stdout.write(dumps(verdict.to_json()) + "\n")
    else:
        _show(verdict, mine, other)
    if verdict.exit_code == 1:
        _locate(other.who, locate)
    raise typer.Exit(verdict.exit_code)


def _locate(who: Who, run: bool) -> None:
    """From tokens to the stage: what the sampled layers say, else the next command, or its run."""
    from moonep_validate.served.locate import arguments, meaning

    layers = who.layers if who.layers and who.layers.calls else None
    if layers:
        note(f"{layers.said}{': look outside them' * (layers.status == 'passed')}")
        if not run:
            return
    if not (found := arguments(who)):
        return
    if not run:
        note(f"next, are its MoE layers right? moonep-validate {shlex.join(found)}")
        return
    code = subprocess.run([sys.executable, "-m", "moonep_validate", *found], check=False).returncode
    alone = layers and layers.status == "failed" and code == 0
    note("the engine's code is right on weights of the suite; what it served was not" if alone else meaning(code))


def _show(verdict: PairVerdict, base: Answers, candidate: Answers) -> None:
    from rich.table import Table

    from moonep_validate.served.pair import EXPLAINED, PROMISES, SAME, UNEXPLAINED

    console.print(f"base:      {verdict.base}\ncandidate: {verdict.candidate}", highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for column in ("check", "promise", "status"):
        table.add_column(column)
    table.add_column("compared", justify="right")
    for result in verdict.results:
        table.add_row(result.check, PROMISES[result.check], result.status, f"{result.examined:,}")
    console.print(table, highlight=False)
    drift = verdict.drift
    counts = ", ".join(f"{verdict.count(status)} {status}" for status in (SAME, EXPLAINED, UNEXPLAINED))
    lines = [
        f"prompts: {len(verdict.prompts)}, {counts}",
        f"drift: mean {drift.mean:.2g}, 99% below {drift.p99:.2g}, largest {drift.largest:.2g} "
        f"(prompt {drift.prompt or '-'}), over {drift.places:,} places",
        f"noise: {verdict.noise.how}",
        f"power: {verdict.power}",
    ]
    for result in verdict.results:
        lines += [f"  {result.check}: {finding}" for finding in result.findings[:_SHOWN]]
        lines += [f"  {result.check}: and {len(result.findings) - _SHOWN} more"] * (len(result.findings) > _SHOWN)
        lines += [f"  {result.check}: {result.reason}"] * bool(result.reason)
    lines.append(f"{verdict.status}: exit code {verdict.exit_code}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
