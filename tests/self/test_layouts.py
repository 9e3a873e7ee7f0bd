"""Layouts by known positions, not by round trips alone; identities of bytes; what a loader's result is told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moonep_validate.formats import FormatError, identity, layouts, mxfp4
from moonep_validate.formats.identity import Identity
from moonep_validate.formats.kimi_k3 import Geometry
from moonep_validate.formats.layouts import ORDERS, Order, Packed
from moonep_validate.formats.loaded import Loaded, Shard, compare, due
from moonep_validate.formats.stored import FORMATS

GEOMETRY = Geometry().scaled(16, num_experts=5, top_k=2, moe_layers=3)
SOURCE = identity.source(GEOMETRY)


def grid(rows: int, columns: int) -> Tensor:
    """Bytes that differ from their neighbours in both directions."""
    return ((torch.arange(rows)[:, None] * 37 + torch.arange(columns) * 11) % 251).to(torch.uint8)


def test_nibble_orders_of_one_block() -> None:
    codes = torch.arange(32).to(torch.uint8) % 16
    codes[16:] = 15 - codes[:16]
    packed = mxfp4.pack(codes)
    assert packed[:2].tolist() == [0x10, 0x32]  # element 0 low, element 1 high
    assert layouts.swap_nibbles(packed)[:2].tolist() == [0x01, 0x23]
    ggml = layouts.to_ggml(packed)
    assert ggml[:3].tolist() == [0xF0, 0xE1, 0xD2]  # element 0 low, element 16 high
    assert torch.equal(layouts.from_ggml(ggml), packed)
    two = torch.cat([packed, packed.flip(0)])
    assert torch.equal(layouts.to_ggml(two)[16:], layouts.to_ggml(packed.flip(0)))  # block by block
    assert torch.equal(layouts.from_ggml(layouts.to_ggml(two)), two)


@pytest.mark.parametrize(
    ("order", "rows"),
    [
        ("w13", [*range(16), *range(100, 116)]),
        ("w31", [*range(100, 116), *range(16)]),
        ("interleaved", [row for one in range(16) for row in (one, 100 + one)]),
        ("interleaved_up_first", [row for one in range(16) for row in (100 + one, one)]),
        ("runs_of_8", [*range(8), *range(100, 108), *range(8, 16), *range(108, 116)]),
    ],
)
def test_gate_up_orders_row_by_row(order: Order, rows: list[int]) -> None:
    gate = torch.arange(16)[:, None].expand(2, 16, 3)
    fused = layouts.fuse(gate, gate + 100, order)
    assert fused.shape == (2, 32, 3)
    assert fused[1, :, 2].tolist() == rows
    again = layouts.split(fused, order)
    assert torch.equal(again[0], gate)
    assert torch.equal(again[1], gate + 100)


def test_gate_up_orders_refuse_what_they_cannot_hold() -> None:
    half = torch.zeros(12, 2)
    with pytest.raises(FormatError, match="order runs_of_8 needs gate rows in runs of 8, got 12 rows"):
        layouts.fuse(half, half, "runs_of_8")
    with pytest.raises(FormatError, match="'w12' is not known; known: w13, w31"):
        layouts.fuse(half, half, "w12")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="7 fused rows are no gate and up halves"):
        layouts.split(torch.zeros(7, 2))


def test_ue8m0_words_hold_four_groups_and_rows_are_innermost() -> None:
    scale = torch.arange(3 * 6).reshape(3, 6).to(torch.uint8) + 100
    words = layouts.pack_ue8m0(scale)
    assert (words.shape, words.dtype) == ((3, 2), torch.int32)
    assert words.stride() == (1, 4)  # three rows, aligned to four
    assert words[1, 0] == 106 | 107 << 8 | 108 << 16 | 109 << 24
    assert words[2, 1] == 116 | 117 << 8  # groups 6 and 7 do not exist
    assert torch.equal(layouts.unpack_ue8m0(words, 6), scale)
    many = torch.stack([grid(10, 9), grid(10, 9) + 1])
    words = layouts.pack_ue8m0(many)
    assert words.stride()[1:] == (1, 12)
    assert torch.equal(layouts.unpack_ue8m0(words, 9), many)
    k3 = layouts.pack_ue8m0(grid(3072, 112))
    assert (k3.shape, k3.stride()) == ((3072, 28), (1, 3072))


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (3072, 112), (100, 3), (3584, 96), (129, 5)])
def test_tiles_follow_the_formula_of_the_documentation(rows: int, columns: int) -> None:
    scale = grid(rows, columns)
    flat = layouts.to_blocked(scale)
    high, wide = -(-rows // 128) * 128, -(-columns // 4) * 4
    assert flat.shape == (high * wide,)
    r, c = torch.arange(rows)[:, None], torch.arange(columns)
    offset = ((r // 128) * (wide // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    assert torch.equal(flat[offset], scale)
    rest = torch.ones(high * wide, dtype=torch.bool)
    rest[offset.flatten()] = False
    assert not bool(flat[rest].any())
    assert torch.equal(layouts.from_blocked(flat, rows, columns), scale)


def test_tiles_by_hand() -> None:
    scale = torch.zeros(130, 6, dtype=torch.uint8)
    scale[0, 1], scale[1, 0], scale[33, 2], scale[0, 4], scale[129, 5] = 1, 2, 3, 4, 5
    flat = layouts.to_blocked(scale)
    places = {int(flat[place]): place for place in flat.nonzero().flatten().tolist()}
    assert places == {1: 1, 2: 16, 3: 16 + 4 + 2, 4: 512, 5: 1024 + 512 + 16 + 1}
    with pytest.raises(FormatError, match=r"2048 bytes in 128x4 tiles; \[100, 3\] takes 512"):
        layouts.from_blocked(flat, 100, 3)


def test_tiles_agree_with_torchao_where_it_is_installed() -> None:
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils", reason="torchao is not installed here")
    for rows, columns in ((100, 3), (256, 8), (3072, 112)):
        assert torch.equal(
            utils.to_blocked(grid(rows, columns)).flatten(), layouts.to_blocked(grid(rows, columns))
        )


@pytest.mark.parametrize(
    ("rows_to", "columns_to", "shape"), [(64, 64, (128, 256)), (128, 256, (128, 256)), (1, 32, (96, 224))]
)
def test_padding_is_zero_in_value_and_in_bytes(rows_to: int, columns_to: int, shape: tuple[int, int]) -> None:
    weight = Packed(*identity.weights(96, 224, 1, 2, "w1"))
    grown = layouts.pad(weight, rows_to, columns_to)
    assert (*grown.codes.shape, grown.scale.shape[1]) == (shape[0], shape[1] // 2, shape[1] // 32)
    values = mxfp4.decode(*grown)
    assert torch.equal(values[:96, :224], mxfp4.decode(*weight))
    values[:96, :224] = 0
    assert not bool(values.any())
    assert layouts.padding_faults(grown, 96, 224) == []
    again = layouts.unpad(grown, 96, 224)
    assert all(torch.equal(a, b) for a, b in zip(again, weight, strict=True))
    with pytest.raises(FormatError, match="K cannot be padded to a multiple of 48"):
        layouts.pad(weight, 64, 48)


def test_padding_that_is_not_zero_is_placed() -> None:
    grown = layouts.pad(Packed(*identity.weights(96, 224, 1, 2, "w1")), 128, 256)
    grown.scale[..., 100:, :] = 127  # a scale without codes is still zero
    assert layouts.padding_faults(grown, 96, 224) == []
    grown.codes[97, 3], grown.codes[5, 120], grown.codes[98, 0] = 0x10, 0x02, 0x80  # the last is -0
    grown.scale[3, 7] = 255
    assert layouts.padding_faults(grown, 96, 224) == [
        "2 code bytes of the padding are not zero, first at [5, 120]",
        "1 pad scales are 0xFF (NaN), first at [3, 7]",
    ]


def test_shards_are_cut_at_blocks_of_the_models_size() -> None:
    assert layouts.shard_bounds(192, 3) == [(0, 64), (64, 128), (128, 192)]
    assert layouts.shard_bounds(3072, 16)[5] == (960, 1152)
    assert layouts.shard_bounds(48, 1) == [(0, 48)]
    with pytest.raises(
        FormatError, match="intermediate size 192 over 4 ranks is 48 each, no multiple of the block"
    ):
        layouts.shard_bounds(192, 4)
    with pytest.raises(FormatError, match="padded from 192 to 256: cut at the model's size, then pad each shard"):
        layouts.shard_bounds(192, 2, stored=256)
    with pytest.raises(FormatError, match="does not divide among 5 ranks"):
        layouts.shard_bounds(192, 5)
    with pytest.raises(FormatError, match="columns 48 to 96 cut a block of 32"):
        layouts.cut_columns(Packed(*SOURCE(1, 0, "w2")), 48, 96)


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_shards_join_to_the_whole(ranks: int) -> None:
    up, down = Packed(*SOURCE(1, 0, "w3")), Packed(*SOURCE(1, 0, "w2"))
    bounds = layouts.shard_bounds(192, ranks)
    rows, columns = [layouts.cut_rows(up, *b) for b in bounds], [layouts.cut_columns(down, *b) for b in bounds]
    width = 192 // ranks
    assert torch.equal(mxfp4.decode(*rows[1]), mxfp4.decode(*up)[width : 2 * width])
    assert torch.equal(mxfp4.decode(*columns[1]), mxfp4.decode(*down)[:, width : 2 * width])
    for whole, joined in ((up, layouts.join_rows(rows)), (down, layouts.join_columns(columns))):
        assert torch.equal(joined.codes, whole.codes)
        assert torch.equal(joined.scale, whole.scale)


# Identities.


def test_every_block_says_who_it_is() -> None:
    due_here = identity.identity(160, 224, 92, 895, "w3", load=7)
    packed, scale = identity.codes_of(due_here), identity.scales_of(due_here)
    who = identity.identify(packed)
    assert bool(who.same(due_here).all())
    one = {name: int(field[150, 6]) for name, field in vars(who).items()}
    assert one == {"load": 7, "layer": 92, "expert": 895, "matrix": 1, "row": 150, "group": 6}
    assert bool(identity.identify_values(mxfp4.decode(packed, scale)).same(due_here).all())
    assert bool(identity.identify_values(mxfp4.decode(packed, scale, torch.bfloat16)).same(due_here).all())


def test_all_blocks_of_a_model_differ_and_codes_look_random() -> None:
    codes = torch.cat(
        [SOURCE(layer, e, m)[0].flatten() for layer in (1, 3) for e in range(5) for m in ("w1", "w3", "w2")]
    )
    blocks = codes.view(-1, 16)
    assert len(torch.unique(blocks, dim=0)) == len(blocks) == 2 * 5 * 3 * 192 * 7
    counts = torch.bincount(mxfp4.unpack(codes).long(), minlength=16).double()
    mean = len(blocks) * 2.0
    assert float((counts - mean).abs().max()) < 6 * mean**0.5


def test_scales_stay_small_and_differ_between_neighbours() -> None:
    for matrix in ("w1", "w3", "w2"):
        scale = SOURCE(2, 4, matrix)[1].int()
        assert (int(scale.min()), int(scale.max())) == (121, 133)
        assert bool((scale.diff(dim=1) != 0).all())
        assert all(len(set(row)) == len(row) for row in scale.tolist())  # 7 and 6 groups: all different
        column = scale[:13].T.tolist()
        assert all(len(set(rows)) == 13 for rows in column)
        assert not torch.equal(scale[: scale.shape[1], :], scale[: scale.shape[1], :].T)
        assert len({tuple(row) for row in scale.tolist()}) > len(scale) / 3  # no short period


def test_random_bytes_are_nobodys() -> None:
    generator = torch.Generator().manual_seed(3)
    packed = torch.randint(0, 256, (500, 160), dtype=torch.uint8, generator=generator)
    assert not bool(identity.identify(packed).known.any())
    who = identity.identity(500, 320, 1, 0, "w1")
    assert "5000 of 5000 blocks are nobody's bytes, first at row 0, block 0" in identity.findings(
        packed, identity.scales_of(who), who
    )


def told(change: str) -> list[str]:
    packed, scale = SOURCE(2, 3, "w1")
    due_here = identity.identity(192, 224, 2, 3, "w1")
    packed, scale = {
        "nothing": lambda: (packed, scale),
        "another expert's up": lambda: SOURCE(2, 4, "w3"),
        "another layer": lambda: SOURCE(1, 3, "w1"),
        "another load": lambda: identity.source(GEOMETRY, load=2)(2, 3, "w1"),
        "codes of another expert": lambda: (SOURCE(2, 0, "w1")[0], scale),
        "rows moved": lambda: (packed.roll(5, 0), scale.roll(5, 0)),
        "nibbles": lambda: (layouts.swap_nibbles(packed), scale),
        "ggml": lambda: (layouts.to_ggml(packed), scale),
        "scale rows": lambda: (packed, scale.roll(1, 0)),
        "one scale": lambda: (packed, scale.index_fill(0, torch.tensor([77]), 126)),
    }[change]()
    return identity.findings(packed, scale, due_here)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("nothing", []),
        (
            "another expert's up",
            ["got expert 4 up rows 0-191 where expert 3 gate rows 0-191 was due (1344 blocks"],
        ),
        ("another layer", ["got expert 3 gate rows 0-191 layer 1 where expert 3 gate rows 0-191 layer 2 was due"]),
        ("another load", ["got expert 3 gate rows 0-191 load 2 where expert 3 gate rows 0-191 load 0 was due"]),
        ("codes of another expert", ["got expert 0 gate", "scale bytes are not those of their codes"]),
        ("rows moved", ["(1344 blocks, first at row 0, block 0, which holds row 187, block 0)"]),
        ("nibbles", ["1344 blocks are right in another nibble order: the nibbles of a byte are swapped"]),
        ("ggml", ["low nibbles hold elements 0-15, high ones 16-31 (GGML order)"]),
        ("scale rows", ["first at row 0, block 0: expected"]),
        ("one scale", ["scale bytes are not those of their codes, first at row 77, block"]),
    ],
)
def test_findings_say_who_came_instead(change: str, words: list[str]) -> None:
    lines = told(change)
    assert len(lines) == len(words)
    for line, word in zip(lines, words, strict=True):
        assert word in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((8, 64, 1, 4096, "w1"), "expert 4096 cannot be named; at most 4095 fits its 12 bits"),
        ((8, 64, 256, 0, "w1"), "layer 256 cannot be named"),
        ((20000, 64, 0, 0, "w1"), "row 19999 cannot be named; at most 16383"),
        ((8, 64, 0, 0, "w4"), "matrix 'w4' is not known; known: w1, w3, w2"),
    ],
)
def test_places_that_cannot_be_named_are_refused(arguments: tuple[int, int, int, int, str], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        identity.weights(*arguments)


# What a loader returned.


@pytest.mark.parametrize("order", ORDERS)
def test_loaded_parameters_are_compared_in_every_order(order: Order) -> None:
    shard = Shard((3, 0), 1, 2, order, 64, 128)
    want = due(SOURCE, GEOMETRY, 2, shard)
    assert want.w13.shape == (2, 2 * 128, 128)  # 96 rows a rank, up to 128; 224 columns, up to 256
    assert want.w2.shape == (2, 256, 64)
    gate, up = (
        mxfp4.decode(*Packed(*half)) for half in zip(*(layouts.split(t, order) for t in want.fused), strict=True)
    )
    assert torch.equal(gate[1, :96, :224], mxfp4.decode(*SOURCE(2, 0, "w1"))[96:192])
    assert torch.equal(up[0, :96, :224], mxfp4.decode(*SOURCE(2, 3, "w3"))[96:192])
    assert torch.equal(mxfp4.decode(*want.down)[0, :224, :96], mxfp4.decode(*SOURCE(2, 3, "w2"))[:, 96:192])
    assert compare(want, want, GEOMETRY, 2, shard) == []
    for other in set(ORDERS) - {order}:
        lines = compare(due(SOURCE, GEOMETRY, 2, shard._replace(order=other)), want, GEOMETRY, 2, shard)
        assert lines[1] == f"  gate and up rows are in order {other}, expected {order}"


def test_loaded_parameters_of_others_are_named() -> None:
    shard = Shard((3, 0), 1, 2)
    want = due(SOURCE, GEOMETRY, 2, shard)
    other = due(SOURCE, GEOMETRY, 2, Shard((4, 0), 1, 2))
    lines = compare(other, want, GEOMETRY, 2, shard)
    assert lines[0] == "local expert 0 (expert 3): w13, w13_scale, w2, w2_scale differ from the checkpoint"
    assert "w1: got expert 4 gate rows 96-191 where expert 3 gate rows 96-191 was due" in lines[1]
    assert len(lines) == 4
    wrong_rank = compare(due(SOURCE, GEOMETRY, 2, Shard((3, 0), 0, 2)), want, GEOMETRY, 2, shard)
    assert "w1: got expert 3 gate rows 0-95 where expert 3 gate rows 96-191 was due" in wrong_rank[1]
    assert (
        "w2: got expert 3 down rows 0-223 blocks 0-2 where expert 3 down rows 0-223 blocks 3-5 was due"
        in wrong_rank[3]
    )
    assert compare(want._replace(w2=want.w2.mT), want, GEOMETRY, 2, shard) == [
        "w2 has shape [2, 48, 224], expected [2, 224, 48]"
    ]
    assert compare(want._replace(w2_scale=want.w2_scale.float()), want, GEOMETRY, 2, shard) == [
        "w2_scale is torch.float32, expected bytes"
    ]


def test_padding_of_a_loader_is_judged() -> None:
    shard = Shard((1,), rows_to=128, columns_to=128)
    want = due(SOURCE, GEOMETRY, 1, shard)
    got = Loaded(*(tensor.clone() for tensor in want))
    got.w2[0, 224, 0] = 3
    got.w13_scale[0, 0, 7] = 255
    assert compare(got, want, GEOMETRY, 1, shard)[1:] == [
        "  w1: 1 pad scales are 0xFF (NaN), first at [0, 7]",
        "  w2: 1 code bytes of the padding are not zero, first at [224, 0]",
    ]


def test_loading_refuses_nan_and_float_scales() -> None:
    scale = SOURCE(1, 0, "w1")[1].clone()
    mxfp4 = FORMATS["mxfp4"]
    mxfp4.refuse_scales("rank 0", {"gate": torch.full((2, 2), 255), "gate_scale": scale})
    scale[4, 2] = 255
    with pytest.raises(FormatError, match=r"rank 0: gate_scale\[4, 2\] is scale byte 0xFF"):
        mxfp4.refuse_scales("rank 0", {"gate_scale": scale})
    with pytest.raises(FormatError, match=r"rank 0: gate_scale is torch\.float32: scales are bytes"):
        mxfp4.refuse_scales("rank 0", {"gate_scale": scale.float()})


def test_identity_fields_are_one_shape() -> None:
    who = identity.identity(5, 96, 1, 2, "w2")
    assert {tuple(field.shape) for field in vars(who).values()} == {(5, 3)}
    assert isinstance(who, Identity)
