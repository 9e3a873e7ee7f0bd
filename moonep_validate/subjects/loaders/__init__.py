"""Engines' own weight loaders as subjects: small checkpoints go through them, and every byte is compared.

``variants.py`` says which checkpoints, ``child.py`` loads them in a process of its own, ``vllm.py`` and
``sglang.py`` are how engines are asked; ``tools/loaders.py`` compares. What a loader must have is ``Loader``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from moonep_validate.cases.case import CaseError
from moonep_validate.subjects.loaders.variants import Checkpoint, LoadPath, Variant

KNOWN = {
    "vllm": "moonep_validate.subjects.loaders.vllm:VllmLoader",
    "sglang": "moonep_validate.subjects.loaders.sglang:SglangLoader",
}
_MEMBERS = ("package", "paths", "start", "make", "load", "parameters")


class Begun(NamedTuple):
    """An engine that was imported: its package, and what had to be replaced in it."""

    module: Any
    seams: tuple[str, ...] = ()


class Loader(Protocol):
    """An engine's loader in one process; it imports the engine in its methods only.

    Attributes:
        package: the engine's importable package.
        paths: name -> one way of it to load.
    """

    package: str
    paths: Mapping[str, LoadPath]

    def start(self, folder: Path, kept: ExitStack) -> Begun:
        """Import and initialise for one process; ``folder`` is empty, ``kept`` is closed at the end.

        Raises:
            Exception: whatever the import raises; nothing is judged then.
        """

    def make(self, variant: Variant) -> Any:
        """A MoE layer of the sizes in ``variants.py``, as that rank would have it, without weights."""

    def load(self, variant: Variant, layer: Any, checkpoint: Checkpoint) -> int | None:
        """Offer all tensors to the engine's loader; how many it says that it took, None if it does not say."""

    def parameters(self, layer: Any) -> Mapping[str, Tensor]:
        """The layer's parameters by name, before any backend converts them."""


def loader(name: str) -> Loader:
    """The loader of a known engine, or of MODULE:CLASS.

    Raises:
        CaseError: if there is none.
    """
    module, colon, attribute = KNOWN.get(name, name).partition(":")
    if not colon:
        raise CaseError(f"--subject {name}: loaders are known of {', '.join(KNOWN)}, or MODULE:CLASS")
    try:
        made: Loader = getattr(importlib.import_module(module), attribute)()
    except Exception as error:
        raise CaseError(f"--subject {name} cannot be made: {type(error).__name__}: {error}") from None
    if lacks := [wanted for wanted in _MEMBERS if not hasattr(made, wanted)]:
        raise CaseError(f"--subject {name} is no Loader (subjects/loaders): it lacks {', '.join(lacks)}")
    return made
