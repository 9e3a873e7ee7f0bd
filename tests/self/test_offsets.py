"""Index arithmetic at the sizes of Kimi-K3: which formula wraps, from which group or row on."""

from __future__ import annotations

import pytest

from moonep_validate.cases.case import Case
from moonep_validate.judge.oracle.offsets import Offset, offsets, wide
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.run import run_case

K3 = Case.parse("genB+R8+E896+K16+S4096+H3584+I3072+pad128")


def test_weights_of_kimi_k3_wrap_and_small_ones_do_not() -> None:
    found = {offset.what.split(":")[0]: (offset.end, offset.first_wrong) for offset in wide(K3)}
    assert found["gate or up of a group"] == (224 * 3072 * 3584, 196)
    assert found["fused gate and up of a group"] == (224 * 2 * 3072 * 3584, 98)
    assert found["a slot in the pools of all ranks"] == (896 * 3072 * 3584, 196)
    assert found["a row of the buffers of all ranks"][1] == -(-(2**31) // 3584)
    assert "a row of the buffer" not in found
    assert wide(Case.parse("genB+R8+E64+K8+S16")) == []


def test_packed_codes_need_32_bits_less_often() -> None:
    packed = {o.what.split(":")[0] for o in wide(K3.but(format=Case.parse("genB+R1+E1+K1+S1+mxfp4").format))}
    assert "packed codes of a group, in bytes" not in packed
    more = K3.but(R=2, format=Case.parse("genB+R1+E1+K1+S1+mxfp4").format)
    assert {o.first_wrong for o in wide(more) if "packed" in o.what} == {391}


@pytest.mark.parametrize("stride", [1, 3072 * 3584, 2**31 - 1, 2**31, 2**33 + 5])
def test_the_first_wrong_index_is_where_the_product_leaves_31_bits(stride: int) -> None:
    count = 1000
    expected = next((i for i in range(count) if i * stride >= 2**31), None)
    assert Offset("", count, stride).first_wrong == expected
    assert Offset("", 1, stride).first_wrong is None


def test_the_verdict_says_how_many_bits_the_largest_offset_needs() -> None:
    case = Case.parse("genB+R2+E4+K2+S3+H16+I24")
    assert run_case(Job(), case)[1].measures["offset_bits"] == max(o.end for o in offsets(case)).bit_length()
