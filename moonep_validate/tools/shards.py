"""Which tensors do the safetensors files of a checkpoint hold? Heads only, held against the index."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from moonep_validate.tools.config import CheckpointError, read_json, refuse_pointer
from moonep_validate.trace.schema import one_line, shown

INDEX = "model.safetensors.index.json"
_NAME = re.compile(r"\w[\w.-]{0,199}")

_SIZES = {
    "U8": 1,
    "I8": 1,
    "F8_E8M0": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "BOOL": 1,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "U16": 2,
}
_SIZES |= {"F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8}


class Defect(NamedTuple):
    """Something wrong in a readable checkpoint.

    Attributes:
        id: the invariant of docs/formats.md.
        where: a tensor, or an expert.
        message: what was expected and what is there.
    """

    id: str
    where: str
    message: str


class Header(NamedTuple):
    """What a file says about a tensor, without its data.

    Attributes:
        file, dtype, shape: where it is and what its head says.
        copies: the same name in other files; this one is what the index names, else the last in file order.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    copies: tuple[Header, ...] = ()

    @property
    def nbytes(self) -> int:
        """Its size; 0 for a dtype that we do not know."""
        return prod(self.shape) * _SIZES.get(self.dtype, 0)


def read_headers(folder: Path) -> tuple[dict[str, Header], list[Defect]]:
    """Every tensor of the folder's safetensors files; the index is held against them.

    Raises:
        CheckpointError: for no files, a bad index, a missing or damaged shard.
    """
    index = folder / INDEX
    listed: dict[str, str] = {}
    if index.exists():
        listed = _weight_map(index)
    files = sorted(set(listed.values())) or sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no safetensors file and no {INDEX}")
    found: list[Defect] = []
    headers: dict[str, Header] = {}
    for file in files:
        for name, header in _shard(folder / file).items():
            if before := headers.get(name):
                found.append(Defect("Y10", name, f"is in {before.file.name} and again in {file}"))
                header = _chosen(before, header, listed.get(name))
            headers[name] = header
    return headers, found + _against_index(listed, headers)


def _chosen(before: Header, header: Header, listed: str | None) -> Header:
    """The one of two copies that a loader takes; the other stays beside it, since it is judged too."""
    one, other = (before, header) if before.file.name == listed else (header, before)
    return one._replace(copies=(*before.copies, other._replace(copies=())))


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor names and the files beside the index that hold them, all of which are there."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise CheckpointError(f"{index}: no weight_map from tensor names to files")
    files = sorted(set(listed.values()))
    if outside := [file for file in files if not _NAME.fullmatch(file)]:
        raise CheckpointError(f"{index} names {shown(outside[0])}, which is no file name")
    if absent := [file for file in files if not (index.parent / file).is_file()]:
        many = f"{len(absent)} of {len(files)} files that are not there: " if len(absent) > 1 else ""
        what = ", ".join(absent) if many else f"{absent[0]}, which is not there"
        raise CheckpointError(f"{index} names {many}{what}; --headers-only reads the head of every file too")
    return listed


def _shard(path: Path) -> dict[str, Header]:
    with open_shard(path) as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        return {name: Header(path, one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}


def open_shard(path: Path) -> Any:
    """A safetensors file, opened lazily.

    Raises:
        CheckpointError: if it is a Git LFS pointer, damaged or cut short.
    """
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        refuse_pointer(path, file.read(100))
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        size = path.stat().st_size
        raise CheckpointError(f"{path} ({size} bytes) is damaged or cut short: {one_line(str(error))}") from None


def _against_index(listed: Mapping[str, str], headers: Mapping[str, Header]) -> list[Defect]:
    if not listed:
        return []
    absent = [
        Defect("Y10", name, f"is in the index but not in {listed[name]}") for name in listed if name not in headers
    ]
    extra = [
        Defect("Y10", name, f"is in {header.file.name} but not in the index, so loaders skip it")
        for name, header in headers.items()
        if name not in listed
    ]
    return absent + extra
