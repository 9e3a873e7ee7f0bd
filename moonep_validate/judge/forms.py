"""Which form has each tensor of each call? One table: operation -> tensor -> shape, dtype, device, contiguity.

Shapes follow from the case, the layout and what the call was (docs/contract.md, Plan fields and Buffer); data
never matter. Memory that a caller owns, as pools of weights, may be strided; what a Buffer or the experts return
may not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moonep_validate.cases.case import Case
from moonep_validate.cases.layout import Layout
from moonep_validate.data.k3 import model_width
from moonep_validate.data.problem import format_of, packed_weights, projection_shapes
from moonep_validate.scenarios import SCENARIOS
from moonep_validate.trace.recording import DIGEST, Recording
from moonep_validate.trace.trace import Call, form_of

Shape = tuple[int, ...]
Forms = dict[str, "Form"]

_ASKED = ("hidden", "topk_ids", "topk_weights", "tokens_per_expert")
_PAYLOAD = ("rows", "row_weights")
#: Which rows of the experts were kept, where not all are.
_SAMPLE = ("sample", "sample_group")


@dataclass(frozen=True)
class Form:
    """What is promised of one tensor.

    Attributes:
        shape: all of it.
        dtype: without ``torch.``.
        device: the type of its device; None where the contract says nothing.
        contiguous: whether it must be.
        needed: whether a call that returned must have it.
    """

    shape: Shape
    dtype: str
    device: str | None = None
    contiguous: bool = False
    needed: bool = True

    def __str__(self) -> str:
        where = f" on {self.device}" if self.device else ""
        return f"{self.dtype} {list(self.shape)}{where}{', contiguous' if self.contiguous else ''}"


@dataclass(frozen=True)
class Called:
    """What a call was.

    Attributes:
        case, layout: the geometry; of an engine S is what this rank dispatched.
        rows: NvS of this build.
        engine: whether an engine made the call: its weights may be padded, and its own dtype is its choice.
        info: JSON data of the call.
        noted: the noted form of each tensor, see ``trace.form_of``.
    """

    case: Case
    layout: Layout
    rows: int
    engine: bool
    info: Mapping[str, Any]
    noted: Mapping[str, Mapping[str, Any]]

    def device(self, name: str) -> str | None:
        """Where another tensor of the call is."""
        return self.noted[name]["device"] if name in self.noted else None

    def length(self, name: str) -> int:
        """Rows of another tensor of the call."""
        shape = self.noted.get(name, {}).get("shape") or [0]
        return int(shape[0])


def stage_of(op: str, name: str) -> str:
    """The stage that is to blame for the form of a tensor."""
    if op != "dispatch":
        return op
    return "prepare" if name in _ASKED else "dispatch" if name in _PAYLOAD else "plan"


def expected(op: str, call: Called) -> Forms:
    """The promised form of every tensor of a call; empty for an operation that has none."""
    return _TABLE[op](call) if op in _TABLE else {}


@dataclass(frozen=True)
class Misfit:
    """A tensor that has not the promised form.

    Attributes:
        expected, actual: both forms as text.
        usable: whether shape and dtype are right all the same, so that its values can be compared.
    """

    expected: str
    actual: str
    usable: bool = False


def misfits(op: str, promised: Forms, call: Call, recording: Recording) -> dict[str, Misfit]:
    """The tensors of a call that have another form than promised, or were kept in another form than noted."""
    noted = call.info.get("forms", {})
    names = [*promised, *noted, *(name.removesuffix(DIGEST) for name in call.tensors)]
    found = {name: _misfit(op, promised.get(name), name, call, recording) for name in dict.fromkeys(names)}
    return {name: misfit for name, misfit in found.items() if misfit}


def _misfit(op: str, form: Form | None, name: str, call: Call, recording: Recording) -> Misfit | None:
    noted = call.info.get("forms", {}).get(name)
    if noted is None:
        return _unnoted(op, form, name, call)
    if form is None:
        return Misfit("no such tensor", str(_said(noted)))
    right = tuple(noted["shape"]) == form.shape and noted["dtype"] == form.dtype
    if not right or form.device not in (None, noted["device"]) or (form.contiguous and not noted["contiguous"]):
        return Misfit(str(form), _against(form, _said(noted)), usable=right)
    for part, (shape, dtype) in _kept(op, name, form, call, recording).items():
        held = call.tensors.get(part)
        if held is None or tuple(held.shape) != shape or held.dtype != getattr(torch, dtype):
            got = "nothing" if held is None else "{dtype} {shape}".format(**form_of(held))
            return Misfit(f"{dtype} {list(shape)} in the trace, as its noted form says", got)
    return None


def _said(noted: Mapping[str, Any]) -> Form:
    """A noted form, for a sentence."""
    return Form(tuple(noted["shape"]), noted["dtype"], noted["device"], noted["contiguous"])


def _unnoted(op: str, form: Form | None, name: str, call: Call) -> Misfit | None:
    """A tensor whose form was not noted: it was not returned, or somebody else put it into the trace."""
    if call.done and name in call.tensors and not (op == "experts" and name in _SAMPLE):
        return Misfit(str(form) if form else "no such tensor", "a tensor whose form was not noted")
    missed = form is not None and form.needed and call.done and not call.error
    return Misfit(str(form), "nothing") if missed else None


def _against(form: Form, said: Form) -> str:
    """A noted form in the words of the promised one."""
    where = f" on {said.device}" if form.device else ""
    layout = f", {'' if said.contiguous else 'not '}contiguous" if form.contiguous else ""
    return f"{said.dtype} {list(said.shape)}{where}{layout}"


def _kept(op: str, name: str, form: Form, call: Call, recording: Recording) -> dict[str, tuple[Shape, str]]:
    """What of a tensor must be in the trace, by name; of experts some rows at most, unless all is kept."""
    if op != "experts" or recording.full or name in ("cu_seqlens", "valid"):
        return recording.forms(name, form.shape, form.dtype)
    if "sample" not in call.tensors:
        return {}
    groups = call.tensors["sample_group"]
    count = len(groups.unique()) if name.startswith("weight_") else len(call.tensors["sample"])
    return {name: ((count, *form.shape[1:]), form.dtype)}


def _dispatch(c: Called) -> Forms:
    S, K, E, R, groups = c.layout.S, c.layout.K, c.layout.E, c.layout.R, c.layout.num_groups
    here = c.device("hidden")

    def plan(*shape: int) -> Form:
        return Form(shape, "int32", here, contiguous=True)

    # Who gives no route weights gets none back.
    weighted = (
        {"row_weights": Form((c.rows,), "float32", here, contiguous=True)} if "topk_weights" in c.noted else {}
    )
    return weighted | {
        "hidden": Form((S, c.case.H), "bfloat16", contiguous=True),
        "topk_ids": Form((S, K), "int32", needed=not c.engine),
        "topk_weights": Form((S, K), "float32", contiguous=True, needed=False),
        "tokens_per_expert": Form((E,), "int32", contiguous=True, needed=False),
        "rows": Form((c.rows, c.case.H), "bfloat16", here, contiguous=True),
        "cu_seqlens": plan(groups),
        "dst": plan(S * K),
        "experts_to_copy": plan(R, c.layout.num_slots),
        "zero_fill_ranges": plan(groups, 2),
        "remote_stats": plan(2),
        "dup_groups": plan(c.rows, 3),
        "dup_loffs": plan(c.rows),
        "dup_counts": plan(2),
    }


def _load(c: Called) -> Forms:
    return dict(_weights(c, "local_", c.layout.experts_per_rank, _stored(c.case)))


def _prefetch(c: Called) -> Forms:
    shapes = _prefetched(c.case)
    lengths = {"local_": c.layout.experts_per_rank, "before_": c.layout.num_slots, "slot_": c.layout.num_slots}
    forms = {"experts_to_copy": Form((c.layout.R, c.layout.num_slots), "int32", contiguous=True)}
    for prefix, length in lengths.items():
        forms |= _weights(c, prefix, length, shapes)
    for name in shapes:  # only where rows have an order of their own, and where pools are padded
        for prefix, length in (("full_", c.layout.E), ("gap_", 1), ("before_gap_", 1)):
            if prefix + name in c.noted:
                forms |= _weights(c, prefix, length, {name: shapes[name]})
    return forms


def _prefetched(case: Case) -> Mapping[str, Shape]:
    """Shape of one expert's tensors as prefetch moves them."""
    if SCENARIOS[case.scenario.name].packs:
        return {name: shape for name, (shape, _) in packed_weights(case).items()}
    return _stored(case)


