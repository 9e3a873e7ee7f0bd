"""Doctor: what each reading means, and what it says of tools and packages that are missing, break or hang."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonep_validate.doors.doctor import readings
from moonep_validate.doors.doctor.asked import Said, asked
from moonep_validate.doors.doctor.findings import findings, gate_blockers, known_tiers
from moonep_validate.doors.doctor.line import TIERS, Line, tiers
from moonep_validate.doors.doctor.readings import Readings, Tool, tool
from moonep_validate.errors import CaseError

Cli = Callable[..., tuple[int, str, str]]
GPU = {"major": 9, "minor": 0, "virtual_memory": 1, "fabric_handles": 1, "multicast": 1}
#: A machine on which everything runs.
WHOLE = Readings(
    memory=(64000, 60000),
    shared=(32000, 32000),
    files=65536,
    gpus=Tool("ok", ("NVIDIA H200, 570.1, 143771 MiB, 9.0",) * 2),
    apps=Tool("ok"),
    topology=Tool("ok", ("GPU0 X NV18", "GPU1 NV18 X")),
    device_files="ok",
    imex=True,
    driver=Said(data={"cuda": "13.0", "gpus": [GPU, GPU], "apart": []}),
    modules={
        "torch": Said(data={"text": "torch 2.9"}),
        "moonep": Said(data={"text": "moonep 1", "generation": "A", "level": "real", "doubts": [], "file": "f"}),
        **{name: Said(data={"text": name}) for name in ("vllm", "sglang", "deep_gemm", "deep_ep")},
    },
    torch={"__version__": "2.9", "cuda": "13.0"},
    packages={"nvidia-nccl-cu13": "2.28.3, RECORD 0"},
    unmet={"vllm": [], "sglang": []},
    deep_gemms=["deep_gemm"],
    calls={"vllm": "A", "sglang": "A"},
)


def line(what: str, here: Readings) -> Line:
    (found,) = [one for one in findings(here) if one.what == what]
    return found


def stopped(here: Readings) -> set[str]:
    return {tier.name for tier in tiers(findings(here)) if tier.can_run == "no"}


def with_module(name: str, said: Said) -> Readings:
    return replace(WHOLE, modules={**WHOLE.modules, name: said})


def driver(**changed: Any) -> Readings:
    return replace(WHOLE, driver=Said(data={**WHOLE.driver.data, **changed}))


def test_on_a_machine_with_everything_all_lines_are_ok_and_all_tiers_run() -> None:
    assert [one for one in findings(WHOLE) if one.state != "ok"] == []
    assert [tier.can_run for tier in tiers(findings(WHOLE))] == ["yes"] * len(TIERS)


GPU_TIERS = {"gpu", "gpus", "moonep", "deepgemm"}
#: (readings, line, its state, part of its value, tiers that cannot run)
MEANINGS = [
    (replace(WHOLE, shared=None), "/dev/shm", "note", "missing, or not writable", set()),
    (replace(WHOLE, shared=(64, 60)), "/dev/shm", "note", "60 of 64 MiB free", set()),
    (replace(WHOLE, shared=(1024, 255)), "/dev/shm", "note", "255 of 1,024", set()),
    (replace(WHOLE, memory=(4000, 2047)), "memory", "note", "2,047 of 4,000", set()),
    (replace(WHOLE, files=256), "open files", "note", "256", set()),
    (replace(WHOLE, gpus=Tool("missing")), "GPUs", "missing", "nvidia-smi is not here", GPU_TIERS),
    (replace(WHOLE, gpus=Tool("ok")), "GPUs", "missing", "lists none", GPU_TIERS),
    (
        replace(WHOLE, gpus=Tool("fails", ("Insufficient Permissions",))),
        *("GPUs", "broken", "nvidia-smi fails: Insufficient Permissions", GPU_TIERS),
    ),
    (replace(WHOLE, gpus=Tool("hangs", ("no answer within 3 s",))), "GPUs", "unknown", "nvidia-smi hangs", set()),
    (
        replace(WHOLE, device_files="/dev/nvidia1"),
        *("GPUs", "broken", "no permission to open /dev/nvidia1", GPU_TIERS),
    ),
    (replace(WHOLE, apps=Tool("ok", ("7, 80 MiB",))), "GPUs shared", "note", "1 process on the GPUs", set()),
    (replace(WHOLE, torch={}), "CUDA", "missing", "torch is a CPU build", GPU_TIERS),
    (driver(cuda="12.8"), "CUDA", "broken", "driver 12.8, torch 13.0", GPU_TIERS),
    (driver(gpus=[GPU, {**GPU, "major": 8}]), "compute capability", "missing", "9.0, 8.0", {"moonep", "deepgemm"}),
    (driver(gpus=[GPU, {**GPU, "multicast": 0}]), "NVSwitch multicast", "missing", "not on GPU 1", {"moonep"}),
    (driver(gpus=[{**GPU, "virtual_memory": 0}, GPU]), "symmetric memory", "missing", "not on GPU 0", {"gpus"}),
    (driver(gpus=[GPU, {**GPU, "fabric_handles": 0}]), "several hosts", "note", "fabric handles no", set()),
    (replace(WHOLE, imex=False), "several hosts", "note", "IMEX channel no", set()),
    (driver(gpus=[GPU]), "peer access", "missing", "1 GPUs, 2 are needed", {"gpus", "moonep"}),
    (driver(apart=[(0, 1)]), "peer access", "missing", "no access: 0 to 1", {"gpus", "moonep"}),
    (replace(WHOLE, topology=Tool("ok", ("GPU0 X SYS",))), "NVLink", "note", "none in nvidia-smi", set()),
    (with_module("vllm", Said("RuntimeError: no")), "package vllm", "broken", "RuntimeError: no", {"vllm"}),
    (with_module("vllm", Said("hangs", late=True)), "package vllm", "unknown", "hangs", set()),
    (with_module("torch", Said("ImportError: x")), "package torch", "broken", "ImportError: x", set(TIERS)),
    (
        with_module("moonep", Said(data={"stub": "it has no class Buffer", "file": "here.py"})),
        *("package moonep", "broken", "a stub, here.py: it has no class Buffer", {"moonep"}),
    ),
    (
        with_module("moonep", Said(data={"text": "m", "generation": "A", "level": "stand-in", "doubts": []})),
        *("package moonep", "note", "stand-in: m; generation A", set()),
    ),
    (
        replace(WHOLE, deep_gemms=["sgl-deep-gemm", "vllm/third_party/deep_gemm"]),
        *("DeepGEMM builds", "note", "sgl-deep-gemm and vllm/third_party/deep_gemm", set()),
    ),
    (replace(WHOLE, unmet={"vllm": ["vllm needs torch==2.8"]}), "torch of vllm", "note", "torch==2.8", set()),
    (
        replace(WHOLE, calls={"vllm": "B"}),
        *("MoonEP API of vllm", "broken", "it calls generation B, moonep has A", {"vllm"}),
    ),
    (replace(WHOLE, calls={"sglang": "none"}), "MoonEP API of sglang", "missing", "no moonep backend", {"sglang"}),
    (replace(WHOLE, calls={"vllm": "AB"}), "MoonEP API of vllm", "note", "does not tell", set()),
]


@pytest.mark.parametrize(
    ("here", "what", "state", "value", "no"), MEANINGS, ids=[f"{one[1]}: {one[3]}" for one in MEANINGS]
)
def test_a_reading_has_a_state_a_value_a_fix_and_stops_what_needs_it(
    here: Readings, what: str, state: str, value: str, no: set[str]
) -> None:
    found = line(what, here)
    assert (found.state, value in found.value) == (state, True), found
    assert found.fix or what.startswith("MoonEP API")
    assert stopped(here) == no


def test_a_tier_is_unknown_only_where_nothing_is_known_to_stop_it() -> None:
    late = with_module("vllm", Said("no answer", late=True))
    assert {tier.name: tier.can_run for tier in tiers(findings(late))}["vllm"] == "unknown"
    both = replace(late, calls={"vllm": "none"})
    (tier,) = [tier for tier in tiers(findings(both)) if tier.name == "vllm"]
    assert (tier.can_run, tier.why) == ("no", ("MoonEP API of vllm: this vllm has no moonep backend",))


def nvidia_smi(folder: Path, text: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_tool_that_is_missing_fails_hangs_or_may_not_run(tmp_path: Path) -> None:
    assert tool([str(tmp_path / "nothing")], 5).state == "missing"
    path = nvidia_smi(tmp_path, "echo one; echo two >&2")
    assert tool([path], 30) == Tool("ok", ("one", "two"))
    assert tool([nvidia_smi(tmp_path, "echo no permission; exit 4")], 30) == Tool("fails", ("no permission",))
    begin = time.monotonic()
    assert tool([nvidia_smi(tmp_path, "sleep 60 & sleep 60")], 0.3).state == "hangs"
    assert time.monotonic() - begin < 20
    (tmp_path / "nvidia-smi").chmod(0o600)
    assert tool([path], 5).state == "fails"


#: What a package does -> part of the sentence about it.
CARELESS = {
    "raising": ("raise RuntimeError('broken build')", "RuntimeError: broken build"),
    "leaving": ("import sys; sys.exit(7)", "SystemExit: 7"),
    "ending": ("import os; os._exit(9)", "ends the process with code 9"),
    "crashing": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "code -11"),
    "interrupting": ("raise KeyboardInterrupt", "ends the process with code"),
}


def test_packages_that_break_at_import_are_one_line_each(tmp_path: Path) -> None:
    for name, (text, _) in CARELESS.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "healthy.py").write_text("__version__ = '3.1'")
    found = asked(["healthy", *CARELESS], 60, str(tmp_path))
    assert found["healthy"].data["version"] == "3.1"
    assert {name: said in found[name].problem for name, (_, said) in CARELESS.items()} == dict.fromkeys(
        CARELESS, True
    )
    assert not any(found[name].late for name in CARELESS)


def test_a_package_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text("import time\nwhile True: time.sleep(1)")
    begin = time.monotonic()
    found = asked(["hanging"], 1.0, str(tmp_path))["hanging"]
    assert (found.late, found.problem) == (True, "no answer within 1 s: it hangs or is slow")
    assert time.monotonic() - begin < 20


def test_a_stub_named_moonep_is_told_from_one_with_a_buffer(tmp_path: Path) -> None:
    (tmp_path / "moonep.py").write_text("def version(): pass")
    stub = asked(["moonep"], 60, str(tmp_path))["moonep"].data
    assert stub["stub"] == "it has no class Buffer; it offers version"
    text = "class Buffer:\n    def __init__(self, B): ...\n    def prefetch_weight(self, plan, full_gate_weight): ...\n"
    (tmp_path / "moonep.py").write_text(text)
    module = asked(["moonep"], 120, str(tmp_path))["moonep"].data
    assert (module["generation"], module["level"]) == ("A", "unverified")
    assert "no installed distribution lists" in module["doubts"][0]


@pytest.mark.parametrize(
    ("text", "calls"),
    [("b.prefetch_weight(full_gate_weight=x)", "A"), ("f(local_gate_weight = x)", "B"), ("f(x)", "unknown")],
)
def test_the_generation_that_an_engine_calls_is_read_from_its_source(
    tmp_path: Path, text: str, calls: str
) -> None:
    file = tmp_path / "moonep.py"
    file.write_text(text)
    assert readings._calls(file) == calls
    assert readings._calls(tmp_path / "other.py") == "none"


def test_two_deep_gemms_are_both_named(tmp_path: Path) -> None:
    (tmp_path / "vllm/third_party/deep_gemm").mkdir(parents=True)
    here = {"deep_gemm": tmp_path / "deep_gemm", "vllm": tmp_path / "vllm"}
    assert list(readings._deep_gemms(here)) == [str(tmp_path / "deep_gemm"), "vllm/third_party/deep_gemm"]


def test_a_machine_is_read_without_torch_in_this_process(cli: Cli) -> None:
    import subprocess

    code = "import sys, moonep_validate.doors.cli.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_doctor_answers_with_tables_json_and_the_exit_codes(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from moonep_validate.doors.cli import doctor

    here = WHOLE
    monkeypatch.setattr(doctor, "read", lambda *_, **__: here)
    code, out, err = cli("doctor")
    assert (code, err) == (0, "")
    assert "NVSwitch multicast" in out
    here = with_module("vllm", Said("no answer", late=True))
    assert cli("doctor")[0] == 0
    code, out, err = cli("doctor", "--require", "vllm", "--json")
    assert (code, json.loads(out)["exit_code"]) == (12, 12)
    assert err == "moonep-validate: vllm: not known: package vllm: no answer\n"
    here = replace(here, gpus=Tool("missing"))
    code, out, err = cli("doctor", "--require", "vllm,gpu")
    assert code == 1
    assert "gpu: cannot run: GPUs: nvidia-smi is not here" in err
    assert cli("doctor", "--require", "tpu")[0] == 4
    assert cli("doctor", "--engine-path", "/no/such/folder")[0] == 4


def test_tiers_are_known_by_name() -> None:
    assert known_tiers(["gpu,vllm", "threads"]) == ["gpu", "vllm", "threads"]
    with pytest.raises(CaseError, match="known tiers are threads"):
        known_tiers(["gpus,everything"])


def test_only_a_package_that_cannot_be_imported_ends_a_gate() -> None:
    gone = replace(WHOLE, modules={name: said for name, said in WHOLE.modules.items() if name != "moonep"})
    wanted = [("transport=moonep", "moonep"), ("engine=vllm", "vllm"), ("engine=mine", "mine")]
    assert gate_blockers(findings(WHOLE), wanted) == []
    (text,) = gate_blockers(findings(gone), wanted)
    assert text.startswith("--require transport=moonep is not met: moonep: not installed; install MoonEP")
    assert gate_blockers(findings(with_module("vllm", Said("slow", late=True))), wanted) == []


def test_a_gate_ends_before_anything_runs_where_a_demanded_package_is_not_there(cli: Cli, tmp_path: Path) -> None:
    code, out, _ = cli("gate", "--profile", "smoke", "--out", str(tmp_path), "--require", "engine=sglang")
    assert code == 1
    assert "--require engine=sglang is not met: sglang: not installed; run in SGLang's environment" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["cases"] == []
    assert report["environment"]["doctor"]["package sglang"] == "missing: not installed"
    assert not (tmp_path / "reference").exists()


@pytest.mark.parametrize(
    ("needs", "unmet"),
    [
        ("torch==2.9.0+cpu", []),
        ("torch==2.9.0", []),
        ("torch>=2.8; extra == 'gpu'", []),
        ("numpy==1.0", []),
        ("torch==2.8.0", ["an-engine needs torch==2.8.0, here is 2.9.0+cpu"]),
    ],
)
def test_an_engine_built_for_another_torch_is_told(
    monkeypatch: pytest.MonkeyPatch, needs: str, unmet: list[str]
) -> None:
    monkeypatch.setattr(readings, "_distributions", lambda package: ["an-engine"])
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.9.0+cpu")
    monkeypatch.setattr("importlib.metadata.requires", lambda name: [needs])
    assert readings._unmet("vllm") == unmet
