"""The table of options: each is declared once and reaches both doors, and what goes together is said at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from moonep_validate.cases.case import CaseError, Spec
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.kinds import kind_name, kind_of, refuse
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import DECLARED, Options, read, spelled, spelled_in_pytest
from moonep_validate.pipeline.target import Engine, Module, from_json, to_json
from moonep_validate.trace.trace import Part

Cli = Callable[..., tuple[int, str, str]]
CASE = "genB+R2+E4+K2+S3+H8+I8+hot:0"
PART = Part("real", "some", "1.0", seams=("a seam",))


def test_every_option_reaches_the_command_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = cli("run", "--help")
    for name in DECLARED:
        assert f"{spelled(name)} " in out, name
    assert "--sglang-path" not in out, "an old name is offered, but not shown"


def test_every_option_reaches_pytest(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfig()  # of a session that was given none, unlike this one maybe
    for name, (one, declared) in DECLARED.items():
        found = config.getoption(spelled_in_pytest(name))
        assert found in (None, [], False, one.default), name
        if declared.old:
            assert config.getoption(spelled_in_pytest(declared.old)) is None


def test_names_on_both_doors() -> None:
    assert (spelled("moonep_module"), spelled_in_pytest("moonep_module")) == ("--moonep-module", "--moonep-module")
    assert (spelled("engine_path"), spelled_in_pytest("engine_path")) == ("--engine-path", "--moonep-engine-path")


def test_what_a_parser_found_becomes_options() -> None:
    said: list[str] = []
    got = read({"fault": ["a", "b"], "case": [], "deadline": 2.0, "world": None, "seconds": 9}, said.append)
    assert got == Options(fault=("a", "b"), deadline=2.0)
    assert (got.given, said) == (("fault", "deadline"), [])


def test_an_old_name_works_and_says_so() -> None:
    said: list[str] = []
    got = read({"engine_path": None, "sglang_path": "there"}, said.append, spelled_in_pytest)
    assert got == Options(engine_path="there")
    assert said == [
        "--moonep-sglang-path is now --moonep-engine-path; the old name goes with the next version",
    ]
    with pytest.raises(CaseError, match="--sglang-path is the old name of --engine-path; give one of them"):
        read({"engine_path": "here", "sglang_path": "there"}, said.append)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world": "mars"}, "--world is 'mars'; known: threads, processes"),
        ({"policy": "mine"}, "--policy is 'mine'; known: upstream, legal"),
        ({"deadline": 0.0}, "--deadline is 0.0; it must be at least 0.1"),
        ({"ranks": 0}, "--ranks is 0; it must be at least 1"),
    ],
)
def test_values_that_an_option_does_not_know(options: dict[str, object], message: str) -> None:
    with pytest.raises(CaseError, match=message):
        Options(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(policy="legal"), "--api, --policy, --relaxed and --destructive go with --moonep-module"),
        (Options(waivers="none"), "--engine-path and --waivers go with an engine"),
        (Options(moonep_module="m", engine_path="p"), "--engine-path and --waivers go with an engine"),
        (Options(subject="vllm", record="plan"), "--record goes with a Buffer; an engine's cases are small"),
        (Options(subject="vllm", experts="torch"), "go without --subject; an engine takes the moonep that"),
        (Options(subject="vllm", world="threads"), r"--world threads: code from outside \(vllm\) runs in proc"),
        (Options(world="threads", device="cuda"), "on cuda each rank is a process with a GPU of its own"),
    ],
)
def test_options_that_do_not_go_together(options: Options, message: str) -> None:
    with pytest.raises(CaseError, match=message):
        refuse(options)


def test_the_kind_of_target_is_known_before_anything_is_imported() -> None:
    kinds = {kind_name(o): kind_of(o) for o in (Options(), Options(moonep_module="m"), Options(subject="vllm"))}
    assert {name: (kind.profile, kind.world) for name, kind in kinds.items()} == {
        "reference": ("default", "threads"),
        "module": ("default", "processes"),
        "engine": ("engine", "processes"),
    }
    code = "import sys, moonep_validate.pipeline.kinds; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


JOBS = {
    "--world processes --device cuda --record plan --fault slot-not-filled:rank=1": Job(
        world="processes", device="cuda", recording="plan", faults=(Spec("slot-not-filled", ("rank=1",)),)
    ),
    "--moonep-module m --api A --policy legal --relaxed --destructive --experts e": Job(
        Module("m", "A", PART, api="A", policy="legal", relaxed=True, destructive=True),
        world="processes",
        experts="e",
        experts_part=PART,
    ),
    "--subject vllm --engine-path p --waivers none": Job(
        Engine("vllm", ("A",), "p", PART, replace(PART, version="2")), waivers="", not_run="no GPU"
    ),
    "": Job(world="threads"),
}


@pytest.mark.parametrize("text", JOBS)
def test_a_job_says_its_options_and_travels(text: str) -> None:
    job = JOBS[text]
    assert job.reproducer == text
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_a_job_of_another_version_is_refused() -> None:
    data = Job().to_json()
    with pytest.raises(CaseError, match=r"a job has \['deadline', .*\], got \['deadline'"):
        Job.from_json({**data, "keep": "full"})
    with pytest.raises(CaseError, match="a target of kind 'mars'; known: reference, module, engine"):
        from_json({"kind": "mars"})
    target = to_json(Module("m", "A", PART))
    del target["relaxed"]
    with pytest.raises(CaseError, match=r"a target of kind module has .*'relaxed'"):
        from_json(target)


def test_made_of_defaults() -> None:
    assert make_job() == Job()
    assert make_job(Options(device="cuda")).world == "processes"


def test_a_command_says_an_old_name_on_stderr(cli: Cli) -> None:
    code, out, err = cli("run", "--case", CASE, "--sglang-path", "somewhere")
    assert (code, out) == (4, "")
    note, refused = err.splitlines()
    assert note == "moonep-validate: --sglang-path is now --engine-path; the old name goes with the next version"
    assert "--engine-path and --waivers go with an engine" in refused


def test_pytest_says_an_old_name_on_stderr(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("--moonep-sglang-path", "somewhere")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*--moonep-sglang-path is now --moonep-engine-path*", "ERROR: --engine-path and --waivers go with an*"]
    )