def _stored(case: Case) -> Mapping[str, Shape]:
    """Shape of one expert's tensors as the format of the case stores them."""
    return format_of(case).shapes(case.H, case.I)


def _weights(c: Called, prefix: str, length: int, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Form]]:
    """Weights of so many experts; an engine may pad rows and columns, in the same way everywhere."""
    for name, shape in shapes.items():
        dtype = "uint8" if SCENARIOS[c.case.scenario.name].packs else format_of(c.case).piece(name).dtype
        own = c.noted.get(f"local_{name}") if c.engine else None
        one, held = (tuple(own["shape"][1:]), own["dtype"]) if own else (shape, dtype)
        yield prefix + name, Form((length, *one), held)


def _experts(c: Called) -> Forms:
    groups = c.layout.num_groups
    rows = c.length("valid") if "valid" in c.noted else c.rows
    forms = {
        "rows": Form((rows, c.case.H), "bfloat16"),
        "row_weights": Form((rows,), "float32"),
        "cu_seqlens": Form((groups,), "int32"),
        "out": Form((rows, c.case.H), "bfloat16", c.device("rows"), contiguous=True),
    }
    if "valid" in c.noted:
        forms["valid"] = Form((rows,), "bool")
    if not c.engine:
        forms |= _weights(c, "weight_", groups, _stored(c.case))
    return forms | {
        name: Form((groups, *form["shape"][1:]), form["dtype"])
        for name, form in c.noted.items()
        if c.engine and name.startswith("weight_")
    }


