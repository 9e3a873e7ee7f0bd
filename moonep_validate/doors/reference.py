"""What does docs/reference.md say? Every option, word, stage, check and seam, from the records that declare them.

``python -m moonep_validate.doors.reference --write`` makes the document anew; without ``--write`` it is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer

from moonep_validate.cases.profiles import PROFILES, profile
from moonep_validate.cases.vocabulary import VOCABULARY
from moonep_validate.doors.cli.main import app
from moonep_validate.faults import FAULTS, SEAMS
from moonep_validate.judge.checks import CHECKS
from moonep_validate.judge.stages import STAGES
from moonep_validate.pipeline.kinds import KINDS
from moonep_validate.pipeline.options import DECLARED, spelled, spelled_in_pytest

COMMAND = "python -m moonep_validate.doors.reference --write"
PATH = Path("docs/reference.md")

#: So many of the options of ``run`` are named where another command takes them.
_FEW = 6
_KINDS = """\
Kinds: a law gates everywhere; drop-in gates where upstream's policy is promised, and informs elsewhere; a relation
is a promise between steps; returns says that a call came back. `--record` is the least that the check needs."""
_FIELDS = {"fill": "fill: values of tokens and weights", "witness": "witness: an event that the case must show"}


def page() -> str:
    """The whole document."""
    sections = {
        "Commands": _commands(),
        "Options of `run`": _options(),
        "Words of a case": _words(),
        "Stages": _stages(),
        "Checks": _checks(),
        "Seams of faults": _seams(),
    }
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    return f"# Reference\n\nGenerated from the code by `{COMMAND}`: do not edit.\n\n{body}\n"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _commands() -> str:
    group: Any = typer.main.get_group(app)
    rows = [
        (f"`{name}`", command.help.splitlines()[0], _arguments(command.params))
        for name, command in group.commands.items()
        if not command.hidden
    ]
    return table(("command", "does", "arguments and options"), rows)


def _arguments(parameters: Sequence[Any]) -> str:
    """Those of a command by name; of those that ``run`` declares the number, if there are many."""
    shown = [one for one in parameters if not getattr(one, "hidden", False)]
    shared = [one for one in shown if one.name in DECLARED and spelled(one.name) in one.opts]
    own = [one for one in shown if one not in shared or len(shared) <= _FEW]
    names = [f"`{one.opts[0] if one.opts[0][0] == '-' else one.name.upper()}`" for one in own]
    more = [f"{len(shared)} options of `run`, see below"] * (len(shared) > _FEW)
    return ", ".join([*more, *names]) or "-"


def _options() -> str:
    rows = []
    for name, (one, declared) in DECLARED.items():
        refused = [kind for kind, about in KINDS.items() if any(name in names for names in about.refuses)]
        choices = f" One of {', '.join(declared.choices)}." if declared.choices else ""
        old = f" Before 0.1.0: `{spelled(declared.old)}`." if declared.old else ""
        default = "-" if one.default in (None, False, ()) else f"`{one.default}`"
        text = declared.help + choices + old
        rows.append(
            (f"`{spelled(name)}`", f"`{spelled_in_pytest(name)}`", default, text, ", ".join(refused) or "-")
        )
    return table(("command line", "pytest", "default", "means", "not for"), rows)


def _words() -> str:
    lines = [
        "`+` joins words, in any order. genA or genB, R, E, K and S are required: `genB+R4+E8+K2+S9`. Sizes with",
        "defaults: `H128 I128 pad16 seed0`, `slots2` (generation A; else E/R), `tokens:9,0,3,9` (real tokens of",
        "each rank; else S).",
        "",
    ]
    for field in dict.fromkeys(word.field for word in VOCABULARY.values()):
        mine = [word for word in VOCABULARY.values() if word.field == field]
        lines += [table((_FIELDS.get(field, field), "means"), ((f"`{w.usage}`", w.summary) for w in mine)), ""]
    counts = ", ".join(f"`{name}` ({len(profile(name))})" for name in PROFILES)
    return "\n".join([*lines, f"Profiles, with their number of case lines: {counts}."])


def _stages() -> str:
    return table(("stage", "owner", "what happens"), ((s.name, s.owner, s.does) for s in STAGES.values()))


def _checks() -> str:
    head = ("id", "name", "stage", "kind", "`--record`", "promise")
    rows = [
        (check.id, check.name, check.stage, check.kind.replace("_", "-"), f"`{check.needs}`", check.promise)
        for stage in STAGES
        for check in CHECKS.values()
        if check.stage == stage
    ]
    return "\n\n".join(
        [
            f"{len(CHECKS)} checks; what each promise rests on is in [contract.md](contract.md).",
            table(head, rows),
            _KINDS,
        ]
    )


def _seams() -> str:
    rows = []
    for seam in SEAMS:
        mine = [fault for fault in FAULTS.values() if fault.seam == seam]
        stages = ", ".join(stage for stage in STAGES if any(fault.stage == stage for fault in mine))
        rows.append((f"`{seam}`", stages, f"`{mine[0].id}`" if mine else "-"))
    head = "A fault stands in place of a call, its seam. Each, with what finds it: [faults.md](faults.md).\n\n"
    return head + table(("seam", "its faults show at", "for example"), rows)


def main(arguments: Sequence[str]) -> None:
    """Write or print the document."""
    if list(arguments) == ["--write"]:
        PATH.write_text(page())
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    main(sys.argv[1:])
