"""Damaged and altered input, by the thousand: each attack takes a source of chance, and asserts what must hold.

By hand: ``python -m tests.self.attacks traces 12000 [first seed]``; the seed of a failure is printed.
"""

from __future__ import annotations

import copy
import io
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.cases.profiles import profile
from moonep_validate.cases.vocabulary import VOCABULARY
from moonep_validate.doors.report.files import OutputFolder, load_traces
from moonep_validate.doors.report.recorded import judge_recorded
from moonep_validate.doors.report.summary import Summary
from moonep_validate.formats import identity
from moonep_validate.formats.kimi_k3 import Geometry, write_checkpoint
from moonep_validate.judge.waivers import SHIPPED, read_waivers
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.judge import judge
from moonep_validate.pipeline.record import record
from moonep_validate.tools.checkpoint import inspect
from moonep_validate.tools.plan_input import read_routings
from moonep_validate.tools.shards import INDEX
from moonep_validate.trace import manifest, trace
from moonep_validate.trace.manifest import Entry
from moonep_validate.trace.trace import Trace, TraceError

Chance = random.Random
SECONDS = 20
_ODD: list[Any] = [
    None, True, 0, 1, -1, 5, 2**24, 2**31, 2**53, 2**63, 10**30, 1.5, float("nan"), "", "x", "0", "\ud800", "a\nb",
    [], {}, [[]], [1, "x"], {"a": {}}, "full", "real", "genB+R2+E4+K2+S3",
]  # fmt: skip
CASES = (
    "genB+R2+E4+K2+S3+H8+I8+hot:0",
    "genA+R2+E4+K2+S3+H8+I8+slots1+pad4+variants",
    "genB+R2+E4+K2+S2+H8+I8+grads",
)


@contextmanager
def within(seconds: int = SECONDS) -> Iterator[None]:
    """Fail where something hangs."""

    def late(number: int, frame: object) -> None:
        raise AssertionError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused(error: Exception) -> str:
    """The outcome of an error that a user gets as one line."""
    assert len(str(error).splitlines()) == 1, f"not one line: {error!r}"
    assert 0 < len(str(error)) < 10_000, f"a message of {len(str(error))} characters"
    return "refused"


def mutate_json(chance: Chance, value: Any) -> Any:
    """A copy in which one place is something else, is gone, or is there twice."""
    value = copy.deepcopy(value)
    holder, key = _place(chance, value)
    if holder is None or chance.random() < 0.02:
        return _odd(chance)
    kind = chance.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif kind == 2 and isinstance(holder, dict):
        holder[chance.choice(["x", "", *map(str, holder)])] = _odd(chance)
    elif kind == 3:
        holder[key] = holder[chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))]
    else:
        holder[key] = _odd(chance)
    return value


def _place(chance: Chance, value: Any) -> tuple[Any, Any]:
    holder, key = None, None
    while isinstance(value, dict | list) and value and (holder is None or chance.random() < 0.8):
        holder, key = (
            value,
            chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value)),
        )
        value = value[key]
    return holder, key


def _odd(chance: Chance) -> Any:
    if chance.random() < 0.05:
        deep: Any = 0
        for _ in range(chance.choice([10, 40, 200])):
            deep = [deep] if chance.random() < 0.5 else {"a": deep}
        return deep
    return copy.deepcopy(chance.choice(_ODD))


def mutate_text(chance: Chance, text: str, words: tuple[str, ...]) -> str:
    """A text with some characters or words changed."""
    for _ in range(chance.randrange(1, 4)):
        place = chance.randrange(len(text) + 1)
        end = min(len(text), place + chance.choice([0, 0, 1, 1, 2, 8]))
        text = text[:place] + chance.choice([*words, "", chr(chance.randrange(1, 300))]) + text[end:]
    return text


def mutate_bytes(chance: Chance, data: bytes) -> bytes:
    """Bytes with some flipped, cut out, doubled or appended."""
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        place = (
            chance.randrange(len(data) + 1)
            if chance.random() < 0.5
            else chance.randrange(min(len(data), 3000) + 1)
        )
        kind = chance.randrange(4)
        if kind == 0 and place < len(data):
            data = data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]
        elif kind == 1:
            data = data[:place] + data[place + chance.choice([1, 2, 8, 1000]) :]
        elif kind == 2:
            data = data[:place] + data[place : place + chance.choice([1, 8, 100])] + data[place:]
        else:
            data = data[:place] + chance.randbytes(chance.choice([1, 8])) + data[place:]
    return data