def _combine(c: Called) -> Forms:
    weighted, here = "row_weights" in c.noted, c.device("rows")
    forms = {
        "rows": Form((c.rows, c.case.H), "bfloat16", contiguous=True),
        "row_weights": Form((c.rows,), "float32", contiguous=True, needed=False),
        "hidden": Form((c.layout.S, c.case.H), "bfloat16", here, contiguous=True),
    }
    if weighted:
        forms["topk_weights"] = Form((c.layout.S, c.layout.K), "float32", here, contiguous=True)
    if c.info.get("zero_copy") and not c.engine:
        forms["after_rows"] = forms["rows"]
    return forms


def _layer(c: Called) -> Forms:
    S, K = c.case.S, c.case.K
    return {
        "hidden": Form((S, c.case.H), "bfloat16"),
        "topk_ids": Form((S, K), "int32"),
        "topk_weights": Form((S, K), "float32"),
        "out": Form((S, c.case.H), "bfloat16"),
    }


def _reduce(c: Called) -> Forms:
    own, slots = c.layout.experts_per_rank, c.layout.num_slots
    full = c.layout.num_groups if c.layout.generation == "A" else own
    forms = {"experts_to_copy": Form((c.layout.R, slots), "int32", contiguous=True)}
    for name, shape in projection_shapes(c.case).items():
        for when in ("", "after_"):
            for what, length in (("local", own), ("slot", slots), ("full", full)):
                forms[f"{when}{what}_{name}"] = Form((length, *shape), "float32")
    return forms


def _model(**axes: str) -> Callable[[Called], Forms]:
    """A part of the model around the routed experts; axes by letter, ``:`` before another dtype than BF16."""

    def forms(c: Called) -> Forms:
        sizes = {"S": c.case.S, "K": c.case.K, "E": c.case.E, "H": c.case.H, "M": model_width(c.case)}
        sizes["J"] = 2 * c.case.I
        found = {}
        for name, text in axes.items():
            letters, _, dtype = text.partition(":")
            found[name] = Form(tuple(sizes[letter] for letter in letters), dtype or "bfloat16")
        return found

    return forms


_TABLE: dict[str, Callable[[Called], Forms]] = {
    "load": _load,
    "dispatch": _dispatch,
    "prefetch": _prefetch,
    "experts": _experts,
    "combine": _combine,
    "layer": _layer,
    "reduce": _reduce,
    "router": _model(hidden="SM", gate="EM", bias="E:float32", ids="SK:int32", weights="SK:float32"),
    "latent": _model(hidden="SM", weight="HM", out="SH"),
    "norm": _model(routed="SH", weight="H", out="SH"),
    "shared": _model(hidden="SM", gate="JM", up="JM", down="MJ", out="SM"),
    "output": _model(normed="SH", shared="SM", weight="MH", up="SM", out="SM"),
}
