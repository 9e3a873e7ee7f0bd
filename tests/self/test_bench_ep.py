"""bench ep: every way computes the same layer, ratios and shares by hand, and thresholds of this machine and another."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.data.problem import PROJECTIONS, batch, expert_weights
from moonep_validate.reference.experts import gated_mlp, swiglu
from moonep_validate.studies.bench_ep import STAGES, WAYS, Point, _summed, same, sweep
from moonep_validate.studies.thresholds import beyond, read_thresholds

Cli = Callable[..., tuple[int, str, str]]
POINT = Point(
    "a case",
    max_vio=1.0,
    tokens=16,
    cold=dict.fromkeys(WAYS, 9.0),
    seconds={
        "dense": [1.0, 1.0, 1.0, 1.0, 1.0],
        "allgather": [2.0, 2.0, 2.0, 2.0, 2.0],
        "alltoall": [1.0, 2.0, 4.0, 5.0, 10.0],
        "moonep": [2.0, 6.0, 4.0, 20.0, 50.0],  # over alltoall in the same turn: 2 3 1 4 5
    },
    stages={"dispatch": [1.0, 4.0], "prefetch": [1.0, 2.0], "experts": [1.0, 1.0], "combine": [1.0, 1.0]},
)
FILE = 'device = "cpu"\nranks = 2\n[[at_most]]\nway = "moonep"\nover = "alltoall"\nratio = {ratio}\n{more}'


def file(folder: Path, ratio: float = 3.0, more: str = "", text: str = FILE) -> Path:
    path = folder / "bench.toml"
    path.write_text(text.format(ratio=ratio, more=more))
    return path


def test_a_ratio_is_of_the_same_turn_and_a_share_of_the_same_pass() -> None:
    assert POINT.ratio("moonep", "alltoall") == (3.0, 2.0, 4.0)
    assert POINT.ratio("alltoall", "allgather") == (2.0, 1.0, 2.5)
    assert POINT.share("dispatch")[0] == pytest.approx((0.25 + 0.5) / 2)


def test_ways_that_differ_are_not_compared() -> None:
    one = torch.zeros(3, 4)
    same({"dense": one, "moonep": one.clone()})
    other = one.clone()
    other[1, 2] = 1
    with pytest.raises(ValueError, match="dense differs from moonep in 1 of 12 elements: no time is compared"):
        same({"moonep": one, "dense": other})


def test_the_sum_over_some_experts_is_that_of_a_loop_over_tokens() -> None:
    case = Case.parse("genB+R1+E4+K2+S5+H16+I16+pad4+zipf:1.0")
    tokens, weights = batch(case, 0), expert_weights(case, 0)
    experts = [weights[name][1:3] for name in PROJECTIONS]
    expected = torch.zeros(5, 16)
    for token in range(5):
        for k, expert in enumerate(tokens.topk_ids[token].tolist()):
            if 1 <= expert < 3:
                x = tokens.hidden[token : token + 1].float()
                y = gated_mlp(x, [weights[name][expert] for name in PROJECTIONS], swiglu)
                expected[token] += (y[0] * tokens.topk_weights[token, k]).bfloat16().float()
    got = _summed(tokens.hidden, tokens.topk_ids, tokens.topk_weights, experts, first=1)
    assert expected.abs().sum() > 0
    assert torch.equal(got, expected)


@pytest.mark.parametrize("generation", ["A", "B"])
def test_all_ways_give_the_same_bits_on_two_ranks(generation: str) -> None:
    base = Case.parse(f"gen{generation}+R2+E8+K2+S4+H128+I128+pad4")
    (point,) = sweep(base, [1.0], [8], repeats=2)  # raises where two ways differ
    assert (point.max_vio, point.tokens) == (1.0, 8)
    assert "S8" in point.case
    assert "maxvio:1.0" in point.case
    assert set(point.seconds) == set(WAYS)
    assert set(point.stages) == set(STAGES)
    assert all(len(one) == 2 and min(one) > 0 for one in (*point.seconds.values(), *point.stages.values()))


def test_a_ratio_beyond_its_threshold_is_told(tmp_path: Path) -> None:
    assert beyond(read_thresholds(file(tmp_path, 3.0), "cpu", 2), [POINT]) == []
    (line,) = beyond(read_thresholds(file(tmp_path, 2.9), "cpu", 2), [POINT])
    assert line == "moonep takes 3.00 (2.00 to 4.00) times alltoall, agreed are 2.9: a case"
    here = read_thresholds(file(tmp_path, 2.9, "max_vio = 1.0\ntokens = 16"), "cpu", 2)
    assert len(beyond(here, [POINT])) == 1


def test_a_threshold_that_holds_nowhere_is_refused(tmp_path: Path) -> None:
    for more in ("max_vio = 2.0", "tokens = 17"):
        with pytest.raises(CaseError, match="was not measured"):
            beyond(read_thresholds(file(tmp_path, 3.0, more), "cpu", 2), [POINT])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FILE.replace("ranks = 2", "ranks = 8"), "was agreed for 8 ranks on cpu; here are 2 on cpu"),
        (FILE.replace('"cpu"', '"h200"'), "was agreed for 2 ranks on h200"),
        (FILE.replace('"alltoall"', '"deepep"'), "'deepep' is no way to compute a layer; known: dense"),
        ('device = "cpu"\nranks = 2\nat_most = []', "nothing would be compared"),
        ("ranks = [", "bench.toml"),
        (FILE + "\nspeed = 1", "speed"),
    ],
)
def test_a_file_of_another_machine_or_of_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(CaseError, match=re.escape(said)):
        read_thresholds(file(tmp_path, text=text), "cpu", 2)


def test_the_command_prints_ratios_and_ends_with_1_beyond_a_threshold(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moonep_validate.studies import bench_ep

    monkeypatch.setattr(bench_ep, "sweep", lambda *_: [POINT])
    code, out, _ = cli("bench", "ep", "--thresholds", str(file(tmp_path, 3.0)))
    assert (code, "3.00 (2.00-4.00)" in out) == (0, True)
    code, out, _ = cli("bench", "ep", "--thresholds", str(file(tmp_path, 1.0)))
    assert (code, "agreed are 1" in out) == (1, True)
    assert cli("bench", "ep", "--thresholds", str(tmp_path / "none.toml"))[0] == 4
    assert cli("bench", "ep", "--max-vio", "much")[0] == 4


def test_nothing_is_timed_where_a_way_gives_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from moonep_validate.studies import bench_ep

    class OneWrong:
        def __init__(self, *_: object) -> None:
            self.ways = {name: (lambda name=name: torch.full((2, 2), float(name == "dense"))) for name in WAYS}
            self.stages = dict.fromkeys(STAGES, lambda: torch.zeros(1))

        def destroy(self) -> None: ...

    monkeypatch.setattr(bench_ep, "Layer", OneWrong)
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    with pytest.raises(ValueError, match="dense differs from moonep in 4 of 4 elements"):
        bench_ep._measured(Case.parse(bench_ep.BASE), None, 2)  # type: ignore[arg-type]
