"""What ``check`` must not certify: folders from which something is gone, or in which something was changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moonep_validate.cases.case import Case
from moonep_validate.cases.profiles import profile
from moonep_validate.data.problem import batch
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.judge import judge
from moonep_validate.pipeline.recheck import recheck, skipped
from moonep_validate.pipeline.record import record
from moonep_validate.trace import manifest
from moonep_validate.trace.manifest import Manifest
from moonep_validate.trace.trace import Trace

Cli = Callable[..., tuple[int, str, str]]
CASE = "genB+R2+E4+K2+S3+H8+I8+hot:0"
OTHER = "genB+R2+E4+K2+S3+H8+I8+variants"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two traces that passed."""
    from moonep_validate.doors.report.files import OutputFolder

    folder = OutputFolder(tmp_path_factory.mktemp("out"))
    cases = [Case.parse(CASE), Case.parse(OTHER)]
    folder.plan(cases, "all")
    for case in cases:
        trace = record(Job(), case)
        folder.note(trace, judge(trace))
    return folder.path


@pytest.fixture
def out(written: Path, tmp_path: Path) -> Path:
    """A copy that may be altered."""
    return Path(shutil.copytree(written, tmp_path / "out"))


def first(out: Path) -> Path:
    return out / "traces" / f"{CASE}.safetensors"


def altered(out: Path, edit: Callable[[Trace], object], consistent: bool = True) -> None:
    """Edit a trace and seal it again; ``consistent``: in the manifest too."""
    trace = Trace.load(first(out))
    edit(trace)
    trace.save(first(out))
    if consistent:
        Manifest.read(out).judged(trace, "passed", first(out).name).write(out)


def manifest_with(out: Path, **changes: Any) -> None:
    """Edit the first entry of the manifest, and seal it again."""
    data = json.loads((out / manifest.NAME).read_text())
    del data["seal"]
    data["entries"][0] |= changes
    (out / manifest.NAME).write_text(json.dumps({**data, "seal": manifest._seal(data)}))


def test_what_was_written_is_certified(cli: Cli, out: Path) -> None:
    code, text, err = cli("check", str(out))
    assert (code, err) == (0, "")
    assert "passed: 2 of 2 cases ran (2 passed)" in text
    entries = Manifest.read(out).entries
    assert [(e.case, e.status) for e in entries] == [(CASE, "passed"), (OTHER, "passed")]
    assert [e.seal for e in entries] == [
        Trace.load(out / "traces" / f"{e.case}.safetensors").seal for e in entries
    ]


