"""Is a checkpoint of MXFP4 experts whole and plausible? Reads one in bounded memory and says what is wrong.

Headers first: names, shapes and dtypes against the config. Then the content, in slices of a few MiB: scale byte
0xFF, zero and constant matrices, experts with the same bytes. What cannot be read at all is a ``CheckpointError``;
what can be read and is wrong is a ``Finding`` with an id of docs/formats.md.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moonep_validate.cases.limits import MAX_RANKS
from moonep_validate.formats import FormatError, mxfp4
from moonep_validate.formats.kimi_k3 import PARTS, ROLES, ExpertTensor, Geometry
from moonep_validate.tools.config import CheckpointError, read_config, read_json, refuse_pointer
from moonep_validate.trace.schema import one_line, shown

INDEX = "model.safetensors.index.json"
#: Bytes of a tensor that are in memory at a time.
PIECE = 4 * 2**20
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


class Finding(NamedTuple):
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
    """What a file says about a tensor, without its data."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size; 0 for a dtype that we do not know."""
        return prod(self.shape) * _SIZES.get(self.dtype, 0)


@dataclass
class Report:
    """All that was found.

    Attributes:
        expert_bytes: per global expert id, summed over layers.
        other_bytes: of everything that is not a routed expert.
        content: whether the data was read, not only headers.
    """

    folder: Path
    geometry: Geometry
    headers: dict[str, Header]
    findings: list[Finding] = field(default_factory=list)
    content: bool = False

    @cached_property
    def experts(self) -> dict[ExpertTensor, str]:
        """The expert tensors and their names in the files."""
        parsed = ((ExpertTensor.parse(name), name) for name in self.headers)
        return {found[0]: name for found, name in parsed if found}

    def rank_bytes(self, ep: int) -> list[int]:
        """Bytes of routed experts per rank, experts dealt out contiguously.

        Raises:
            FormatError: for a size that does not divide the experts.
        """
        refuse_ranks(ep, self.geometry.num_experts)
        per_rank = [0] * ep
        for tensor, name in self.experts.items():
            if tensor.expert < self.geometry.num_experts:
                per_rank[tensor.expert * ep // self.geometry.num_experts] += self.headers[name].nbytes
        return per_rank

    def to_json(self, ep: int | None = None) -> dict[str, Any]:
        """The report as one JSON value."""
        total, routed = (
            sum(header.nbytes for header in self.headers.values()),
            sum(self.headers[name].nbytes for name in self.experts.values()),
        )
        ranks = {} if ep is None else {"ep": ep, "expert_bytes_per_rank": self.rank_bytes(ep)}
        return {
            "folder": str(self.folder),
            "geometry": vars(self.geometry),
            "tensors": len(self.headers),
            "expert_tensors": len(self.experts),
            "bytes": total,
            "expert_bytes": routed,
            "content_read": self.content,
            **ranks,
            "findings": [one._asdict() for one in self.findings],
        }


def refuse_ranks(ep: int, experts: int) -> None:
    """Refuse a number of ranks that cannot share out the experts.

    Raises:
        FormatError: with numbers near it that can.
    """
    if ep >= 1 and experts % ep == 0:
        return
    able = [ranks for ranks in range(1, MAX_RANKS + 1) if experts % ranks == 0]
    below, above = [r for r in able if r < ep][-2:], [r for r in able if r > ep][:2]
    near = ", ".join(map(str, below + above))
    raise FormatError(f"--ep {ep} does not divide the {experts} experts of the model; near it: --ep {near}")


#: Told after each expert tensor: how many were read, of how many, and its name.
Progress = Callable[[int, int, str], None]


def read_headers(folder: Path) -> tuple[dict[str, Header], list[Finding]]:
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
    found: list[Finding] = []
    headers: dict[str, Header] = {}
    for file in files:
        for name, header in _shard(folder / file).items():
            if name in headers:
                found.append(Finding("Y10", name, f"is in {headers[name].file.name} and again in {file}"))
            headers[name] = header
    return headers, found + _against_index(listed, headers)


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
    with _open(path) as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        return {name: Header(path, one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        refuse_pointer(path, file.read(100))
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        size = path.stat().st_size
        raise CheckpointError(f"{path} ({size} bytes) is damaged or cut short: {one_line(str(error))}") from None


def _against_index(listed: Mapping[str, str], headers: Mapping[str, Header]) -> list[Finding]:
    if not listed:
        return []
    absent = [
        Finding("Y10", name, f"is in the index but not in {listed[name]}")
        for name in listed
        if name not in headers
    ]
    extra = [
        Finding("Y10", name, f"is in {header.file.name} but not in the index, so loaders skip it")
        for name, header in headers.items()
        if name not in listed
    ]
    return absent + extra


def inspect(folder: Path, content: bool = True, progress: Progress | None = None) -> Report:
    """Inspect a checkpoint.

    Args:
        folder: with ``config.json`` and safetensors files.
        content: read the data too; else headers only.
        progress: told how far it is; not called for headers.

    Raises:
        CheckpointError: if it cannot be read, or is of another kind.
    """
    geometry = read_config(folder)
    headers, findings = read_headers(folder)
    report = Report(folder, geometry, headers, findings)
    if not report.experts:
        raise CheckpointError(
            f"{folder}: none of its {len(headers)} tensors is a routed expert; names look like "
            f"{ExpertTensor(1, 0, 'w1', PARTS[0]).name()}, the first here is {next(iter(headers), 'none')}"
        )
    report.findings += [*_completeness(report), *_shapes(report)]
    if content:
        report.findings += _content(report, progress or (lambda done, total, name: None))
        report.content = True
    return report


def _completeness(report: Report) -> Iterator[Finding]:
    """Missing and extra experts and tensors; a whole expert is one finding, neighbours are one line."""
    have, geometry = set(report.experts), report.geometry
    parts: dict[tuple[int, int], list[str]] = defaultdict(list)
    for tensor in geometry.tensors():
        if tensor not in have:
            parts[tensor.layer, tensor.expert].append(f"{tensor.matrix}.{tensor.part}")
    whole = [place for place, names in parts.items() if len(names) == len(ROLES) * len(PARTS)]
    for layer, experts in _by_layer(whole):
        yield Finding(
            "Y10", f"layer {layer}", f"{_named(experts)} missing; the config says {geometry.num_experts}"
        )
    for (layer, expert), names in parts.items():
        if len(names) < len(ROLES) * len(PARTS):
            yield Finding("Y10", f"layer {layer}, expert {expert}", f"has no {', '.join(names)}")
    extra = {
        (t.layer, t.expert) for t in have if t.expert >= geometry.num_experts or t.layer not in geometry.layers
    }
    for layer, experts in _by_layer(extra):
        yield Finding(
            "Y10",
            f"layer {layer}",
            f"{_named(experts)} too many; the config has {geometry.num_experts} experts in layers "
            f"{geometry.layers[0]} to {geometry.layers[-1]}",
        )


def _by_layer(places: Iterable[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    layers: dict[int, list[int]] = defaultdict(list)
    for layer, expert in sorted(places):
        layers[layer].append(expert)
    return list(layers.items())


def _named(experts: list[int]) -> str:
    """``experts 3-5, 9 are``: runs are joined."""
    runs: list[list[int]] = []
    for expert in experts:
        if runs and runs[-1][-1] == expert - 1:
            runs[-1][-1] = expert
        else:
            runs.append([expert, expert])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"experts {text} are" if len(experts) > 1 else f"expert {text} is"


def _shapes(report: Report) -> Iterator[Finding]:
    for tensor, name in report.experts.items():
        header, want = report.headers[name], report.geometry.shape(tensor)
        if header.shape != want:
            rows, columns = report.geometry.matrix(tensor.matrix)
            transposed = "; this is its transpose" if header.shape == want[::-1] else ""
            yield Finding(
                "Y11",
                name,
                f"shape is {list(header.shape)}, the config's {tensor.matrix} [{rows}, {columns}] needs "
                f"{list(want)}{transposed}",
            )
        if header.dtype != "U8":
            loss = "; a loader that copies values, not bytes, gets other scales" if tensor.part == PARTS[1] else ""
            yield Finding("Y11", name, f"dtype is {header.dtype}, expected U8{loss}")


class _Tensor(NamedTuple):
    """What is kept of a tensor's data: its digest, its smallest and largest byte, whether every code is zero."""

    digest: bytes
    low: int
    high: int
    zero: bool


def _content(report: Report, progress: Progress) -> Iterator[Finding]:
    seen: dict[tuple[int, int], dict[str, _Tensor]] = defaultdict(dict)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        by_file = sorted(report.experts.items(), key=lambda item: (report.headers[item[1]].file, item[0]))
        for done, (tensor, name) in enumerate(by_file, 1):
            path = report.headers[name].file
            if path not in opened:
                stack.close()
                opened = {path: stack.enter_context(_open(path))}
            kept, bad = _read(opened[path].get_slice(name), tensor.part == PARTS[1])
            if bad:
                yield Finding("Y7", f"{name}{bad[0]}", f"scale byte 0xFF (NaN); {bad[1]} of its bytes are")
            seen[tensor.layer, tensor.expert][f"{tensor.matrix}.{tensor.part}"] = kept
            progress(done, len(by_file), name)
    yield from _dull(seen)
    yield from _twins(seen)


def _read(data: Any, is_scale: bool) -> tuple[_Tensor, tuple[list[int], int] | None]:
    """One pass over a tensor in pieces: what to keep of it, and the first 0xFF and their number."""
    digest, low, high, zero, first, count, row = hashlib.blake2b(digest_size=16), 255, 0, True, None, 0, 0
    for piece in _pieces(data):
        bytes = mxfp4.as_bytes(piece.contiguous().view(torch.uint8))
        digest.update(bytes.numpy().data)
        least, most = (int(end) for end in bytes.aminmax())
        low, high = min(low, least), max(high, most)
        zero = zero and not bool((bytes & 0x77).any())
        if is_scale and (nans := bytes == mxfp4.NAN_SCALE).any():
            place = nans.nonzero()[0].tolist()
            first, count = first or [place[0] + row, *place[1:]], count + int(nans.sum())
        row += len(piece)
    return _Tensor(digest.digest(), low, high, zero), (first, count) if first else None


def _pieces(data: Any) -> Iterator[Tensor]:
    shape = data.get_shape()
    if not shape or 0 in shape:
        return
    rows = max(1, PIECE // max(1, prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield data[start : start + rows]


def _dull(seen: Mapping[tuple[int, int], Mapping[str, _Tensor]]) -> Iterator[Finding]:
    """Matrices that are zero, or one value throughout."""
    for (layer, expert), tensors in seen.items():
        for matrix, role in ROLES.items():
            codes, scales = (tensors.get(f"{matrix}.{part}") for part in PARTS)
            if codes is None or scales is None:
                continue
            where = f"layer {layer}, expert {expert}, {matrix} ({role})"
            if codes.zero:
                yield Finding("Y12", where, "every value is zero")
            elif codes.low == codes.high and scales.low == scales.high:
                yield Finding("Y12", where, f"every code byte is {codes.low} and every scale byte {scales.low}")


def _twins(seen: Mapping[tuple[int, int], Mapping[str, _Tensor]]) -> Iterator[Finding]:
    """Experts with the same bytes, and a gate that is the up of its expert."""
    first: dict[tuple[bytes, ...], tuple[int, int]] = {}
    for (layer, expert), tensors in seen.items():
        where = f"layer {layer}, expert {expert}"
        if all(kept.zero for name, kept in tensors.items() if name.endswith(PARTS[0])):
            continue
        key = tuple(tensors[name].digest for name in sorted(tensors))
        if other := first.get(key):
            yield Finding("Y12", where, f"all its bytes are those of layer {other[0]}, expert {other[1]}")
        first.setdefault(key, (layer, expert))
        gate, up = (tensors.get(f"{matrix}.{PARTS[0]}") for matrix in ("w1", "w3"))
        if gate and up and gate.digest == up.digest and not gate.zero:
            yield Finding("Y12", where, "w1 (gate) and w3 (up) have the same code bytes")
