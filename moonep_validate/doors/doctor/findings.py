"""What do the readings of a machine mean? One line a thing: its state, what was found, who needs it, the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moonep_validate.doors.doctor.line import TIERS, Line
from moonep_validate.doors.doctor.readings import Readings, Tool
from moonep_validate.errors import CaseError

_GPU = ("gpu", "gpus", "moonep", "deepgemm")
_ENGINES = ("vllm", "sglang")
#: Package -> the tiers that need it, and how it comes here.
_PACKAGES = {
    "torch": (tuple(TIERS), "install torch; pytorch.org has the command for each CUDA"),
    "moonep": (("moonep",), "install MoonEP from its repository; without it engines get our stand-in"),
    "vllm": (("vllm",), "run in vLLM's environment: docs/guide.md"),
    "sglang": (("sglang",), "run in SGLang's environment, with --engine-path CHECKOUT/python: docs/guide.md"),
    "deep_gemm": (("deepgemm",), "pip install sgl-deep-gemm, or build DeepGEMM"),
    "deep_ep": ((), ""),
}
#: MiB below which a run of the default profile may not fit.
_LITTLE_MEMORY, _LITTLE_SHARED, _FEW_FILES = 2048, 256, 1024


def findings(here: Readings) -> list[Line]:
    """All lines, machine first."""
    return [
        *_resources(here),
        *_gpus(here),
        *_between(here),
        *(_package(here, name) for name in _PACKAGES),
        *_clashes(here),
        *_software(here),
    ]


def _resources(here: Readings) -> Iterator[Line]:
    needs = ("threads", "processes")
    if here.memory is None:
        yield Line("memory", "unknown", "/proc/meminfo cannot be read", (), "look with free -m")
    else:
        total, free = here.memory
        little = free < _LITTLE_MEMORY
        fix = f"free memory: below {_LITTLE_MEMORY} MiB large cases may be killed" if little else ""
        yield Line("memory", "note" if little else "ok", f"{free:,} of {total:,} MiB free", needs, fix)
    yield _shared(here)
    few = 0 <= here.files < _FEW_FILES  # -1 is without limit
    yield Line(
        "open files",
        "note" if few else "ok",
        "no limit" if here.files < 0 else f"{here.files:,} for a process",
        ("processes",),
        f"ulimit -n {_FEW_FILES}" if few else "",
    )


def _shared(here: Readings) -> Line:
    needs = ("processes", "vllm", "sglang")
    if here.shared is None:
        fix = "mount it (docker run --shm-size 1g); until then ranks share a file in the temporary folder"
        return Line("/dev/shm", "note", "missing, or not writable", needs, fix)
    total, free = here.shared
    little = free < _LITTLE_SHARED
    fix = "docker run --shm-size 1g; where it is full ranks send rows as messages" if little else ""
    return Line("/dev/shm", "note" if little else "ok", f"{free:,} of {total:,} MiB free", needs, fix)


def _gpus(here: Readings) -> Iterator[Line]:
    yield _smi(here.gpus, here.device_files)
    driver = here.driver
    if driver.problem:
        state = "unknown" if driver.late else "missing" if _no_gpu(here) else "broken"
        yield Line("driver", state, driver.problem, _GPU, "install the NVIDIA driver; see nvidia-smi")
    else:
        yield _cuda(here, str(driver.data["cuda"]))
        gpus = driver.data["gpus"]
        text = ", ".join(f"{one['major']}.{one['minor']}" for one in gpus) or "no GPU"
        old = [one for one in gpus if (one["major"] or 0) < 9]
        fix = "DeepGEMM and MoonEP need 9.0 or later" if old or not gpus else ""
        state = "missing" if not gpus or old else "ok"
        yield Line("compute capability", state, text, ("moonep", "deepgemm"), fix)
    if here.apps.state == "ok":
        busy = len(here.apps.lines)
        text = f"{busy} process{'es' * (busy != 1)} on the GPUs" if busy else "nobody else is on the GPUs"
        fix = "CUDA_VISIBLE_DEVICES picks free GPUs; times measured beside others mean nothing" if busy else ""
        yield Line("GPUs shared", "note" if busy else "ok", text, (), fix)


def _no_gpu(here: Readings) -> bool:
    return here.device_files == "none" and here.gpus.state != "ok"


def _smi(gpus: Tool, files: str) -> Line:
    last = gpus.lines[-1] if gpus.lines else "it says nothing"
    if gpus.state == "hangs":
        fix = "a GPU or the driver hangs: see dmesg, restart the machine"
        return Line("GPUs", "unknown", f"nvidia-smi hangs: {last}", _GPU, fix)
    if files not in ("none", "ok"):
        fix = "give this user the device: groups video or render; in a container --gpus all"
        return Line("GPUs", "broken", f"no permission to open {files}", _GPU, fix)
    if gpus.state == "fails":
        fix = "run nvidia-smi by hand: the driver does not answer, or does not answer this user"
        return Line("GPUs", "broken", f"nvidia-smi fails: {last}", _GPU, fix)
    if gpus.state == "missing":
        fix = "a machine with NVIDIA GPUs; in a container --gpus all"
        return Line("GPUs", "missing", "nvidia-smi is not here", _GPU, fix)
    if not gpus.lines:
        return Line("GPUs", "missing", "nvidia-smi lists none", _GPU, "a machine with NVIDIA GPUs")
    return Line("GPUs", "ok", f"{len(gpus.lines)}: {gpus.lines[0]}", _GPU)


def _cuda(here: Readings, driver: str) -> Line:
    """The driver's CUDA against that of torch: a driver runs what was built for its major version."""
    built = here.torch.get("cuda")
    if built is None:
        return Line("CUDA", "missing", f"driver {driver}, torch is a CPU build", _GPU, "install torch for CUDA")
    bad = int(driver.partition(".")[0]) < int(built.partition(".")[0])
    fix = f"a driver for CUDA {built}, or torch for CUDA {driver}" if bad else ""
    return Line("CUDA", "broken" if bad else "ok", f"driver {driver}, torch {built}", _GPU, fix)