def header(edit: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Bytes of the header changed, its length and its seal kept."""
    return lambda out: first(out).write_bytes(edit(first(out).read_bytes()))


ACCIDENTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "trace deleted": (lambda out: first(out).unlink(), "cannot be read: No such file"),
    "manifest deleted": (lambda out: (out / manifest.NAME).unlink(), "is not there"),
    "two files of one case": (
        lambda out: shutil.copy(first(out), out / "traces" / "copy.safetensors"),
        "no run of this folder wrote it",
    ),
    "one trace in the place of another": (
        lambda out: shutil.copy(out / "traces" / f"{OTHER}.safetensors", first(out)),
        "is not the trace that manifest.json lists",
    ),
    "policy changed": (
        header(lambda data: data.replace(b'\\"keep\\": \\"full\\"', b'\\"keep\\": \\"plan\\"')),
        "does not match its recorded seal",
    ),
    "operation renamed": (
        header(lambda data: data.replace(b'\\"op\\": \\"combine\\"', b'\\"op\\": \\"refusal\\"')),
        "does not match its recorded seal",
    ),
    "routing changed": (header(lambda data: data.replace(b"+hot:0", b"+hot:1")), "does not match its recorded seal"),
    "origin changed": (
        header(lambda data: data.replace(b'\\"origin\\": \\"reference\\"', b'\\"origin\\": \\"stand-ins\\"')),
        "does not match its recorded seal",
    ),
    "one bit of a tensor": (header(lambda data: data[:-1] + bytes([data[-1] ^ 1])), "does not match its recorded seal"),
    "manifest changed": (
        lambda out: (out / manifest.NAME).write_text((out / manifest.NAME).read_text().replace("+hot:0", "+hot:1")),
        "does not match its seal",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ACCIDENTS)
def test_accidents_and_simple_edits_are_refused(cli: Cli, out: Path, what: str) -> None:
    edit, message = ACCIDENTS[what]
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    edit(out)
    assert before != {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}, "nothing was changed"
    code, _, err = cli("check", str(out))
    assert code == 4
    assert message in err
    assert len(err.splitlines()) == 1


def _other_token(trace: Trace) -> None:
    for op in ("dispatch", "layer"):
        call = next(call for call in trace.calls[0] if call.op == op)
        call.tensors["hidden"] = batch(trace.case.but(seed=1), 0).hidden


RESEALED: dict[str, tuple[Callable[[Trace], object], str]] = {
    "fewer calls on one rank": (lambda trace: trace.calls[0].pop(), "rank 0 made"),
    "no calls": (lambda trace: setattr(trace, "calls", [[], []]), "rank 0 made 0 calls"),
    "another seed": (lambda trace: setattr(trace, "case", trace.case.but(seed=1)), "is not the data of its case"),
    "other tokens": (_other_token, "rank 0: hidden of layer in step base is not the data of its case"),
}


@pytest.mark.parametrize("what", RESEALED)
def test_a_trace_that_is_not_its_case_is_refused_though_its_seal_is_right(cli: Cli, out: Path, what: str) -> None:
    edit, message = RESEALED[what]
    altered(out, edit, consistent=False)
    code, _, err = cli("check", str(out))
    assert (code, err.count("is not the trace that manifest.json lists")) == (4, 1)
    trace = Trace.load(first(out))
    assert message in recheck(trace)


def test_a_case_judged_with_fewer_calls_is_refused_with_a_manifest_that_agrees(cli: Cli, out: Path) -> None:
    altered(out, lambda trace: [calls.__setitem__(slice(-3, None), []) for calls in trace.calls])
    code, _, err = cli("check", str(out))
    assert code == 4
    assert "is not what its case makes" in err or "when it was recorded" in err


def test_a_promise_between_steps_that_is_gone_is_refused(out: Path) -> None:
    trace = Trace.load(out / "traces" / f"{OTHER}.safetensors")
    assert recheck(trace) == ""
    trace.relations.pop()
    assert "promises between steps" in recheck(trace)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "failed"}, f"{CASE} was failed when it was recorded, and is passed now"),
        ({"file": None, "seal": None}, "a trace of it is not listed"),
        ({"seal": "0" * 64}, "is not the trace that manifest.json lists"),
        ({"calls": "0" * 64}, "is not the trace that manifest.json lists"),
        ({"case": OTHER}, "twice"),
        ({"status": 5}, "entries[0].status is 5, a text is needed"),
    ],
)
def test_a_manifest_that_disagrees_is_refused(cli: Cli, out: Path, changes: dict[str, Any], message: str) -> None:
    manifest_with(out, **changes)
    code, _, err = cli("check", str(out))
    assert code == 4
    assert message in err


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"cases": [{"case": CASE, "status": "failed"}]}, f"{CASE} is failed here, and passed in manifest.json"),
        ({"cases": [{"case": "another", "status": "passed"}]}, "another is passed here, and not listed in"),
        ({"cases": [{"case": CASE}]}, "cases[0] lacks status"),
        ({"cases": 5}, "cases is 5, a list is needed"),
        ([], "is a list of 0, an object is needed"),
    ],
)
def test_a_report_that_disagrees_is_refused(cli: Cli, out: Path, report: Any, message: str) -> None:
    (out / "report.json").write_text(json.dumps({"cases": [{"case": CASE, "status": "passed"}]}))
    assert cli("check", str(out))[0] == 0
    (out / "report.json").write_text(json.dumps(report))
    code, _, err = cli("check", str(out))
    assert (code, message in err) == (4, True), err


def test_a_fault_that_was_not_exercised_stays_so(cli: Cli, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    code, _, _ = cli("run", "--case", CASE, "--fault", "slot-not-filled:rank=7", "--out", out)
    assert code == 11
    code, text, _ = cli("check", out)
    assert code == 11
    assert "passed: " not in text


def test_an_interrupted_run_is_no_pass(cli: Cli, out: Path) -> None:
    manifest_with(out, status=None, file=None, seal=None, calls=None)
    first(out).unlink()
    code, text, _ = cli("check", str(out))
    assert code == 2
    assert "1 of 2 planned cases never ran" in text


def test_cases_that_left_no_trace_are_said(cli: Cli, tmp_path: Path) -> None:
    cli("run", "--case", CASE, "--case", f"{CASE}+@triple", "--out", str(tmp_path))
    code, text, _ = cli("check", str(tmp_path))
    assert code == 10
    assert "1 cases left no trace (--keep failed) and are not judged again" in text


def test_what_cannot_be_compared_says_why(out: Path) -> None:
    trace = Trace.load(first(out))
    assert skipped(trace) == ""
    trace.layer_door = True
    assert skipped(trace) == "an engine pads and orders its batches itself"
    trace.layer_door, trace.case = False, Case.parse("genB+R4+E896+K16+S4096+H3584+I3072")
    assert skipped(trace) == "the case is too large to be recorded again"


def _of_each_scenario() -> dict[str, Case]:
    """The first case of each scenario in the default profile."""
    return {case.scenario.name: case for case in reversed(profile("default"))}


@pytest.mark.parametrize("name", sorted(_of_each_scenario()))
def test_every_scenario_makes_the_same_calls_and_inputs_again(name: str) -> None:
    trace = record(Job(), _of_each_scenario()[name])
    if judge(trace).ok:
        assert recheck(trace) == ""
    else:
        assert trace.not_run, "the reference fails a case of the default profile"


def test_a_pipe_in_the_place_of_a_trace_does_not_block(cli: Cli, out: Path) -> None:
    first(out).unlink()
    os.mkfifo(first(out))
    code, _, err = cli("check", str(out))
    assert code == 4
    assert "is no regular file" in err


def test_inputs_hold_for_every_recording_amount() -> None:
    for keep in ("plan", "digest", "columns:3"):
        trace = record(Job(recording=keep), Case.parse(CASE))
        assert recheck(trace) == "", keep
        changed = next(call for call in trace.calls[1] if call.op == "dispatch")
        changed.tensors["topk_ids"] = torch.zeros_like(changed.tensors["topk_ids"])
        assert recheck(trace) == "rank 1: topk_ids of dispatch in step base is not the data of its case", keep
