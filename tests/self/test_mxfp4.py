"""The MXFP4 codec: the only right decode, the legal encodes, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from moonep_validate.formats import FormatError, mxfp4
from moonep_validate.formats.mxfp4 import BLOCK, RULES, VALUES, Rule, decode, encode
from moonep_validate.formats.oracles import ORACLES, Unavailable, agreement, all_pairs, oracle

pytestmark = pytest.mark.filterwarnings("ignore")  # other people's decoders warn at import

#: OCP MX v1.0: the scale byte and the decoded magnitude of a block's largest value, by rule.
AMAX = (4.0, 5.0, 5.99, 6.0, 6.01, 7.0, 7.99)
GOLDEN: dict[Rule, list[tuple[int, float]]] = {
    "floor": [(127, 4), (127, 4), (127, 6), (127, 6), (127, 6), (127, 6), (127, 6)],
    "rceil": [(127, 4), (127, 4), (127, 6), (127, 6), (128, 6), (128, 8), (128, 8)],
    "ceil": [(127, 4), (128, 4), (128, 6), (128, 6), (128, 6), (128, 8), (128, 8)],
    "even": [(127, 4), (127, 4), (127, 6), (127, 6), (127, 6), (128, 8), (128, 8)],
}


def block(*values: float) -> Tensor:
    return torch.tensor([*values, *[0.0] * (BLOCK - len(values))])


def test_decode_of_one_byte_is_the_two_elements_low_nibble_first() -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0], packed[0, 15] = 0x72, 0x9F  # codes 2, 7 and 15, 9
    got = decode(packed, torch.tensor([[128]], dtype=torch.uint8))
    assert got[0, :2].tolist() == [2.0, 12.0]
    assert got[0, 30:].tolist() == [-12.0, -1.0]


def test_each_row_takes_its_own_scales_along_the_last_axis() -> None:
    packed = torch.full((2, 3, 32), 0x22, dtype=torch.uint8)  # all elements 1
    scale = torch.tensor([[[125, 126], [127, 128], [129, 130]], [[1, 254], [131, 132], [133, 134]]]).to(
        torch.uint8
    )
    got = decode(packed, scale, torch.float64)
    assert got.shape == (2, 3, 64)
    assert torch.equal(got[..., ::BLOCK].log2(), scale.double() - 127)
    assert torch.equal(got[..., BLOCK - 1 :: BLOCK].log2(), scale.double() - 127)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_pairs_are_the_product_of_element_and_power(dtype: torch.dtype) -> None:
    packed, scale = all_pairs()
    got, codes = decode(packed, scale, dtype), mxfp4.unpack(packed)
    want = torch.tensor(VALUES, dtype=torch.float64)[codes.long()] * torch.exp2(scale.double() - 127)
    assert torch.equal(got[:255], want[:255].to(dtype))
    assert torch.equal(got[:255].signbit(), want[:255].signbit())  # -0 too
    assert bool(got[255].isnan().all())


@pytest.mark.parametrize("name", ORACLES)
def test_oracles_agree_on_all_pairs(name: str) -> None:
    try:
        oracle(name)
    except Unavailable as error:
        pytest.skip(str(error))
    same = agreement(name)
    assert bool(same[:255].all()), f"scale bytes {(~same.all(1)).nonzero().flatten().tolist()}"
    # compressed-tensors reads 0xFF as 2**128: one reason to refuse it at load.
    assert bool(same[255].all()) == (name != "compressed-tensors")


@pytest.mark.parametrize("wrong", ["bias", "nibble", "sign", "order of values"])
def test_a_wrong_decoder_would_not_agree(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the comparison above."""

    def faulty(packed: Tensor, scale: Tensor) -> Tensor:
        if wrong == "bias":
            scale = scale.clamp(max=253) + 1
        if wrong == "nibble":
            packed = packed >> 4 | packed << 4
        values = decode(packed, scale)
        if wrong == "sign":
            values = values.abs()
        return values if wrong != "order of values" else values.unflatten(-1, (2, 16)).flip(-2).flatten(-2)

    monkeypatch.setattr("moonep_validate.formats.oracles.version", lambda name: "0")
    monkeypatch.setitem(ORACLES, "faulty", lambda: faulty)
    assert not bool(agreement("faulty")[:255].all())


def test_an_oracle_says_why_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> Tensor:
        raise TypeError("takes 3 arguments")

    monkeypatch.setattr("moonep_validate.formats.oracles.version", lambda name: "0")
    monkeypatch.setitem(ORACLES, "ml-dtypes", lambda: lambda packed, scale: raises())
    with pytest.raises(Unavailable, match="ml-dtypes does not take the call: TypeError: takes 3 arguments"):
        oracle("ml-dtypes")
    monkeypatch.setitem(ORACLES, "nowhere", lambda: __import__("no_such_package"))
    with pytest.raises(Unavailable, match="nowhere cannot be imported: No module named 'no_such_package'"):
        oracle("nowhere")


@pytest.mark.parametrize("rule", RULES)
def test_scale_rules_as_in_the_golden_table(rule: Rule) -> None:
    for amax, want in zip(AMAX, GOLDEN[rule], strict=True):
        for power in (0, -9, 5):
            packed, scale = encode(block(0.3, -amax) * 2.0**power, rule)
            got = decode(packed, scale).abs().max() * 2.0**-power
            assert (int(scale) - power, float(got)) == want, (amax, power)


