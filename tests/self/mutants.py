"""Is the judge itself tested? Small changes to its code, each of which some known answer must notice.

By hand: ``python -m tests.self.mutants [--only checks/plan] [--sample N] [--part I/N]``. The corpus are clean traces
of the profile, traces that lack a tap or a call, the corrupted ones of tests/self/corruptions*.py and one of each
seeded fault. Every check answers every trace; a mutant lives if all answers that its code has a part in stay as they
are, their texts included. What lives is printed with its line: it may do no harm, another test may kill it, or
nobody would notice that a check is wrong.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import gc
import os
import random
import re
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

import moonep_validate
from moonep_validate.cases.case import Case
from moonep_validate.cases.profiles import profile
from moonep_validate.faults import parse_fault
from moonep_validate.judge.checks import CHECKS, run_check
from moonep_validate.judge.checks.relations import relation_results
from moonep_validate.judge.facts import steps_of
from moonep_validate.judge.registry import step_checks
from moonep_validate.judge.verdict import Result
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.record import record
from moonep_validate.trace.trace import Trace
from tests.self.conftest import CASE
from tests.self.corruptions import CORRUPTIONS
from tests.self.corruptions_experts import EXPERTS
from tests.self.corruptions_forms import FORMS
from tests.self.corruptions_moved import MOVED
from tests.self.test_faults import KILLED_BY

PACKAGE = Path(moonep_validate.__file__).parent
#: Seconds for one mutant; what takes longer loops, and a test would have noticed.
PATIENCE = 60
Key = tuple[str, str, int]


@dataclass
class Known:
    """What one check says of one trace, and the functions that it asked.

    Attributes:
        trace: its number in the corpus.
        check: id, or ``V`` for the relations.
        says: statuses and findings of every step.
        used: functions by file, name and line.
    """

    trace: int
    check: str
    says: tuple[str, ...]
    used: frozenset[Key]


# ---- the corpus -----------------------------------------------------------------------------------------------


def corpus() -> Iterator[tuple[str, Trace]]:
    """Named traces."""
    clean: dict[str, Trace] = {}
    for one in CORRUPTIONS + EXPERTS + FORMS + MOVED:
        if str(one.case) not in clean:
            clean[str(one.case)] = record(Job(), one.case)
        trace = copy.deepcopy(clean[str(one.case)])
        one.change(trace)
        yield f"{one.check} {one.change.__name__}", trace
    for smoke in profile("smoke"):
        clean[str(smoke)] = clean.get(str(smoke)) or record(Job(), smoke)
    yield from clean.items()
    yield from _lacking(clean[str(CASE)])
    for id, (_, _, sizes) in KILLED_BY.items():
        yield id, record(Job(faults=(parse_fault(id),), deadline=2.0), Case.parse(f"genB+{sizes}"))


def _lacking(trace: Trace) -> Iterator[tuple[str, Trace]]:
    """Copies without one call or one tap of rank 2."""
    for index, call in enumerate(trace.calls[2]):
        for tap in [None, *call.tensors]:
            less = copy.deepcopy(trace)
            if tap is None:
                del less.calls[2][index]
            else:
                del less.calls[2][index].tensors[tap]
            yield f"without {call.op} {tap or 'itself'}", less


def answers(number: int, trace: Trace) -> Iterator[Known]:
    """What each check says of a trace, as long as it says anything."""
    used: set[Key] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            used.add((code.co_filename, code.co_name, code.co_firstlineno))

    for check in [*(check.id for check in step_checks()), "V"]:
        used.clear()
        sys.setprofile(note)
        try:
            says = asked(trace, check)
        finally:
            sys.setprofile(None)
        if any(not one.startswith("not_applicable") for one in says):
            yield Known(number, check, says, frozenset(used))


def asked(trace: Trace, check: str) -> tuple[str, ...]:
    """Statuses and findings of a check, step by step."""
    results: list[Result] = []
    for step in steps_of(trace).values():
        results += relation_results(step, trace) if check == "V" else [run_check(CHECKS[check], step, trace)]
    return tuple(
        f"{one.status} {one.gates} {one.examined > 0} {' '.join(map(str, one.findings))}" for one in results
    )


# ---- mutants --------------------------------------------------------------------------------------------------

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
NAMES = {"all": "any", "any": "all", "max": "min", "min": "max", "argmax": "argmin"}


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Other nodes for one node."""
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and (other := SWAPS.get(type(node.op))):
        yield _with(node, op=other())
    if isinstance(node, ast.Compare) and (other := SWAPS.get(type(node.ops[0]))):
        yield _with(node, ops=[other(), *node.ops[1:]])
    if isinstance(node, ast.UnaryOp):
        yield node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        yield _with(node, value=not node.value if isinstance(node.value, bool) else node.value + 1)
    if isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield _with(node, attr=NAMES[node.attr])
    if isinstance(node, ast.Name) and node.id in NAMES:
        yield _with(node, id=NAMES[node.id])
    if isinstance(node, ast.comprehension) and node.ifs:
        yield _with(node, ifs=node.ifs[1:])
    if isinstance(node, (ast.Raise, ast.AugAssign)) or (isinstance(node, ast.Expr) and not _text(node.value)):
        yield ast.copy_location(ast.Pass(), node)
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield _with(node, test=ast.copy_location(ast.Constant(False), node.test))


