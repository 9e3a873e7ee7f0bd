"""One byte format: what is saved comes back, and what is damaged or foreign is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from moonep_validate.faults import parse_fault
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.judge import judge
from moonep_validate.pipeline.record import record
from moonep_validate.trace.trace import Call, Recorder, Trace, TraceError
from tests.self.conftest import CASE


def test_saved_trace_gives_the_same_verdict(recorded: Callable[..., Trace], tmp_path: Path) -> None:
    trace = recorded()
    trace.save(tmp_path / "t.safetensors")
    loaded = Trace.load(tmp_path / "t.safetensors")
    assert loaded.digest() == trace.digest()
    assert judge(loaded).to_json() == judge(trace).to_json()
    assert judge(loaded).status == "passed"


def test_errors_relations_and_nan_payloads_travel(tmp_path: Path) -> None:
    trace = record(Job(faults=(parse_fault("rank-raises"),)), CASE)
    payload = torch.tensor([0x7FC1, -0x8000, 0x7F81], dtype=torch.int16).view(torch.bfloat16)
    trace.calls[0].append(
        Call("extra", "dispatch", {"odd": payload, "none": torch.zeros(0, 3)}, {"n": 1}, None, True)
    )
    trace.save(tmp_path / "t.safetensors")
    loaded = Trace.load(tmp_path / "t.safetensors")
    extra = loaded.calls[0][-1]
    assert extra.tensors["odd"].view(torch.int16).tolist() == [0x7FC1, -0x8000, 0x7F81]
    assert extra.tensors["none"].shape == (0, 3)
    assert extra.info == {"n": 1}
    assert [c.error for c in loaded.calls[1]] == [c.error for c in trace.calls[1]]
    assert loaded.reproducer == "--fault rank-raises"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "damaged or no trace"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "does not match its recorded seal"),
        (lambda data: b"", "damaged or no trace"),
        (lambda data: b"not safetensors at all", "damaged or no trace"),
        (
            lambda data: data.replace(b'\\"format\\": 4', b'\\"format\\": 9', 1),
            "trace format 9, this version reads 4",
        ),
        (lambda data: safetensors.torch.save({"x": torch.zeros(2)}), "no trace of moonep-validate"),
    ],
)
def test_damaged_and_foreign_files_are_refused(
    recorded: Callable[..., Trace], tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(damage(recorded().to_bytes()))
    with pytest.raises(TraceError) as error:
        Trace.load(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_errors_of_traces_are_one_printable_line() -> None:
    """They repeat texts of files."""
    assert str(TraceError("step a\nb\x1b[31m is \ud800 " + "x" * 5000)).startswith(
        "step a\\nb\\x1b[31m is \\ud800 x"
    )
    assert len(str(TraceError("x" * 5000))) == 1000


def test_what_a_gpu_has_lost_is_an_error_of_the_last_call() -> None:
    recorder = Recorder()
    with recorder.call("base", "dispatch") as first:
        first.put(rows=torch.ones(2))
    with recorder.call("base", "combine") as last:
        last.put(rows=torch.ones(2))

    def lost() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    first.later.append(lost)
    recorder.settle()
    assert first.tensors == {}
    assert first.error is None
    assert last.tensors["rows"].tolist() == [1.0, 1.0]
    assert last.error is not None
    assert last.error["message"] == "CUDA error: device-side assert triggered"