# Case lines


@lru_cache
def _tokens() -> tuple[str, ...]:
    lines = [str(case) for name in ("default", "engine") for case in profile(name)]
    words = [word.usage for word in VOCABULARY.values()] + list(VOCABULARY)
    numbers = [f"{name}{value}" for name in ("R", "E", "K", "S", "H", "I", "slots", "pad", "seed") for value in (
        0, 1, 2, 3, 7, 8, 33, 129, 4096, 2**20, 2**31, 10**9, 10**18, 10**40, -1)]  # fmt: skip
    listed = sorted({token for line in lines for token in line.split("+")})
    return (*listed, *words, *numbers, "", "+", "9" * 5000)


@lru_cache
def _lines() -> tuple[str, ...]:
    return tuple(str(case) for name in ("default", "engine") for case in profile(name))


def attack_case(chance: Chance) -> str:
    """A case line is refused in one line, or is a case whose own line reads as the same case."""
    parts = chance.choice(_lines()).split("+")
    for _ in range(chance.randrange(1, 5)):
        kind, place = chance.randrange(4), chance.randrange(len(parts) + 1)
        if kind == 0:
            parts[place:place] = [chance.choice(_tokens())]
        elif kind == 1:
            parts[place : place + 1] = [chance.choice(_tokens())]
        elif kind == 2:
            parts[place : place + 1] = []
        elif place < len(parts):
            parts[place] = mutate_text(
                chance, parts[place], ("0", "9", "-1", ":", ",", "@", "gen", "\u0663", "1e9", "nan")
            )
    try:
        case = Case.parse("+".join(parts))
    except CaseError as error:
        return refused(error)
    assert Case.parse(str(case)) == case, f"{case} reads as another case"
    return "read"


# Traces


@lru_cache
def _recorded() -> tuple[tuple[bytes, str], ...]:
    """Traces that pass, and their status."""
    found = [record(Job(), Case.parse(line)) for line in CASES]
    return tuple((one.to_bytes(), judge(one).status) for one in found)


def attack_trace(chance: Chance) -> str:
    """A damaged trace is refused or is what was recorded; one that is sealed again gives a verdict or is refused."""
    data, status = chance.choice(_recorded())
    again = chance.random() < 0.7
    changed = _resealed(chance, data) if again else mutate_bytes(chance, data)
    try:
        read = Trace.from_bytes(changed, "the trace")
        if not again:
            assert _content(read) == _content(Trace.from_bytes(data, "it")), "an altered trace was believed"
            return "the same"
        entry = Entry(str(read.case), status, "file", read.seal)
        verdict = judge_recorded(read, entry)[1]
    except TraceError as error:
        return refused(error)
    json.dumps(verdict.to_json())
    assert verdict.diagnosis
    seal, before = read.seal, Trace.from_bytes(data, "it")
    assert seal != before.seal or _content(read) == _content(before), "another content has the same seal"
    return verdict.status


def _content(one: Trace) -> tuple[str, str]:
    """Tensors and header, whatever the order in the file is."""
    return one.digest(), trace._texts(one.to_bytes())[0]


def _resealed(chance: Chance, data: bytes) -> bytes:
    """A header or some tensors changed, under a new seal: what an edit by a tool that knows the format gives."""
    tensors = safetensors.torch.load(data)
    head = json.loads(trace._texts(data)[0])
    for _ in range(chance.choice([1, 1, 2, 3])):
        if chance.random() < 0.5:
            head = mutate_json(chance, head)
        else:
            _mutate_tensor(chance, tensors)
    text = json.dumps(head)
    return safetensors.torch.save(tensors, {"moonep_validate": text, "seal": trace._seal(text, _without(tensors))})


def _without(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "none"}