def _between(here: Readings) -> Iterator[Line]:
    gpus = here.driver.data.get("gpus", [])
    if len(gpus) < 2:
        state = "unknown" if here.driver.late else "missing"
        text = "not known" if here.driver.late else f"{len(gpus)} GPUs, 2 are needed"
        yield Line("peer access", state, text, ("gpus", "moonep"), "a machine with two GPUs of one host")
    else:
        apart = here.driver.data["apart"]
        text = f"no access: {', '.join(f'{a} to {b}' for a, b in apart)}" if apart else "every pair"
        fix = "GPUs of one host that reach each other; a container needs all of them" if apart else ""
        yield Line("peer access", "missing" if apart else "ok", text, ("gpus", "moonep"), fix)
        links = sorted(set(re.findall(r"\bNV\d+\b", " ".join(here.topology.lines))))
        text = ", ".join(links) or f"none in nvidia-smi topo -m ({here.topology.state})"
        fix = "" if links else "without NVLink rows go over PCIe: slow, and not what MoonEP is for"
        yield Line("NVLink", "ok" if links else "note", text, ("gpus",), fix)
    if gpus:
        yield _attribute(gpus, "multicast", "NVSwitch multicast", ("moonep",), "MoonEP needs NVSwitch multicast")
        yield _attribute(gpus, "virtual_memory", "symmetric memory", ("gpus",), "PyTorch's needs virtual memory")
        fabric = all(one["fabric_handles"] for one in gpus)
        text = f"fabric handles {'yes' if fabric else 'no'}, IMEX channel {'yes' if here.imex else 'no'}"
        yield Line("several hosts", "ok" if fabric and here.imex else "note", text, (), "for NVLink over hosts")
    else:
        yield Line("NVSwitch multicast", "missing", "no GPU to ask", ("moonep",), "GPUs on NVSwitch: HGX or NVL")


def _attribute(gpus: list[dict[str, int]], name: str, what: str, needs: tuple[str, ...], fix: str) -> Line:
    lacks = [str(at) for at, one in enumerate(gpus) if not one[name]]
    text = f"not on GPU {', '.join(lacks)}" if lacks else "every GPU says yes (asked, not tried)"
    return Line(what, "missing" if lacks else "ok", text, needs, fix if lacks else "")


