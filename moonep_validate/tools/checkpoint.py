"""Is a checkpoint of MXFP4 experts whole and plausible? Reads one in bounded memory and says what is wrong.

Heads first: names, shapes and dtypes against the config. Then the content (``plausible``). What cannot be read at
all is a ``CheckpointError``; what can be read and is wrong is a ``Defect`` with an id of docs/formats.md.

A name is a root, then a tensor of an expert. Loaders of engines look at the end of a name, so a tensor that is
under two roots (a draft model's, a second copy) is a finding, and each root is judged by itself: what is right
under one says nothing of another.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from moonep_validate.cases.limits import MAX_RANKS
from moonep_validate.formats import FormatError
from moonep_validate.formats.kimi_k3 import PARTS, PREFIX, ROLES, ExpertTensor, Geometry
from moonep_validate.tools import plausible
from moonep_validate.tools.config import CheckpointError, other_quantization, read_config
from moonep_validate.tools.shards import Defect, Header, open_shard, read_headers


class Stored(NamedTuple):
    """One expert tensor in one file.

    Attributes:
        root: what its name begins with.
        copy: 0, or its number among further files that hold the same name.
    """

    root: str
    tensor: ExpertTensor
    name: str
    header: Header
    copy: int = 0

    @property
    def where(self) -> str:
        """Its name, with the file of a further copy."""
        return f"{self.name} in {self.header.file.name}" if self.copy else self.name


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
    findings: list[Defect] = field(default_factory=list)
    content: bool = False

    @cached_property
    def stored(self) -> list[Stored]:
        """Every expert tensor under the one spelling of its name, further copies included."""
        parsed = [(ExpertTensor.parse(name), name, header) for name, header in self.headers.items()]
        return [
            Stored(found[1], found[0], name, one, copy)
            for found, name, header in parsed
            if found and found[0].name(found[1]) == name
            for copy, one in enumerate((header, *header.copies))
        ]

    @cached_property
    def roots(self) -> dict[str, dict[ExpertTensor, str]]:
        """Root -> its expert tensors and their names; the model's own root first.

        That is the release's if it has experts, else the one with the most tensors that the config asks for.
        """
        found: dict[str, dict[ExpertTensor, str]] = defaultdict(dict)
        for one in self.stored:
            found[one.root][one.tensor] = one.name
        layers = self.geometry.layers
        asked = {root: sum(one.layer in layers for one in tensors) for root, tensors in found.items()}
        return {root: found[root] for root in sorted(found, key=lambda root: (root != PREFIX, -asked[root], root))}

    @cached_property
    def experts(self) -> dict[ExpertTensor, str]:
        """The expert tensors of the model's own root and their names in the files."""
        return next(iter(self.roots.values()), {})

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
    report.findings += [
        *(Defect("Y11", "config.json", text) for text in other_quantization(folder)),
        *_misspelled(report),
        *_shared(report),
        *_completeness(report),
        *_shapes(report),
    ]
    if content:
        report.findings += _content(report, progress or (lambda done, total, name: None))
        report.content = True
    return report


def _misspelled(report: Report) -> Iterator[Defect]:
    """Names that read as a tensor's and are not its own: leading zeros."""
    for name in report.headers:
        if (found := ExpertTensor.parse(name)) and (own := found[0].name(found[1])) != name:
            there = "which is there too" if own in report.headers else "which is not there"
            yield Defect("Y10", name, f"is a second name of {own}, {there}; a loader may take either")


def _shared(report: Report) -> Iterator[Defect]:
    """Roots that hold a tensor of a root before them, and layers that are under another root only."""
    (first, own), *others = report.roots.items()
    held = dict.fromkeys(own, first)
    for root, tensors in others:
        again = Counter(held[tensor] for tensor in tensors if tensor in held)
        for other, count in again.items():
            yield Defect(
                "Y10",
                f"root {root}",
                f"{count} tensors of its experts are under root {other} too; a loader that goes by the end of a "
                "name takes the last",
            )
        for layer in sorted({one.layer for one in tensors} & set(report.geometry.layers)):
            if not any(one.layer == layer for one in held):
                yield Defect("Y10", f"layer {layer}", f"is under root {root} only, the model's root is {first}")
        held |= {tensor: root for tensor in tensors if tensor not in held}


