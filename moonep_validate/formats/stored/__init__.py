"""Which formats of expert weights are there? One file of this folder for each, whose ``FORMAT`` is found here."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from moonep_validate.formats.weight_format import WeightFormat

#: By the word of a case.
FORMATS: dict[str, WeightFormat] = {
    file.name: import_module(f"{__name__}.{file.name}").FORMAT for file in pkgutil.iter_modules(__path__)
}
