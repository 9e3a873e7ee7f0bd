"""What is on this machine? Facts as they are read, without torch and without judging them."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from moonep_validate.doors.doctor.asked import DRIVER, Said, asked
from moonep_validate.doors.report.environment import packages, variables
from moonep_validate.worlds import launch
from moonep_validate.worlds.warden import SHARED

#: Packages that are imported, each in a process of its own.
ASKED = ("torch", "moonep", "vllm", "sglang", "deep_gemm", "deep_ep")
SECONDS = 3.5
#: Where an engine calls MoonEP, in its package.
_CALLS = {
    "vllm": "model_executor/layers/fused_moe/prepare_finalize/moonep.py",
    "sglang": "srt/layers/moe/token_dispatcher/moonep.py",
}
#: A keyword of ``prefetch_weight`` that only this generation has.
_TELLING = {"A": "full_gate_weight", "B": "local_gate_weight"}
_QUERY = ("--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader")
_APPS = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader")
_MIB = 2**20


@dataclass(frozen=True)
class Tool:
    """What a tool said, or why it said nothing: ``missing``, ``hangs`` or ``fails``; ``ok`` has lines."""

    state: str = "missing"
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Readings:
    """All facts.

    Attributes:
        memory, shared: (total, free) MiB of memory and of /dev/shm; None where it cannot be read.
        files: open files that a process may have.
        gpus, apps, topology: answers of nvidia-smi.
        device_files: ``none``, ``ok``, or the file that may not be opened.
        imex: whether there is an IMEX channel.
        driver: answer of the driver.
        modules: package -> its answer; one that is not installed is left out.
        torch: version and CUDA as torch's own version file has them.
        packages: distribution -> version and origin.
        unmet: engine -> requirements of its distribution on torch that the one here does not meet.
        deep_gemms: where there is a ``deep_gemm``.
        calls: engine -> the API generation that its source calls: A, B, AB, ``unknown``, or ``none``: it has no
            MoonEP backend.
        variables: environment variables that matter.
    """

    memory: tuple[int, int] | None = None
    shared: tuple[int, int] | None = None
    files: int = 1024
    gpus: Tool = Tool()
    apps: Tool = Tool()
    topology: Tool = Tool()
    device_files: str = "none"
    imex: bool = False
    driver: Said = field(default_factory=lambda: Said("not asked"))
    modules: dict[str, Said] = field(default_factory=dict)
    torch: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    unmet: dict[str, list[str]] = field(default_factory=dict)
    deep_gemms: list[str] = field(default_factory=list)
    calls: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


def read(seconds: float = SECONDS, only: Sequence[str] = ASKED, path: str | None = None) -> Readings:
    """Read the machine.

    Args:
        seconds: for all that is asked, which is asked at once.
        only: packages that are imported; others are told from their files alone.
        path: a folder that comes first on the import path.
    """
    here = {name: folder for name in ASKED if (folder := _folder(name, path)) is not None}
    names = [DRIVER, *(name for name in only if name in here)]
    with ThreadPoolExecutor(4) as pool:
        smi = [pool.submit(tool, ["nvidia-smi", *more], seconds) for more in (_QUERY, _APPS, ("topo", "-m"))]
        answers = asked(names, seconds, path)
        gpus, apps, topology = (one.result() for one in smi)
    return Readings(
        memory=_memory(),
        shared=_shared(SHARED),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpus=gpus,
        apps=apps,
        topology=topology,
        device_files=_device_files(),
        imex=any(Path("/dev/nvidia-caps-imex-channels").glob("channel*")),
        driver=answers.pop(DRIVER),
        modules={name: answers.get(name, Said("", data={"file": str(here[name])})) for name in here},
        torch=_torch(here.get("torch")),
        packages=packages(),
        unmet={name: _unmet(name) for name in _CALLS if name in here},
        deep_gemms=sorted(set(_deep_gemms(here))),
        calls={name: _calls(here[name] / file) for name, file in _CALLS.items() if name in here},
        variables=variables(os.environ),
    )


def tool(command: Sequence[str], seconds: float) -> Tool:
    """Run a tool that only reads; what it started ends with it."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except FileNotFoundError:
        return Tool("missing")
    except OSError as error:
        return Tool("fails", (str(error.strerror),))
    try:
        text = process.communicate(timeout=seconds)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # one that waits in the driver cannot be killed
            process.communicate(timeout=0.2)
        return Tool("hangs", (f"no answer within {seconds:g} s",))
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    return Tool("ok" if process.returncode == 0 else "fails", lines)


def _folder(name: str, path: str | None) -> Path | None:
    """Where a top-level package would be imported from, found without importing it; None if nowhere."""
    with suppress(Exception):  # finders of others may do anything
        spec = PathFinder.find_spec(name, [path]) if path else None
        spec = spec or importlib.util.find_spec(name) or PathFinder.find_spec(name, [launch.current_folder()])
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
        return Path(places[0] if places else str(spec.origin))
    return None


def _memory() -> tuple[int, int] | None:
    with suppress(OSError, ValueError, AttributeError):
        text = Path("/proc/meminfo").read_text()
        found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", text, re.M))
        return int(found["MemTotal"]) // 1024, int(found["MemAvailable"]) // 1024
    return None


def _shared(folder: Path) -> tuple[int, int] | None:
    """Total and free MiB; None where nothing can be written."""
    with suppress(OSError):
        room = os.statvfs(folder)
        if os.access(folder, os.W_OK):
            return room.f_blocks * room.f_frsize // _MIB, room.f_bavail * room.f_frsize // _MIB
    return None


def _device_files() -> str:
    files = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia(ctl|\d+)", path.name)]
    closed = [str(path) for path in files if not os.access(path, os.R_OK | os.W_OK)]
    return closed[0] if closed else "ok" if files else "none"


def _torch(folder: Path | None) -> dict[str, str]:
    with suppress(OSError, AttributeError):
        text = (folder / "version.py").read_text() if folder else ""
        return dict(re.findall(r"^(__version__|cuda)\b[^=]*= '([^']*)'", text, re.M))
    return {}


def _distributions(package: str) -> list[str]:
    with suppress(Exception):
        return sorted(set(metadata.packages_distributions().get(package, [])))
    return []


def _unmet(engine: str) -> list[str]:
    """What an engine's distribution requires of torch, for which its libraries are built, and is not so here."""
    found = []
    with suppress(Exception):
        version = metadata.version("torch")
        for name in _distributions(engine):
            for text in metadata.requires(name) or ():
                with suppress(InvalidRequirement):
                    one = Requirement(text)
                    applies = one.marker is None or one.marker.evaluate({"extra": ""})
                    if one.name == "torch" and applies and not one.specifier.contains(version, prereleases=True):
                        found.append(f"{name} needs torch{one.specifier}, here is {version}")
    return found


def _deep_gemms(here: dict[str, Path]) -> Iterator[str]:
    """Distributions, and folders of engines, that bring a ``deep_gemm``."""
    owners = _distributions("deep_gemm")
    yield from owners
    if "deep_gemm" in here and not owners:
        yield str(here["deep_gemm"])
    for name in ("vllm", "sglang"):
        if name in here and (here[name] / "third_party/deep_gemm").is_dir():
            yield f"{name}/third_party/deep_gemm"


def _calls(file: Path) -> str:
    """``A``, ``B``, or what is in doubt, told from the keywords in an engine's own source."""
    with suppress(OSError, ValueError):
        text = file.read_text("utf-8")
        said = {generation for generation, word in _TELLING.items() if re.search(rf"\b{word}\s*=", text)}
        return "".join(sorted(said)) or "unknown"
    return "none"
