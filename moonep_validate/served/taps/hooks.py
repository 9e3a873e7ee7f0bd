"""What is changed in a served engine's process? Modules are touched right after their import, and only these.

``moonep`` gets counting methods on its Buffer. vLLM on a CPU gets the three seams that its MoE layer needs there
(``subjects/engines/vllm.py`` names them); on a GPU nothing of vLLM is touched. Where no ``moonep`` is installed,
our stand-in comes last on the import path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

#: Folder for the counts; without it nothing is changed.
TAPS = "MOONEP_VALIDATE_TAPS"
SHIM = Path(__file__).parents[2] / "subjects" / "shim"
_MOE = "vllm.model_executor.layers.fused_moe"
_COMMUNICATORS = "vllm.distributed.device_communicators"


def install() -> None:
    """Put the hooks before all other finders, and the stand-in behind all of the path."""
    if PathFinder.find_spec("moonep") is None:
        sys.path.append(str(SHIM))
    sys.meta_path.insert(0, _AfterImport(_hooks()))


def _hooks() -> dict[str, Callable[[Any], None]]:
    return {
        "moonep": _count,
        f"{_MOE}.experts.moonep_experts": _on_cpu(_supported),
        f"{_MOE}.all2all_utils": _on_cpu(_named),
        f"{_COMMUNICATORS}.cpu_communicator": _on_cpu(_managed),
    }


class _AfterImport(MetaPathFinder):
    """Finds what the other finders find, and calls a hook once the module is there."""

    def __init__(self, hooks: dict[str, Callable[[Any], None]]) -> None:
        self._hooks = hooks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._hooks:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
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


def _on_cpu(hook: Callable[[Any], None]) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        import torch

        if not torch.cuda.is_available():
            hook(module)

    return change


def _supported(module: Any) -> None:
    module.MoonEPExperts._supports_current_device = staticmethod(lambda: True)


def _named(module: Any) -> None:
    from importlib import import_module

    from moonep_validate.subjects.engines.vllm import CUDA_ONLY

    moonep = import_module(f"{_MOE}.prepare_finalize.moonep")
    for name in CUDA_ONLY:
        setattr(module, name, getattr(moonep, name))


def _managed(module: Any) -> None:
    communicator = module.CpuCommunicator
    real = communicator.__init__

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if self.use_all2all and self.all2all_backend == "moonep":
            from importlib import import_module

            manager = import_module(f"{_COMMUNICATORS}.all2all").MoonEPAll2AllManager
            self.all2all_manager = manager(self.cpu_group, device_group=self.device_group)

    communicator.__init__ = construct
