"""Modules from outside, in processes: good ones pass by the same door, bad ones get one clear finding each."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.judge.verdict import Verdict
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.record import record
from moonep_validate.pipeline.run import run_case
from moonep_validate.subjects.buffer.api import detect_generation
from moonep_validate.worlds import descendants, processes

CASE = Case.parse("genB+R2+E8+K2+S5+pad4+hot:1+@slot_used")
HEAD = """
import os, sys, time
from dataclasses import replace
import torch
from moonep_validate.reference import moonep_{generation}
from moonep_validate.reference.moonep_{generation} import MoonEPCommPlan
__version__ = "9.9"
class Buffer(moonep_{generation}.Buffer):
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all modules, so that a sound pool is used again."""
    return tmp_path_factory.mktemp("modules")


@pytest.fixture
def module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Write a module with a faulty Buffer, and make the job that judges it; workers import each name once."""

    def make(name: str, body: str, generation: str = "b", api: str | None = None) -> Job:
        (folder / f"{name}.py").write_text(HEAD.replace("{generation}", generation) + body)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        return replace(make_job(Options(moonep_module=name, api=api, deadline=8.0)), first_deadline=8.0)

    return make


def judged(job: Job, case: Case = CASE) -> Verdict:
    return run_case(job, case)[1]


GOOD = "    pass\n"
BAD = {
    "raises_on_one_rank": (
        "    def combine(self, *a, **k):\n        if self.rank == 1:\n            raise ValueError('no memory')\n"
        "        return super().combine(*a, **k)\n",
        ("failed", "combine", "F1", "at rank 1: expected return, got ValueError: no memory"),
    ),
    "never_returns": (
        "    def combine(self, *a, **k):\n        while self.rank == 1:\n            time.sleep(0.05)\n"
        "        return super().combine(*a, **k)\n",
        ("hung", "combine", "F1", "at rank 1: expected return, got no return after 8.0 s; it is in"),
    ),
    "skips_collective": (
        "    def combine(self, plan, rows, weights=None, *a, **k):\n        if self.rank == 1:\n"
        "            return rows[:5].clone(), weights[:10].view(5, 2), None\n"
        "        return super().combine(plan, rows, weights, *a, **k)\n",
        ("hung", "combine", "F1", "Deadlock: rank 0 is in combine; rank 1 is in destroy"),
    ),
    "wrong_shape": (
        "    def dispatch(self, *a, **k):\n        r = super().dispatch(*a, **k)\n        return (r[0][:-1], *r[1:])\n",
        ("failed", "dispatch", "O4", "form of dispatch.rows at rank 0"),
    ),
    "wrong_dtype": (
        "    def dispatch(self, *a, **k):\n        r = super().dispatch(*a, **k)\n"
        "        return (*r[:2], r[2].long() if r[2] is not None else None, *r[3:])\n",
        (
            "failed",
            "plan",
            "O1",
            "form of dispatch.cu_seqlens at rank 0: expected int32 [8] on cpu, contiguous, got int64 [8] on cpu",
        ),
    ),
    "plan_not_contiguous": (
        "    def dispatch(self, *a, **k):\n        r = super().dispatch(*a, **k)\n"
        "        return (*r[:3], replace(r[3], dst=r[3].dst.repeat_interleave(2)[::2]))\n",
        (
            "failed",
            "plan",
            "O1",
            "form of dispatch.dst at rank 0: expected int32 [10] on cpu, contiguous, got int32 [10] on cpu, not",
        ),
    ),
    "other_device": (
        "    def dispatch(self, *a, **k):\n        r = super().dispatch(*a, **k)\n        return (r[0].to('meta'), *r[1:])\n",
        ("failed", "dispatch", "F1", "meta tensor"),
    ),
    "returns_too_little": (
        "    def dispatch(self, *a, **k):\n        return super().dispatch(*a, **k)[:2]\n",
        ("failed", "dispatch", "F1", "dispatch returned 2 values, 4 are promised"),
    ),
    "destroy_fails": (
        "    def destroy(self):\n        raise RuntimeError('handle busy')\n",
        (
            "failed",
            "life",
            "F1",
            "close call of step close at rank 0: expected return, got RuntimeError: handle busy",
        ),
    ),
    "changes_inputs": (
        "    def dispatch(self, hidden, *a, **k):\n        r = super().dispatch(hidden, *a, **k)\n"
        "        hidden[0, 0] = 9\n        return r\n",
        (
            "failed",
            "dispatch",
            "U1",
            "what dispatch changed of its inputs at rank 0: expected nothing, got hidden",
        ),
    ),
    "calls_exit": (
        "    def prefetch_weight(self, *a, **k):\n        if self.rank == 1:\n            sys.exit(0)\n"
        "        return super().prefetch_weight(*a, **k)\n",
        ("failed", "prefetch", "F1", "at rank 1: expected return, got SystemExit: 0"),
    ),
    "kills_the_process": (
        "    def prefetch_weight(self, *a, **k):\n        if self.rank == 1:\n            os._exit(3)\n"
        "        return super().prefetch_weight(*a, **k)\n",
        ("failed", "prefetch", "F1", "ProcessEnded: the process ended with exit code 3"),
    ),
    "prints_a_lot": (
        "    def dispatch(self, *a, **k):\n        print('x' * 200000)\n        return super().dispatch(*a, **k)\n",
        None,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_module_gets_one_clear_finding_and_the_next_case_is_unaffected(
    name: str, module: Callable[..., Job]
) -> None:
    body, wanted = BAD[name]
    job = module(f"bad_{name}", body, api="B")  # some of them hide their signature
    verdict = judged(job)
    if wanted is None:
        assert verdict.ok, verdict.diagnosis
        return
    status, stage, check, says = wanted
    assert verdict.first is not None, verdict.diagnosis
    assert (verdict.status, verdict.first.stage, verdict.first.check) == (status, stage, check), verdict.diagnosis
    assert any(says in str(finding) for finding in verdict.first.findings), verdict.diagnosis
    assert f"--moonep-module bad_{name} --api B" in verdict.command
    if name in ("never_returns", "kills_the_process"):  # the two that leave nothing of the pool
        assert judged(module("good_after", GOOD)).ok


@pytest.mark.parametrize("generation", ["a", "b"])
def test_our_modules_pass_by_the_same_door(generation: str) -> None:
    job = make_job(Options(moonep_module=f"moonep_validate.reference.moonep_{generation}"))
    assert job.target.generations == (generation.upper(),)
    scenarios = ("variants", "combine_only", "packed", "grads", "replayed_plan", "life", "refusals")
    for scenario in scenarios:
        case = Case.parse(f"gen{generation.upper()}+R2+E8+K3+S5+pad4+hot:1+{scenario}")
        verdict = judged(job, case)
        assert verdict.ok, verdict.diagnosis
        assert verdict.level == "reference"
        assert verdict.parts["plan"].policy == "upstream"
    assert verdict.parts["dispatch"].package == f"moonep_validate.reference.moonep_{generation}"


GROUPS = Case.parse("genB+R4+E8+K2+S5+pad4+hot:1+groups+@slot_used")


def test_a_module_is_given_groups_of_ranks_in_any_order(module: Callable[..., Job]) -> None:
    assert judged(module("good_in_groups", GOOD), GROUPS).ok
    sorts_ranks = (
        "    def __init__(self, S, H, K, E, num_ep_ranks, *a, group=None, **k):\n"
        "        from moonep_validate.faults.kept import _Numbered\n"
        "        from moonep_validate.worlds.dist import as_comm\n"
        "        comm = as_comm(group)\n"
        "        world = comm.exchange('ranks', torch.distributed.get_rank())\n"
        "        order = sorted(range(comm.size), key=world.__getitem__)\n"
        "        comm = _Numbered(comm, order.index(comm.rank), order)\n"
        "        super().__init__(S, H, K, E, num_ep_ranks, *a, group=comm, **k)\n"
    )
    verdict = judged(module("bad_in_groups", sorts_ranks, api="B"), GROUPS)
    assert verdict.first is not None
    got = (verdict.status, verdict.first.stage, verdict.first.check, verdict.first.step)
    assert got == ("failed", "plan", "L4", "turned_0"), verdict.diagnosis


def test_both_worlds_record_the_same_bytes() -> None:
    """The reference in threads and its stand-in in processes: one transport, two worlds."""
    in_processes = record(make_job(Options(moonep_module="moonep_validate.reference.moonep_b")), CASE)
    assert in_processes.digest() == record(Job(), CASE).digest()


def test_faults_reach_the_workers() -> None:
    job = replace(
        make_job(Options(moonep_module="moonep_validate.reference.moonep_b", fault=("slot-not-filled:rank=0",)))
    )
    case = Case.parse("genB+R2+E8+K2+S5+pad4+hot:5")
    verdict = judged(job, case)
    assert verdict.first is not None
    assert (verdict.first.stage, verdict.first.check) == ("prefetch", "W1")
    assert "--moonep-module moonep_validate.reference.moonep_b --fault slot-not-filled:rank=0" in verdict.command


def test_an_outside_module_is_legal_unless_told_otherwise_and_a_subclass_of_ours_is_ours(
    module: Callable[..., Job],
) -> None:
    job = module("some_moonep", GOOD)
    part = job.subject.parts["plan"]
    assert (part.origin, part.policy, part.package, part.version) == ("stand-in", "legal", "some_moonep", "9.9")
    assert part.file.endswith("some_moonep.py")
    verdict = judged(job)
    assert verdict.ok
    assert verdict.level == "stand-in"
    assert "it inherits from moonep_validate.reference.moonep_b.Buffer" in verdict.parts["plan"].doubts
    by_stage = {r.stage: r.level for r in verdict.results}
    assert (by_stage["plan"], by_stage["combine"], by_stage["experts"]) == ("stand-in", "stand-in", "reference")
    assert not next(r for r in verdict.results if r.check == "X1").gates
    upstream = make_job(Options(moonep_module="some_moonep", policy="upstream"))
    assert next(r for r in judged(upstream).results if r.check == "X1").gates
    assert "--policy upstream" in upstream.reproducer
    assert json.loads(json.dumps(job.to_json()))
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise ImportError('libcuda.so not found')\n", "cannot be imported: ImportError: libcuda.so not found"),
        ("import sys\nsys.exit(7)\n", "importing it ended the process with code 7"),
        ("class Bufer:\n    pass\n", "has no class Buffer; it offers: Bufer"),
        ("Buffer = 3\n", "has no class Buffer; it offers: Buffer"),
        (
            "class Buffer:\n    def __init__(self, **k): pass\n",
            "do not tell the generation; give --api A or --api B",
        ),
    ],
)
def test_modules_that_cannot_be_judged_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    (tmp_path / "unusable.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CaseError) as error:
        make_job(Options(moonep_module="unusable"))
    assert message in str(error.value)


def test_a_helper_that_a_module_starts_at_import_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds every pipe that it inherits, and would never end."""
    daemon = "subprocess.Popen(['setsid', 'sleep', '1004'], close_fds=False)"
    text = HEAD.replace("{generation}", "b") + f"    pass\nimport subprocess\nHELPER = {daemon}.pid\n"
    text += (
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(HELPER))\nprint('moonep-validate: a line of its own')\n"
    )
    (tmp_path / "has_helper.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("moonep_validate.subjects.ask.SECONDS", 600)
    job = make_job(Options(moonep_module="has_helper"))
    assert job.target.generations == ("B",)
    assert not descendants.lives(int((tmp_path / "pid").read_text()))


def test_a_module_in_the_current_folder_is_found_and_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it are a changed copy of this package and a module of Python's own name."""
    (tmp_path / "moonep_here.py").write_text(HEAD.replace("{generation}", "b") + GOOD)
    (tmp_path / "moonep_validate").mkdir()
    (tmp_path / "moonep_validate" / "__init__.py").write_text("raise SystemExit('the changed copy ran')\n")
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong random')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    verdict = judged(make_job(Options(moonep_module="moonep_here")))
    assert verdict.ok, verdict.diagnosis
    assert verdict.parts["plan"].file == str(tmp_path / "moonep_here.py")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "os.write(int(sys.argv[-1]), b'[1]\\n')",
            "--moonep-module answers: it answers b'[1]\\n', which is no JSON object",
        ),
        ("os.write(int(sys.argv[-1]), b'{\"generation\": 3}\\n')", "it runs moonep_validate ? of ?"),
        ("os.close(int(sys.argv[-1])); os._exit(5)", "importing it ended the process with code 5"),
    ],
)
def test_a_module_that_answers_in_our_place_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, says: str
) -> None:
    (tmp_path / "answers.py").write_text(f"import os, sys\n{line}\nos._exit(0)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(CaseError, match=re.escape(says)):
        make_job(Options(moonep_module="answers"))


def test_generation_is_read_from_signatures() -> None:
    class A:
        def __init__(self, S: int, B: int = 1) -> None: ...

    class Mixed(A):
        def prefetch_weight(self, *, local_gate_weight: object) -> None: ...

    class Hidden:
        def __init__(self, **options: object) -> None: ...

    assert detect_generation(A) == "A"
    assert detect_generation(Hidden, "B") == "B"
    with pytest.raises(CaseError, match="mixes both generations"):
        detect_generation(Mixed)
    with pytest.raises(CaseError, match="--api B, but the signatures"):
        detect_generation(A, "B")


def test_a_worker_that_does_not_start_is_an_error_at_once() -> None:
    with pytest.raises(RuntimeError, match=r"the worker of rank 0 did not start: .*No module named 'encodings'"):
        processes.Pool(1, {"PYTHONWARNINGS": "error", "PYTHONHOME": "no_such_interpreter_option"})