def _mutate_tensor(chance: Chance, tensors: dict[str, torch.Tensor]) -> None:
    names = sorted(tensors)
    if not names:
        return
    name, kind = chance.choice(names), chance.randrange(8)
    tensor = tensors[name]
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[chance.choice(["", "0", "0/0", "9/0/x", "0/99/x", "a/b/c", "0/1/topk_ids", "0/1/../x"])] = (
            tensor.clone()
        )
    elif kind == 2:
        tensors[name] = tensors[chance.choice(names)].clone()
    elif kind == 3:
        other = chance.choice([torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8, torch.bool])
        tensors[name] = tensor.to(other)
    elif kind == 4:
        shapes = [(0,), (1,), (2, 2), (0, 2**24), (2**24, 0), (2**30, 0), (1, 1, 1, 1), ()]
        tensors[name] = torch.zeros(chance.choice(shapes), dtype=tensor.dtype)
    elif kind == 5:
        tensors[name] = tensor.flatten().clone()
    elif tensor.numel():
        place = chance.randrange(tensor.numel())
        values = (
            [-1, 0, 1, 255, 2**31 - 1, -(2**31)] if not tensor.is_floating_point() else [float("nan"), 1e30, -0.0]
        )
        flat = tensor.flatten().clone()
        if flat.dtype in (torch.uint8, torch.bool, torch.int8, torch.int16):
            values = [0, 1, 100]
        flat[place if kind == 6 else slice(None)] = chance.choice(values)
        tensors[name] = flat.reshape(tensor.shape)


# Folders


@lru_cache
def _folder() -> Path:
    folder = OutputFolder(Path(tempfile.mkdtemp(prefix="fuzz-")) / "out")
    folder.plan([Case.parse(line) for line in CASES[:2]], "all")
    summary = Summary(2)
    for line in CASES[:2]:
        one = record(Job(), Case.parse(line))
        summary.verdicts.append(judge(one))
        folder.note(one, summary.verdicts[-1])
        folder.write_report(summary, one.subject)
    return folder.path


def attack_folder(chance: Chance) -> str:
    """A folder whose manifest or files were changed is refused, or says what it said, or less."""
    whole = _folder()
    with tempfile.TemporaryDirectory() as name:
        out = Path(shutil.copytree(whole, Path(name) / "out"))
        path = out / manifest.NAME
        if chance.random() < 0.7:
            data = json.loads(path.read_text())
            del data["seal"]
            data = mutate_json(chance, data)
            seal = {"seal": manifest._seal(data)} if isinstance(data, dict) else {}
            path.write_text(json.dumps({**data, **seal} if isinstance(data, dict) else data))
        else:
            victim = chance.choice(sorted(one for one in out.rglob("*") if one.is_file()))
            victim.write_bytes(mutate_bytes(chance, victim.read_bytes()))
        try:
            listed, traces = load_traces(out)
            entries = {entry.case: entry for entry in listed.entries}
            verdicts = [judge_recorded(one, entries[case])[1] for case, one in traces.items()]
        except TraceError as error:
            return refused(error)
        for verdict in verdicts:
            assert str(verdict.case) in CASES
            assert verdict.ok or entries[str(verdict.case)].status == "not_exercised"
        return "listed"


# Plans


_ROUTINGS: tuple[dict[str, Any], ...] = (
    {"generation": "B", "S": 3, "K": 2, "E": 4, "R": 2, "B": None, "token_padding": 4,
     "topk": [[[0, 1], [0, 2], [1, 0]], [[0, 3], [1, 0], [0, 1]]]},
    {"generation": "A", "S": 2, "K": 2, "E": 8, "R": 4, "B": 1, "token_padding": 2,
     "topk": [[[1, 1], [0, 0]], [[0, 3], [3, 3]], [[2, 2], [0, 1]], [[0, 0], [3, 0]]]},
    {"generation": "B", "S": 3, "K": 2, "E": 4, "R": 2, "token_padding": 4, "loads": [6, 4, 1, 1]},
)  # fmt: skip


