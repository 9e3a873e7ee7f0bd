"""Every fault of bytes is caught on our data and named; on the data and by the comparison it names it is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moonep_validate.formats import identity, mxfp4
from moonep_validate.formats.faults import BYTE_FAULTS, ByteFault
from moonep_validate.formats.kimi_k3 import Geometry
from moonep_validate.formats.loaded import Loaded, Shard, compare, due

ROOT = Path(__file__).parents[2]
GEOMETRY = Geometry().scaled(16, num_experts=5, top_k=2, moe_layers=3)
#: 224 rows of down are padded to 256: padding is there to be spoiled.
SHARD = Shard((3, 0, 4), columns_to=256)
OWN = due(identity.source(GEOMETRY), GEOMETRY, 2, SHARD)
SEEDS = range(6)


def random_codes(experts: int) -> Loaded:
    """Normal values with a fixed scale, in square matrices: what tests of layouts are often made of."""
    generator = torch.Generator().manual_seed(5)

    def codes(*shape: int) -> Tensor:
        values = torch.randn(experts, *shape, generator=generator, dtype=torch.float64).clamp(-6, 6)
        return mxfp4.pack(mxfp4.encode_elements(values))

    scale = torch.full((experts, 512, 8), 127, dtype=torch.uint8)
    return Loaded(codes(512, 256), scale, codes(256, 256), scale[:, :256].clone())


def equal_experts() -> Loaded:
    return Loaded(*(tensor[:1].expand_as(tensor).contiguous() for tensor in OWN))


def small_values() -> Loaded:
    """Weights near 1e-3, as those of real layers."""
    data = random_codes(3)
    return data._replace(w13_scale=data.w13_scale - 12, w2_scale=data.w2_scale - 12)


NAIVE: dict[str, Loaded] = {
    "own": OWN,
    "equal scales": random_codes(3),
    "equal experts": equal_experts(),
    "small values": small_values(),
}


def values(x: Loaded) -> list[Tensor]:
    return [mxfp4.decode(*x.fused, torch.float64), mxfp4.decode(*x.down, torch.float64)]


def statistics(x: Loaded) -> list[Tensor]:
    """Per expert: sum of squares (exact here), largest value, and the block maxima in order of size."""
    found = []
    for one in values(x):
        blocks = one.unflatten(-1, (-1, 32)).abs().amax(-1).flatten(1).sort().values
        found += [one.square().sum((1, 2)), one.abs().amax((1, 2)), blocks]
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def cosine(a: Loaded, b: Loaded) -> bool:
    pairs = zip(values(a), values(b), strict=True)
    return all(float(torch.cosine_similarity(x.flatten(1), y.flatten(1)).min()) > 0.999 for x, y in pairs)


def tolerance(a: Loaded, b: Loaded) -> bool:
    return all(torch.allclose(x, y, rtol=0, atol=0.05) for x, y in zip(values(a), values(b), strict=True))


#: Whether a comparison finds two sets of parameters equal.
JUDGES: dict[str, Callable[[Loaded, Loaded], bool]] = {
    "shapes": lambda a, b: all(x.shape == y.shape and x.dtype == y.dtype for x, y in zip(a, b, strict=True)),
    "statistics": lambda a, b: same(statistics(a), statistics(b)),
    "values": lambda a, b: same(values(a), values(b)),
    "values inside": lambda a, b: same(
        [v[:, :224, :192] for v in values(a)], [v[:, :224, :192] for v in values(b)]
    ),
    "cosine": cosine,
    "tolerance": tolerance,
    "codes": lambda a, b: torch.equal(a.w13, b.w13) and torch.equal(a.w2, b.w2),
    "scales": lambda a, b: torch.equal(a.w13_scale, b.w13_scale) and torch.equal(a.w2_scale, b.w2_scale),
}

#: What the finding says, besides which tensors differ.
WORDS = {
    "nibbles-swapped": "the nibbles of a byte are swapped",
    "ggml-nibbles": "GGML order",
    "gate-up-swapped": "gate and up rows are in order w31, expected w13",
    "gate-up-interleaved": "gate and up rows are in order interleaved, expected w13",
    "scales-not-moved": "got expert",
    "padding-not-zero": "code bytes of the padding are not zero",
    "cut-inside-block": "blocks are nobody's bytes",
    "expert-not-loaded": "1344 of 1344 blocks are nobody's bytes",
}


@pytest.mark.parametrize("fault", BYTE_FAULTS.values(), ids=BYTE_FAULTS)
def test_every_fault_is_caught_and_named_on_our_data(fault: ByteFault) -> None:
    before = [tensor.clone() for tensor in OWN]
    for seed in SEEDS:
        lines = compare(fault.apply(OWN, seed), OWN, GEOMETRY, 2, SHARD)
        assert lines, seed
        assert "differ from the checkpoint" in lines[0]
        word = WORDS.get(fault.id, "scale bytes are not those of their codes")
        assert any(word in line for line in lines), lines[:4]
    assert same(list(OWN), before)


@pytest.mark.parametrize("fault", BYTE_FAULTS.values(), ids=BYTE_FAULTS)
def test_every_fault_is_missed_where_it_says(fault: ByteFault) -> None:
    data, judge = NAIVE[fault.missed_on], JUDGES[fault.missed_by]
    for seed in SEEDS:
        assert judge(fault.apply(data, seed), data)


@pytest.mark.parametrize("fault", BYTE_FAULTS.values(), ids=BYTE_FAULTS)
def test_a_comparison_is_not_blind_to_everything(fault: ByteFault) -> None:
    """The other side of the test above: on our data some comparison of values or bytes does see it."""
    faulty = fault.apply(OWN, 1)
    assert not all(JUDGES[name](faulty, OWN) for name in ("values", "codes", "scales"))


@pytest.mark.parametrize("judge", JUDGES)
def test_every_comparison_sees_something(judge: str) -> None:
    """Else being missed by it would mean nothing."""
    if judge == "shapes":
        assert not JUDGES[judge](OWN._replace(w2=OWN.w2[1:]), OWN)
        return
    assert any(not JUDGES[judge](fault.apply(OWN, 1), OWN) for fault in BYTE_FAULTS.values())


def test_seeds_give_different_places() -> None:
    for id in (
        "scale-nan",
        "scale-zero",
        "cut-inside-block",
        "scale-rows-shuffled",
        "scale-bias",
        "padding-not-zero",
    ):
        fault = BYTE_FAULTS[id]
        results = [torch.cat([t.flatten() for t in fault.apply(OWN, seed)]) for seed in SEEDS]
        assert len(torch.unique(torch.stack(results), dim=0)) > 2, id


def test_all_classes_of_the_format_have_a_fault_and_an_explanation() -> None:
    document = (ROOT / "docs" / "formats.md").read_text()
    invariants = set(re.findall(r"^\| (Y\d+) \|", document, flags=re.MULTILINE))
    explained = set(re.findall(r"^\| ([KB]\d\d) \|", (ROOT / "docs" / "bugs.md").read_text(), flags=re.MULTILINE))
    for fault in BYTE_FAULTS.values():
        assert fault.invariant in invariants, fault.id
        assert set(fault.bugs.split()) <= explained, fault.id
        assert re.search(
            rf"^\| `{fault.id}` \| {re.escape(fault.summary)} \| {fault.invariant} \|", document, re.MULTILINE
        )
    assert len(BYTE_FAULTS) == document.count("\n| `") == 17
