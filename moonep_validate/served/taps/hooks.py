"""What is changed in a served engine's process? Modules are touched right after their import, and only these.

``moonep`` gets counting methods on its Buffer. Where calls are sampled, a sampler watches it and vLLM's MoE layer.
On a CPU vLLM gets the three seams that its MoE layer needs there (``subjects/engines/vllm.py`` names them); on a
GPU nothing is replaced. Where no ``moonep`` is installed, our stand-in comes last on the import path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

#: Folder for the counts; without it nothing is changed. And how many calls are sampled, see schedule.py.
TAPS, SAMPLES = "MOONEP_VALIDATE_TAPS", "MOONEP_VALIDATE_SAMPLES"
#: What was replaced in this process.
REPLACED: list[str] = []
_Hook = Callable[[Any], None]
SHIM = Path(__file__).parents[2] / "subjects" / "shim"
_MOE = "vllm.model_executor.layers.fused_moe"
_COMMUNICATORS = "vllm.distributed.device_communicators"


def install() -> None:
    """Put the hooks before all other finders, and the stand-in behind all of the path."""
    if PathFinder.find_spec("moonep") is None:
        sys.path.append(str(SHIM))
    sys.meta_path.insert(0, _AfterImport(_hooks()))


def _hooks() -> dict[str, Callable[[Any], None]]:
    sampler = _sampler()
    return {
        "moonep": _both(_count, _sampled("sample", "Buffer", sampler)),
        f"{_MOE}.experts.moonep_experts": _both(
            _on_cpu(_supported), _sampled("sample_vllm_experts", "MoonEPExperts", sampler)
        ),
        f"{_MOE}.prepare_finalize.moonep": _sampled("sample_vllm_layer", "MoonEPPrepareAndFinalize", sampler),
        f"{_MOE}.all2all_utils": _on_cpu(_named),
        f"{_COMMUNICATORS}.cpu_communicator": _on_cpu(_managed),
    }


def _sampler() -> Callable[[], Any]:
    """The one sampler of this process, made when something is there to be sampled."""

    @cache
    def made() -> Any:
        from moonep_validate.served.taps.sampling import Sampler
        from moonep_validate.served.taps.schedule import Amount

        return Sampler(Path(os.environ[TAPS]), Amount.parse(os.environ[SAMPLES]))

    return made


def _sampled(how: str, name: str, sampler: Callable[[], Any]) -> _Hook:
    """Put the sampler on a class of a module, where calls are to be sampled."""

    def change(module: Any) -> None:
        if os.environ.get(SAMPLES):
            from importlib import import_module

            attach = import_module("moonep_validate.served.taps.attach")
            getattr(attach, how)(getattr(module, name), sampler())

    return change


def _both(*hooks: _Hook) -> _Hook:
    def change(module: Any) -> None:
        for hook in hooks:
            hook(module)

    return change


class _AfterImport(MetaPathFinder):
    """Finds what the other finders find, and calls a hook once the module is there."""

    def __init__(self, hooks: dict[str, Callable[[Any], None]]) -> None:
        self._hooks = hooks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._hooks:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:  # one before may ask us
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self._hooks[fullname])
                return spec
        return None


class _Loader(Loader):
    """A loader with a hook behind it."""

    def __init__(self, real: Loader, hook: Callable[[Any], None]) -> None:
        self._real, self._hook = real, hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        self._hook(module)


def _count(module: Any) -> None:
    from moonep_validate.served.taps.counting import count

    count(module.Buffer, Path(os.environ[TAPS]))


def _on_cpu(hook: _Hook) -> _Hook:
    def change(module: Any) -> None:
        import torch

        if not torch.cuda.is_available():
            hook(module)

    return change


def _supported(module: Any) -> None:
    REPLACED.append("MoonEPExperts says that it supports the device")
    module.MoonEPExperts._supports_current_device = staticmethod(lambda: True)


def _named(module: Any) -> None:
    from importlib import import_module

    from moonep_validate.subjects.engines.vllm import CUDA_ONLY

    REPLACED.append("all2all_utils knows the names of the MoonEP module")
    moonep = import_module(f"{_MOE}.prepare_finalize.moonep")
    for name in CUDA_ONLY:
        setattr(module, name, getattr(moonep, name))


def _managed(module: Any) -> None:
    REPLACED.append("the communicator of the expert-parallel group owns a MoonEPAll2AllManager")
    communicator = module.CpuCommunicator
    real = communicator.__init__

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if self.use_all2all and self.all2all_backend == "moonep":
            from importlib import import_module

            manager = import_module(f"{_COMMUNICATORS}.all2all").MoonEPAll2AllManager
            self.all2all_manager = manager(self.cpu_group, device_group=self.device_group)

    communicator.__init__ = construct
