"""The script for people without this suite: short, alone, right on a right module, and it names what is wrong."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moonep_validate.cases.case import Case, CaseError, Spec
from moonep_validate.data.routing import topk_ids
from moonep_validate.doors.repro import MAX_LINES, MAX_ROUTES, PASSES, standalone
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.run import run_case

#: Uses slots, padding, duplicates and padding tokens; real hardware would accept it.
CASES = {
    "A": Case.parse("genA+R2+E6+K3+S6+slots2+pad4+tokens:6,4+hot_rank:0+variants+@slot_used+@duplicate+@padding"),
    "B": Case.parse("genB+R2+E6+K3+S6+pad4+tokens:6,4+hot_rank:0+variants+@slot_used+@duplicate+@padding"),
}

FAULTS = {
    "row": """
    def dispatch(self, *args, **kwargs):
        out = super().dispatch(*args, **kwargs)
        if self.rank == 1:
            out[0][0, 5] += 1
        return out
""",
    "slot": """
    def prefetch_weight(self, *args, **kwargs):
        return None
""",
    "duplicates": """
    def combine(self, plan, *args, **kwargs):
        return super().combine(replace(plan, dup_counts=plan.dup_counts * 0), *args, **kwargs)
""",
}


def _reference(generation: str) -> str:
    return f"moonep_validate.reference.moonep_{generation.lower()}"


def _environment(folder: Path) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    known = {"PYTHONPATH": os.pathsep.join([root, str(folder)]), "MOONEP_REPRO_CPU": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **known}


def _imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def _start(command: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env={**_environment(folder), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _start_faulty(folder: Path, fault: str, case: Case) -> list[subprocess.Popen[str]]:
    """The ranks of a script for a module with one fault, without torchrun so that none is ended by it."""
    package = folder / "faulty_moonep"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from dataclasses import replace\n"
        f"from {_reference(case.generation)} import Buffer as Right\n\n"
        f"class Buffer(Right):{FAULTS[fault]}"
    )
    script = folder / "script.py"
    script.write_text(standalone(case, "faulty_moonep"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(case.R)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(case.R)]
    return [_start([sys.executable, str(script)], folder, **world, **rank) for rank in ranks]


def _finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.parametrize("scenario", PASSES)
@pytest.mark.parametrize(
    "size", ["R2+E4+K3+S6", "R3+E6+K2+S5+H24", "R32+E128+K8+S16", "R1+E4+K1+S2", "R2+E4+K32+S64"]
)
@pytest.mark.parametrize("generation", ["A", "B"])
def test_the_script_is_short_and_alone(generation: str, size: str, scenario: str) -> None:
    case = Case.parse(f"gen{generation}+{size}+{scenario}")
    text = standalone(case, "some.moonep")
    assert len(text.splitlines()) <= MAX_LINES
    tree = ast.parse(text)
    assert _imported(tree) == {"os", "sys", "torch", "torch.distributed", "some.moonep"}
    assert f"# Case: {case}\n" in text
    assert f"torchrun --nproc-per-node {case.R} " in text


def test_the_script_embeds_the_case() -> None:
    case = CASES["A"]
    literals = {
        target.id: ast.literal_eval(node.value)
        for node in ast.parse(standalone(case, "moonep")).body
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name) and target.id.isupper()
    }
    assert literals["TOPK"] == [topk_ids(case, rank).tolist() for rank in range(case.R)]
    assert literals["TOKENS"] == [6, 4]
    assert literals["SCALES"] == [1.0]
    assert "R, E, K, S, PAD, H, NVS = 2, 6, 3, 6, 4, 128, 36 " in standalone(case, "moonep")


def test_the_script_says_where_it_differs_from_the_case() -> None:
    text = standalone(Case.parse("genB+R3+E6+K2+S5+H24"), "moonep")
    assert "rounded up from 24 to 128" in text
    assert "R is odd" in text
    assert "Note:" not in standalone(CASES["B"], "moonep")


@pytest.mark.parametrize(
    ("line", "module", "why"),
    [
        ("genB+R2+E4+K1+S4+grads", "moonep", "scenario grads .* supported: base, variants, combine_only"),
        (f"genB+R2+E4+K2+S{MAX_ROUTES // 4 + 1}", "moonep", "4100 routes, and a script holds at most 4096"),
        ("genB+R2+E4098+K1+S4", "moonep", "E=4098: .* at most 4096 experts"),
        ("genB+R2+E4+K1+S4", "moonep; print()", "is not the name of a Python module"),
        ("genB+R2+E4+K1+S4", "my.class", "is not the name of a Python module"),
    ],
)
def test_what_no_script_can_say_is_refused(line: str, module: str, why: str) -> None:
    with pytest.raises(CaseError, match=why):
        standalone(Case.parse(line), module)


@pytest.mark.parametrize("generation", ["A", "B"])
def test_the_cases_use_slots_duplicates_and_padding(generation: str) -> None:
    assert run_case(Job(), CASES[generation].but(scenario=Spec("base")))[1].status == "passed"


def test_torchrun_finds_the_reference_right(tmp_path: Path) -> None:
    runs = []
    for generation, case in CASES.items():
        script = tmp_path / f"{generation}.py"
        script.write_text(standalone(case, _reference(generation)))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        runs.append(_start([*torchrun, str(script)], tmp_path))
    for code, output, errors in _finish(runs):
        assert output == "OK\n", errors
        assert code == 0


def test_faults_are_named_by_rank_and_place(tmp_path: Path) -> None:
    """And every rank exits with 1, also those that found nothing."""
    base, combine = {"scenario": Spec("base")}, {"scenario": Spec("combine_only"), "fill": Spec("ulp")}
    started = [
        *_start_faulty(tmp_path / "row", "row", CASES["B"].but(**base)),
        *_start_faulty(tmp_path / "slot", "slot", CASES["A"].but(**base)),
        *_start_faulty(tmp_path / "duplicates", "duplicates", CASES["B"].but(**combine)),
    ]
    results = _finish(started)
    assert [code for code, _, _ in results] == [1] * 6, results
    row, slot, duplicates = (
        results[0][1] + results[1][1],
        results[2][1] + results[3][1],
        results[4][1] + results[5][1],
    )
    assert re.fullmatch(
        r"rank 1: WRONG hidden at row 0 \(token \d of rank \d, k \d\), pass plain: "
        r"expected (\d+)\.0, got (\d+)\.0 \(element 5; 1 differ\)\n",
        row,
    )
    assert re.match(
        r"rank 1: WRONG weights at slot 0 \(expert \d\), pass plain: expected \d\.0, got 250\.0 ", slot
    )
    assert re.match(r"rank \d: WRONG combined row at token \d, pass plain: expected ", duplicates)
    assert all("WRONG weights" in line for line in slot.splitlines())
    assert all("WRONG combined row" in line for line in duplicates.splitlines())
