"""The pytest plugin in real pytest sessions; its printed text is a contract."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONSUMER = Path(__file__).parents[1] / "component" / "test_component.py"
CASE = "genB+R2+E4+K2+S3+H8+I8+hot:0"


@pytest.fixture
def consumer(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(test_component=CONSUMER.read_text())
    return pytester


def test_one_item_per_case_named_by_the_case(consumer: pytest.Pytester) -> None:
    result = consumer.runpytest_inprocess("-v", "--moonep-profile", "smoke")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(
        [
            "moonep-validate: *, subject reference",
            "*::test_case[[]genB+R4+E8+K2+S9+hot:5+@slot_used] PASSED*",
            "4 cases passed with evidence level: reference",
        ]
    )


def test_a_failure_is_a_diagnosis_with_a_reproducer(consumer: pytest.Pytester) -> None:
    result = consumer.runpytest_inprocess("--moonep-case", CASE, "--moonep-fault", "slot-not-filled")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            f"E * failed at stage prefetch (check W1 slot-content: each used slot holds the weights of its expert, step base): {CASE}",
            "E * gate weight bits at rank 1, slot 0, expert 0, weight row 0, weight column 0: expected *, got *",
            f"reproduce: moonep-validate run --case '{CASE}' --fault slot-not-filled",
        ]
    )


def test_vacuous_fails_and_not_run_skips_with_its_reason(consumer: pytest.Pytester) -> None:
    result = consumer.runpytest_inprocess("--moonep-case", f"{CASE}+@triple")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*the case claims @triple, but that event did not occur"])
    module = ["--moonep-module", "moonep_validate.reference.moonep_b", "-rs"]
    result = consumer.runpytest_inprocess("--moonep-case", CASE, *module)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*not portable to hardware*"])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--moonep-case", "genB+R2", "ERROR: case 'genB+R2' lacks E, K, S*"),
        (
            "--moonep-profile",
            "smok",
            "ERROR: unknown profile 'smok'; known: default, engine, smoke, multigpu, sizes",
        ),
        ("--moonep-fault", "slot", "ERROR: unknown fault 'slot'*"),
        ("--moonep-module", "json", "ERROR: --moonep-module json has no class Buffer*"),
    ],
)
def test_bad_options_are_usage_errors(consumer: pytest.Pytester, option: str, value: str, message: str) -> None:
    result = consumer.runpytest_inprocess(option, value)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


def test_junit_properties_carry_level_and_command(consumer: pytest.Pytester) -> None:
    consumer.runpytest_inprocess("--moonep-case", CASE, "--junitxml=junit.xml")
    xml = (consumer.path / "junit.xml").read_text()
    assert '<property name="moonep_level" value="reference"' in xml
    assert f"moonep-validate run --case '{CASE}'" in xml.replace("&apos;", "'")


def test_plugin_loads_without_torch() -> None:
    code = "import sys, moonep_validate.doors.plugin; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# A session that judged nothing, or was changed, is none that passed.

SKIPPED = ["--moonep-case", CASE, "--moonep-module", "moonep_validate.reference.moonep_b"]
RUNS = ["--moonep-case", CASE]


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (
            SKIPPED,
            5,
            "no case was judged, though --moonep-case, --moonep-module was given; 1 were not run: not portable*",
        ),
        ([*SKIPPED, "-k", "nothing"], 5, "no case was judged, though --moonep-case, --moonep-module was given"),
        ([*RUNS, "--moonep-require-cases", "2"], 1, "--moonep-require-cases 2: 1 cases were judged"),
        (
            [*SKIPPED, "--moonep-require-cases", "1"],
            1,
            "--moonep-require-cases 1: 0 cases were judged; 1 were not*",
        ),
    ],
)
def test_a_session_that_judged_too_little_is_an_error(
    consumer: pytest.Pytester, options: list[str], code: int, says: str
) -> None:
    result = consumer.runpytest_inprocess(*options)
    assert result.ret == code
    result.stdout.fnmatch_lines([says])


@pytest.mark.parametrize(
    ("options", "code"),
    [([*RUNS, "--moonep-require-cases", "2"], 1), (SKIPPED, 5), ([*RUNS, "--moonep-fault", "rank-raises"], 1)],
)
def test_a_conftest_cannot_make_it_a_pass(consumer: pytest.Pytester, options: list[str], code: int) -> None:
    consumer.makeconftest("def pytest_sessionfinish(session):\n    session.exitstatus = 0\n")
    assert consumer.runpytest_inprocess(*options, "--moonep-state", "state.json").ret == code
    assert json.loads((consumer.path / "state.json").read_text())["exit_code"] == code


def test_other_sessions_keep_their_exit_code(consumer: pytest.Pytester) -> None:
    assert consumer.runpytest_inprocess(*RUNS, "--moonep-require-cases", "1").ret == 0
    assert consumer.runpytest_inprocess(*SKIPPED, "--collect-only").ret == 0
    consumer.makepyfile(test_component="def test_own():\n    pass\n")
    assert consumer.runpytest_inprocess().ret == 0
    assert consumer.runpytest_inprocess(*RUNS).ret == 5


@pytest.mark.parametrize(("options", "code"), [(RUNS, 0), (SKIPPED, 5)])
def test_what_workers_of_xdist_judge_counts(consumer: pytest.Pytester, options: list[str], code: int) -> None:
    assert consumer.runpytest_inprocess("-n", "1", *options).ret == code


def test_without_the_plugin_its_fixtures_are_unknown(consumer: pytest.Pytester) -> None:
    result = consumer.runpytest_subprocess("-p", "no:moonep_validate")
    result.assert_outcomes(errors=1)


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_a_conftest_that_patches_the_suite_is_said(consumer: pytest.Pytester, workers: list[str]) -> None:
    consumer.makeconftest(
        "from moonep_validate.judge.verdict import Verdict\n"
        "Verdict.status = property(lambda self: 'passed')\nVerdict.ok = property(lambda self: True)\n"
    )
    result = consumer.runpytest_subprocess(*RUNS, "--moonep-fault", "slot-not-filled", *workers)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["code of this suite was replaced*moonep_validate.judge.verdict.Verdict.status*"])


def test_a_session_that_ends_early_leaves_its_state_incomplete(consumer: pytest.Pytester) -> None:
    state = consumer.path / "state.json"
    consumer.runpytest_inprocess(*RUNS, "--moonep-state", str(state))
    assert json.loads(state.read_text()) == {"schema": 1, "status": "complete", "exit_code": 0, "judged": 1}
    consumer.makepyfile(test_ends="import os\ndef test_end():\n    os._exit(0)\n")
    assert consumer.runpytest_subprocess(*RUNS, "--moonep-state", str(state)).ret == 0
    assert json.loads(state.read_text()) == {"schema": 1, "status": "incomplete", "exit_code": 14, "judged": 0}


def test_without_an_engine_its_cases_are_not_judged_on_the_reference(pytester: pytest.Pytester) -> None:
    for file in ("conftest.py", "test_integration.py"):
        (pytester.path / file).write_text((CONSUMER.parents[1] / "integration" / file).read_text())
    asked = ("--collect-only", "-q")
    without = pytester.runpytest_subprocess(*asked)
    without.stdout.no_fnmatch_line("*::test_case*")
    assert without.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    named = pytester.runpytest_subprocess(*asked, "--moonep-subject", "reference")
    assert named.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    pytester.runpytest_subprocess(*asked, "--moonep-subject", "vllm").stdout.fnmatch_lines(
        ["*::test_case[[]genA*"]
    )