@pytest.mark.parametrize(
    ("value", "want"), [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]
)
def test_ties_go_to_the_even_code(value: float, want: float) -> None:
    nearby = (value - 1e-6, value, value + 1e-6, -value)
    packed, scale = encode(block(6.0, *nearby))
    assert int(scale) == 127
    below, at, above, negative = decode(packed, scale)[1:5].tolist()
    assert (at, negative) == (want, -want)
    assert want in (below, above)
    assert below < above


@pytest.mark.parametrize("rule", RULES)
def test_encode_of_decoded_bytes_is_the_value_again(rule: Rule) -> None:
    """Every value in range survives, and the spec's rule finds the very bytes where a block uses its range."""
    codes = torch.stack([(torch.arange(BLOCK) * step) % 16 for step in (1, 3, 5, 7)]).to(torch.uint8)
    scale = torch.tensor([[119], [127], [128], [140]], dtype=torch.uint8)
    values = decode(mxfp4.pack(codes), scale)
    packed, bytes = encode(values, rule)
    assert torch.equal(decode(packed, bytes), values) == (
        rule != "ceil"
    )  # 6 needs twice the scale there: 0.5 is lost
    if rule == "floor":
        assert torch.equal(bytes, scale)
        assert torch.equal(packed, mxfp4.pack(codes))


@pytest.mark.parametrize("rule", RULES)
def test_encode_is_within_half_a_step_or_clips_as_its_rule_allows(rule: Rule) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(500, 3 * BLOCK, generator=generator) * torch.exp2(torch.arange(500)[:, None] % 31 - 15.0)
    packed, scale = encode(values, rule)
    unit = mxfp4.scale_values(scale, torch.float64).repeat_interleave(BLOCK, -1)
    size, error = values.double().abs() / unit, (decode(packed, scale).double() - values.double()).abs() / unit
    limit = {"floor": 8.0, "rceil": 6.0, "ceil": 4.0, "even": 7.0}[rule]
    assert float(size.max()) <= limit
    assert float(size.unflatten(-1, (-1, BLOCK)).amax(-1).min()) > limit / 2 * 0.99  # and no scale is too large
    half_step = torch.where(size < 2, 0.25, torch.where(size < 4, 0.5, 1.0))
    assert bool((error <= torch.maximum(half_step, size - 6)).all())


def test_corners_of_encode() -> None:
    packed, scale = encode(torch.cat([block(), block(1e-40), block(-0.0), block(3e38), block(-1e-3, 6.0)]))
    assert scale.tolist() == [0, 0, 0, 252, 127]
    values = decode(packed, scale)
    assert values[:96].abs().max() == 0
    assert bool(values[64].signbit())
    assert values[96] == 6 * 2.0**125
    assert bool(values[128].signbit())  # a negative value that rounds to zero keeps its sign


def test_packing_is_its_own_inverse_for_every_byte() -> None:
    bytes = torch.arange(256, dtype=torch.uint8)
    codes = mxfp4.unpack(bytes)
    assert codes[:6].tolist() == [0, 0, 1, 0, 2, 0]
    assert codes[2 * 0xA7 : 2 * 0xA7 + 2].tolist() == [7, 10]
    assert torch.equal(mxfp4.pack(codes), bytes)


def test_spellings_of_bytes_decode_alike_and_numbers_are_refused() -> None:
    packed, scale = all_pairs()
    want = decode(packed, scale)
    again = decode(packed.view(torch.int8), scale.view(torch.float8_e8m0fnu))
    assert torch.equal(again.nan_to_num(9.0), want.nan_to_num(9.0))
    with pytest.raises(FormatError, match=r"torch\.float32 is not a byte format"):
        decode(packed, scale.float())
    with pytest.raises(FormatError, match=r"torch\.bool is not a byte format"):
        mxfp4.as_bytes(torch.zeros(3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("packed", "scale"), [((3, 32), (3, 1)), ((3, 32), (2, 2)), ((3, 24), (3, 1)), ((32, 3), (2, 3)), ((), ())]
)
def test_shapes_that_do_not_go_together_are_refused(packed: tuple[int, ...], scale: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match="the last axes must be K/2 and K/32"):
        decode(torch.zeros(packed, dtype=torch.uint8), torch.zeros(scale, dtype=torch.uint8))


def test_what_cannot_be_encoded_or_decoded_is_refused() -> None:
    with pytest.raises(FormatError, match="the last axis must be a multiple of 32"):
        encode(torch.zeros(4, 33))
    with pytest.raises(FormatError, match="2 values are NaN or infinite"):
        encode(block(float("nan"), float("inf")))
    with pytest.raises(FormatError, match="'nearest' is not known; known: floor, rceil, ceil, even"):
        encode(block(1.0), "nearest")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=r"does not decode exactly to torch\.float16"):
        decode(*all_pairs(), torch.float16)


def test_nan_scales_are_refused_with_name_and_place() -> None:
    scale = torch.full((3, 5), 127, dtype=torch.uint8)
    mxfp4.refuse_nan_scales("experts.4.w1.weight_scale", scale)
    scale[2, 1], scale[2, 4] = 255, 255
    for spelling in (scale, scale.view(torch.float8_e8m0fnu)):
        with pytest.raises(
            FormatError, match=r"experts\.4\.w1\.weight_scale\[2, 1\] is scale byte 0xFF .*2 of 15"
        ):
            mxfp4.refuse_nan_scales("experts.4.w1.weight_scale", spelling)


def test_zero_dimensional_batches_decode() -> None:
    assert decode(torch.zeros(0, 16, dtype=torch.uint8), torch.zeros(0, 1, dtype=torch.uint8)).shape == (0, 32)
    assert list(itertools.islice(VALUES, 8)) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