def attack_plan(chance: Chance) -> str:
    """A line is refused in one line, or planned with every row in its place."""
    value: Any = chance.choice(_ROUTINGS)
    kind = chance.randrange(4)
    if kind:
        value = mutate_json(chance, value)
    line = json.dumps(value).encode()
    if kind == 0 or chance.random() < 0.2:
        line = mutate_bytes(chance, line)
    layout = None
    if chance.random() < 0.1:
        from moonep_validate.cases.layout import Layout

        layout, line = (
            Layout("B", 2, 4, 2, 3, 4),
            mutate_bytes(chance, chance.choice([b"6,4,1,1", b"6\n4\n1\n1", b"[6,4,1,1]"])),
        )
    try:
        plans = list(read_routings(io.BytesIO(line), "it", layout))
    except CaseError as error:
        return refused(error)
    for planned in plans:
        sizes = planned.plan.layout
        assert (planned.plan.alloc.sum(axis=0) == sizes.capacity).all(), "a rank does not compute S*K rows"
    return "planned"


# Waivers


def attack_waivers(chance: Chance) -> str:
    """A file of waivers is refused in one line, or read."""
    text = chance.choice([SHIPPED.read_text(), _WAIVER, _WAIVER * 2])
    words = (
        '"',
        "[",
        "]",
        "[[",
        "{",
        "}",
        "=",
        ".",
        "'''",
        '"""',
        "\n",
        "a." * 400,
        "[" * 500,
        "{a=" * 200,
        "9" * 400,
        "2027-01-01",
        "#",
    )
    if chance.random() < 0.05:
        text = "\n".join([("a." * chance.choice([10, 480]) + f"b{i} = 1") for i in range(chance.choice([1, 130]))])
    data = mutate_text(chance, text, words).encode()
    if chance.random() < 0.2:
        data = mutate_bytes(chance, data)
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(data)
        file.flush()
        try:
            read_waivers(Path(file.name))
        except CaseError as error:
            return refused(error)
    return "read"


_WAIVER = """[[waiver]]
subject = "vllm"
checks = ["F1"]
case = "*+abort*"
step = "after"
versions = ">=0.32,<0.34"
link = "docs/found.md, vllm-plan-kept"
expires = 2027-06-30
"""


# Checkpoints


@lru_cache
def _checkpoint() -> Path:
    geometry = Geometry(128, 64, 32, 2, 1, 1, 1, 0)
    return write_checkpoint(Path(tempfile.mkdtemp(prefix="fuzz-")), geometry, identity.source(geometry), shards=2)


def attack_checkpoint(chance: Chance) -> str:
    """A checkpoint is refused in one line, or inspected."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(_checkpoint(), Path(name) / "k3"))
        kind = chance.randrange(4)
        path = (
            chance.choice([folder / "config.json", folder / INDEX])
            if kind < 2
            else chance.choice(sorted(folder.glob("*.safetensors")))
        )
        if kind < 2:
            path.write_text(json.dumps(mutate_json(chance, json.loads(path.read_text()))))
        elif kind == 2:
            _mutate_shard(chance, path)
        else:
            path.write_bytes(mutate_bytes(chance, path.read_bytes()))
        try:
            report = inspect(folder)
        except CaseError as error:
            return refused(error)
        json.dumps(report.to_json())
        return "findings" if report.findings else "clean"


def _mutate_shard(chance: Chance, path: Path) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    head = json.dumps(mutate_json(chance, json.loads(data[8 : 8 + size]))).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data[8 + size :])


ATTACKS: dict[str, Callable[[Chance], str]] = {
    "cases": attack_case,
    "traces": attack_trace,
    "folders": attack_folder,
    "plans": attack_plan,
    "waivers": attack_waivers,
    "checkpoints": attack_checkpoint,
}


def main() -> None:
    """Run one kind of attack so many times."""
    name, count, first = sys.argv[1], int(sys.argv[2]), int((*sys.argv, "0")[3])
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    start, slowest, bad = time.monotonic(), (0.0, 0), 0
    for seed in range(first, first + count):
        began = time.monotonic()
        try:
            with within():
                outcomes[ATTACKS[name](random.Random(seed))] += 1
        except Exception as error:
            bad += 1
            print(f"{name} seed {seed}: {type(error).__name__}: {error}", flush=True)
        slowest = max(slowest, (time.monotonic() - began, seed))
    seconds = time.monotonic() - start
    print(
        f"{name}: {count} in {seconds:.0f} s, {bad} bad, slowest {slowest[0]:.2f} s (seed {slowest[1]}): {dict(outcomes)}"
    )


if __name__ == "__main__":
    main()
