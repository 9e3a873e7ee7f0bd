"""What balance is worth: rows of the fullest rank three ways and the break-even, against values computed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moonep_validate.cases.layout import Layout
from moonep_validate.judge.oracle.plan import ExpectedPlan, plan_of_loads
from moonep_validate.tools.against import Speeds, against, packed, replicas, static_rows

Cli = Callable[..., tuple[int, str, str]]
SMALL = Layout("B", R=2, E=4, K=2, S=3, pad=1)


def plan(*loads: int) -> ExpectedPlan:
    return plan_of_loads(np.array(loads), SMALL)


def test_rows_of_the_fullest_rank() -> None:
    (one,) = against([plan(6, 2, 1, 3)], bytes_per_expert=1000)
    assert (one.mean, one.plain, one.moonep) == (6, 8, 6)
    assert one.max_vio == pytest.approx(1 / 3)
    # rank 0 hands two rows of expert 0 to rank 1, which fetches one expert
    assert one.prefetch_bytes == 1000
    # copies 3 1 1 1 of weight 2 2 2 2 1 3; 3 | 2 2, 2 | 2, 1: six rows on both ranks
    assert one.static == pytest.approx(6.0)
    assert (one.break_even, one.gain) == (None, None)


def test_replicas_go_to_the_largest_load_a_copy() -> None:
    assert replicas(np.array([6, 2, 1, 3]), 2).tolist() == [3, 1, 1, 1]
    assert replicas(np.array([6, 2, 1, 5]), 2).tolist() == [2, 1, 1, 2]
    assert replicas(np.array([0, 0]), 1).tolist() == [2, 1]


def test_the_heaviest_goes_first_to_the_lightest_rank_with_room() -> None:
    # 6 to 0; 3 to 1; 2 to 1, which is full; 1 to 0
    assert packed(np.array([6.0, 2.0, 1.0, 3.0]), 2).tolist() == [0, 1, 0, 1]


def test_a_placement_made_from_other_loads_is_as_uneven_as_they_differ() -> None:
    now, known = np.array([1, 9, 1, 1]), np.array([6, 2, 1, 3])
    assert static_rows(now, known, ranks=2, redundant=0) == 10  # experts 1 and 3 together
    assert static_rows(now, now, ranks=2, redundant=0) == 10  # 9 | 1, 1 full | 1
    # copies 1 3 1 1: 3 3 3 1 1 1, three a rank: 3 | 3, 3, 1 | 1, 1: 3+3+1 and 3+1+1
    assert static_rows(now, now, ranks=2, redundant=1) == 7


def test_static_redundancy_knows_the_sum_of_its_own_layer() -> None:
    first, second = plan(5, 5, 1, 1), plan(1, 1, 9, 1)  # layers 0 and 1, in each of two steps
    found = against([first, second, first, second], 1, layers=2, redundant=0)
    assert [(one.layer, one.step) for one in found] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    # Layer 0's sum 10 10 2 2 parts experts 0 and 1: 5 + 1. The sum of both layers, 12 12 20 4, would put them together.
    assert [one.static for one in found] == [6, 10, 6, 10]
    assert [one.plain for one in found] == [10, 10, 10, 10]
    assert [one.moonep for one in found] == [6, 6, 6, 6]


def test_the_break_even_by_hand() -> None:
    # 6 rows of 1e9 operations at 0.006 TFLOP/s: 1 s. 1e9 bytes at 4 GB/s: 0.25 s, so v* = 0.25.
    speeds = Speeds(link=4.0, gemm=0.006, flops_per_row=1e9)
    (one,) = against([plan(6, 2, 1, 3)], 10**9, speeds=speeds)
    assert one.break_even == pytest.approx(0.25)
    assert one.gain == pytest.approx((4 / 3) / 1.25)
    (even,) = against([plan(3, 3, 3, 3)], 10**9, speeds=speeds)
    assert (even.break_even, even.gain) == (0.0, 1.0)


def test_at_the_break_even_both_take_as_long() -> None:
    speeds = Speeds(link=3.0, gemm=0.006, flops_per_row=1e9)  # 1/3 s to move, and MaxVio is 1/3
    (one,) = against([plan(6, 2, 1, 3)], 10**9, speeds=speeds)
    assert one.break_even == pytest.approx(one.max_vio)
    assert one.gain == pytest.approx(1.0)


def test_steps_are_whole_and_of_one_model() -> None:
    with pytest.raises(ValueError, match="3 routings are no whole number of steps of 2 layers"):
        against([plan(3, 3, 3, 3)] * 3, 1, layers=2)
    other = plan_of_loads(np.array([6, 6]), Layout("B", R=2, E=2, K=2, S=3, pad=1))
    with pytest.raises(ValueError, match="one model"):
        against([plan(3, 3, 3, 3), other], 1)


CASE = ("plan", "--case", "genB+R2+E4+K2+S3+pad1", "--against")


def test_the_command_prints_it(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "loads.csv"
    path.write_text("6,2,1,3\n3,3,3,3\n")
    sizes = ("--hidden", "1000", "--intermediate", "1000")
    # an expert of 3e6 bf16 elements is 6e6 bytes: 6 ms at 1 GB/s; 6 rows of 6e6 operations at 0.006 TFLOP/s: 6 ms
    speeds = ("--link-gbs", "1", "--gemm-tflops", "0.006")
    code, out, err = cli(*CASE, "--input", str(path), *sizes, *speeds, "--json")
    assert (code, err) == (0, "")
    one, even = map(json.loads, out.splitlines())
    assert (one["plain"], one["static"], one["moonep"], one["break_even"]) == (8, 7.5, 6, pytest.approx(1.0))
    # the sum 9 5 4 6 makes copies 2 1 1 2: 5 of expert 1 | 4.5, 4.5 of 0; 4 of 2 | ; 3 of 3 | 3 of 3: 3 + 3 + 3/2 rows
    assert (even["plain"], even["gain"]) == (6, 1.0)
    code, out, _ = cli(*CASE, "--input", str(path), *sizes, *speeds)
    assert code == 0
    assert "plain EP: fullest rank / mean: median 1.167, most 1.333" in out
    assert "MoonEP: fullest rank / mean: median 1.000, most 1.000" in out
    assert "MoonEP's plan is worth its prefetch in 0 of 2 routings" in out


def test_what_cannot_be_meant_is_refused(cli: Cli, tmp_path: Path) -> None:
    assert "needs both" in cli(*CASE, "--link-gbs", "1")[2]
    assert "give one of them" in cli(*CASE, "--html", str(tmp_path / "x.html"))[2]
    code, _, err = cli(*CASE, "--layers", "2")
    assert (code, "--against: 1 routings are no whole number of steps of 2 layers" in err) == (4, True)