def _completeness(report: Report) -> Iterator[Defect]:
    """Missing and extra experts and tensors; a whole expert is one finding, neighbours are one line.

    Each root is held against the config in the layers that it has; a layer that no root has is missing.
    """
    there = {one.tensor.layer for one in report.stored}
    for number, (root, tensors) in enumerate(report.roots.items()):
        under = f" under {root}" if number else ""
        layers = {one.layer for one in tensors} | (set() if number else set(report.geometry.layers) - there)
        yield from _missing(report.geometry, set(tensors), layers, under)
        yield from _extra(report.geometry, set(tensors), under)


def _missing(geometry: Geometry, have: set[ExpertTensor], layers: set[int], under: str) -> Iterator[Defect]:
    parts: dict[tuple[int, int], list[str]] = defaultdict(list)
    for tensor in geometry.tensors():
        if tensor.layer in layers and tensor not in have:
            parts[tensor.layer, tensor.expert].append(f"{tensor.matrix}.{tensor.part}")
    whole = [place for place, names in parts.items() if len(names) == len(ROLES) * len(PARTS)]
    for layer, experts in _by_layer(whole):
        text = f"{_named(experts)} missing; the config says {geometry.num_experts}"
        yield Defect("Y10", f"layer {layer}{under}", text)
    for (layer, expert), names in parts.items():
        if len(names) < len(ROLES) * len(PARTS):
            yield Defect("Y10", f"layer {layer}, expert {expert}{under}", f"has no {', '.join(names)}")


def _extra(geometry: Geometry, have: set[ExpertTensor], under: str) -> Iterator[Defect]:
    extra = {
        (t.layer, t.expert) for t in have if t.expert >= geometry.num_experts or t.layer not in geometry.layers
    }
    for layer, experts in _by_layer(extra):
        yield Defect(
            "Y10",
            f"layer {layer}{under}",
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


def _shapes(report: Report) -> Iterator[Defect]:
    for one in report.stored:
        tensor, header, want = one.tensor, one.header, report.geometry.shape(one.tensor)
        if header.shape != want:
            rows, columns = report.geometry.matrix(tensor.matrix)
            transposed = "; this is its transpose" if header.shape == want[::-1] else ""
            yield Defect(
                "Y11",
                one.where,
                f"shape is {list(header.shape)}, the config's {tensor.matrix} [{rows}, {columns}] needs "
                f"{list(want)}{transposed}",
            )
        if header.dtype != "U8":
            loss = "; a loader that copies values, not bytes, gets other scales" if tensor.part == PARTS[1] else ""
            yield Defect("Y11", one.where, f"dtype is {header.dtype}, expected U8{loss}")


def _content(report: Report, progress: Progress) -> Iterator[Defect]:
    """Read all expert tensors, file by file; each root, and each further copy, is judged by itself."""
    seen: dict[str, dict[tuple[int, int], dict[str, plausible.Bytes]]] = defaultdict(lambda: defaultdict(dict))
    own = next(iter(report.roots))
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        by_file = sorted(report.stored, key=lambda one: (one.header.file, one.tensor, one.root))
        for done, one in enumerate(by_file, 1):
            path, tensor = one.header.file, one.tensor
            if path not in opened:
                stack.close()
                opened = {path: stack.enter_context(open_shard(path))}
            kept = plausible.read(opened[path].get_slice(one.name), tensor.part == PARTS[1])
            if kept.nans:
                place, count = kept.nans
                where = f"{one.name}{place}" + one.where.removeprefix(one.name)
                yield Defect("Y7", where, f"scale byte 0xFF (NaN); {count} of its bytes are")
            if _comparable(one, report.geometry):
                whose = f" under {one.root}" * (one.root != own) + f", copy in {path.name}" * bool(one.copy)
                seen[whose][tensor.layer, tensor.expert][f"{tensor.matrix}.{tensor.part}"] = kept
            progress(done, len(by_file), one.name)
    for whose, experts in seen.items():
        for finding in plausible.implausible(experts):
            yield finding._replace(where=finding.where + whose)


def _comparable(one: Stored, geometry: Geometry) -> bool:
    """Whether its bytes are those of codes or scales; else its head is a finding already."""
    return one.header.dtype in ("U8", "F8_E8M0") and one.header.shape == geometry.shape(one.tensor)