def _text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


@dataclass(frozen=True)
class Mutant:
    """A changed module, and where."""

    file: Path
    line: int
    function: str
    said: str
    tree: ast.Module

    def __str__(self) -> str:
        return f"{self.file.relative_to(PACKAGE)}:{self.line} in {self.function}: {self.said}"


def mutants(file: Path) -> Iterator[Mutant]:
    """Every change to the body of a function of the file; not to texts, types, decorators or defaults."""
    tree = ast.parse(file.read_text(), str(file))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                yield from _within(file, tree, function, statement)


def _within(file: Path, tree: ast.Module, function: ast.FunctionDef, root: ast.stmt) -> Iterator[Mutant]:
    if isinstance(root, ast.FunctionDef):
        return  # it has a turn of its own
    before = ast.unparse(root)
    for parent, name, index, node in list(_places(function, root)):
        for other in changes(node):
            _put(parent, name, index, other)
            after = ast.unparse(root if root in function.body else function.body[_place(function, root, other)])
            said = _difference(before, after)
            changed = ast.fix_missing_locations(copy.deepcopy(tree))
            _put(parent, name, index, node)
            line = getattr(node, "lineno", root.lineno)
            yield Mutant(file, line, function.name, said, changed)


def _place(function: ast.FunctionDef, root: ast.stmt, other: ast.AST) -> int:
    return next(i for i, one in enumerate(function.body) if one is other)


def _places(function: ast.FunctionDef, root: ast.stmt) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Where each node below a statement hangs, itself included."""
    yield function, "body", function.body.index(root), root
    waiting: list[ast.AST] = [root]
    while waiting:
        parent = waiting.pop()
        for name, value in ast.iter_fields(parent):
            if name in ("annotation", "returns", "decorator_list", "defaults"):
                continue
            for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(node, ast.AST) and not isinstance(node, (ast.JoinedStr, ast.FunctionDef)):
                    yield parent, name, index, node
                    waiting.append(node)


def _put(parent: ast.AST, name: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[index] = node


def _difference(before: str, after: str) -> str:
    """The first line that differs, as it was and as it is."""
    pairs = zip([*before.splitlines(), ""], [*after.splitlines(), ""], strict=False)
    one, other = next(((a.strip(), b.strip()) for a, b in pairs if a != b), ("", ""))
    return f"`{one}` -> `{other}`"


def _install(mutant: Mutant) -> None:
    """Give every live function of the file its changed code, and forget what was computed with the old."""
    fresh: dict[tuple[str, int], CodeType] = {}
    waiting = [compile(mutant.tree, str(mutant.file), "exec")]
    while waiting:
        code = waiting.pop()
        fresh[code.co_name, code.co_firstlineno] = code
        waiting += [one for one in code.co_consts if isinstance(one, CodeType)]
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename == str(mutant.file):
            key = one.__code__.co_name, one.__code__.co_firstlineno
            if key in fresh and fresh[key].co_freevars == one.__code__.co_freevars:
                one.__code__ = fresh[key]
        elif isinstance(one, functools._lru_cache_wrapper) and str(one.__module__).startswith("moonep_validate"):
            one.cache_clear()


def killer(mutant: Mutant, known: list[Known], traces: list[Trace]) -> Known | str:
    """What notices the mutant: an answer that changes, ``the clock``, or else why it lives."""
    asks = [one for one in known if any(key[:2] == (str(mutant.file), mutant.function) for key in one.used)]
    if not asks:
        return "not reached"
    receive, send = os.pipe()
    if os.fork() == 0:
        signal.alarm(PATIENCE)
        _install(mutant)
        found = next((i for i, one in enumerate(asks) if asked(traces[one.trace], one.check) != one.says), -1)
        os.write(send, str(found).encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        said = pipe.read() or "killed"
    os.wait()
    return "the clock" if said == "killed" else "nothing" if said == "-1" else asks[int(said)]


# ---- by hand --------------------------------------------------------------------------------------------------


def main() -> None:
    """Print what lives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="judge/", help="files, by a pattern of their path")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants, chosen by a fixed seed; 0: all")
    parser.add_argument(
        "--part", default="0/1", help="I/N: every N-th mutant from the I-th, for several processes"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of old names in torch that are looked at when functions are looked for
    files = [
        one for one in sorted(PACKAGE.rglob("*.py")) if re.search(options.only, str(one.relative_to(PACKAGE)))
    ]
    found = [mutant for file in files for mutant in mutants(file)]
    if options.sample:
        found = random.Random(20261201).sample(found, min(options.sample, len(found)))
    turn, turns = map(int, options.part.split("/"))
    found = found[turn::turns]
    names, traces = zip(*corpus(), strict=True)
    known = [one for number, trace in enumerate(traces) for one in answers(number, trace)]
    print(f"{len(found)} mutants of {len(files)} files, {len(names)} traces, {len(known)} answers", flush=True)
    lives, start = 0, time.monotonic()
    for mutant in found:
        by = killer(mutant, known, list(traces))
        if isinstance(by, Known):  # what kills one mostly kills its neighbours
            known.remove(by)
            known.insert(0, by)
        elif by != "the clock":
            lives += 1
            print(f"lives ({by}): {mutant}", flush=True)
    print(f"{lives} of {len(found)} live, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