def _package(here: Readings, name: str) -> Line:
    needs, fix = _PACKAGES[name]
    what, said = f"package {name}", here.modules.get(name)
    if said is None:
        return Line(what, "missing" if needs else "note", "not installed", needs, fix)
    if said.problem:
        state = "unknown" if said.late else "broken"
        fix = "give it time: --seconds 60" if said.late else f"python -c 'import {name}' shows it; reinstall it"
        return Line(what, state, said.problem, needs, fix)
    if stub := said.data.get("stub"):
        return Line(what, "broken", f"a stub, {said.data['file']}: {stub}", needs, "remove it, and install MoonEP")
    more = [f"generation {said.data['generation']}"] if "generation" in said.data else []
    more += said.data.get("doubts", [])
    text = "; ".join([str(said.data.get("text") or f"at {said.data['file']}, not imported"), *more])
    if said.data.get("level", "real") != "real":
        return Line(what, "note", f"{said.data['level']}: {text}", needs, "docs/trust.md says what makes it real")
    return Line(what, "ok", text, needs)


def _clashes(here: Readings) -> Iterator[Line]:
    if len(here.deep_gemms) > 1:
        fix = "keep one: which is imported depends on the order of installation"
        yield Line("DeepGEMM builds", "note", " and ".join(here.deep_gemms), ("deepgemm",), fix)
    for engine, unmet in here.unmet.items():
        fix = "" if not unmet else "install the torch that it was built for; its libraries may not load"
        text = "; ".join(unmet) or "the one that it was built for"
        yield Line(f"torch of {engine}", "note" if unmet else "ok", text, (engine,), fix)
    moonep = here.modules.get("moonep")
    for engine, calls in here.calls.items():
        yield _generation(engine, calls, moonep.data.get("generation") if moonep else None)


def _generation(engine: str, calls: str, offered: str | None) -> Line:
    what, needs = f"MoonEP API of {engine}", (engine,)
    if calls == "none":
        fix = f"a {engine} with the moonep backend (for SGLang a checkout: --engine-path)"
        return Line(what, "missing", f"this {engine} has no moonep backend", needs, fix)
    if len(calls) != 1:
        return Line(what, "note", f"its source does not tell the generation ({calls})", needs)
    if offered and offered != calls:
        fix = "install the moonep revision that this engine was written for"
        return Line(what, "broken", f"it calls generation {calls}, moonep has {offered}", needs, fix)
    return Line(what, "ok", f"it calls generation {calls}" + (", as moonep has" if offered else ""), needs)


def _software(here: Readings) -> Iterator[Line]:
    nccl = [f"{name} {text.partition(',')[0]}" for name, text in here.packages.items() if "nccl" in name]
    yield Line(
        "NCCL", "ok" if nccl else "note", ", ".join(nccl) or "no package of it: torch's own, if any", ("gpus",)
    )
    for name, text in here.packages.items():
        if name not in (*_PACKAGES, "moonep-validate") and "nccl" not in name:
            yield Line(f"version of {name}", "ok", text)
    for name, value in here.variables.items():
        yield Line(f"${name}", "ok", value)


def gate_blockers(lines: list[Line], demands: list[tuple[str, str]]) -> list[str]:
    """Why demands cannot be met whatever runs, one sentence each: only packages of known names are that sure.

    Args:
        lines: findings.
        demands: (the demand as it was written, its package).
    """
    packages = {line.what.removeprefix("package "): line for line in lines if line.what.startswith("package ")}
    stopped = [(text, packages[name]) for text, name in demands if name in packages]
    return [
        f"--require {text} is not met: {line.what.removeprefix('package ')}: {line.value}; {line.fix}"
        for text, line in stopped
        if line.state in ("missing", "broken")
    ]


def known_tiers(wanted: list[str]) -> list[str]:
    """Names of tiers, several in one text with commas.

    Raises:
        CaseError: for a name that is none.
    """
    names = [name for text in wanted for name in text.split(",")]
    if bad := [name for name in names if name not in TIERS]:
        raise CaseError(f"--require {bad[0]}: known tiers are {', '.join(TIERS)}")
    return names
