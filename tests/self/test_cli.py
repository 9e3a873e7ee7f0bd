"""The command line as a user meets it: what it prints, what it keeps, and its exit code."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.self.test_plan import G1, G3, GOLDEN

Cli = Callable[..., tuple[int, str, str]]
CASE = "genB+R2+E4+K2+S3+H8+I8+hot:0"
ROUTING = {"generation": "B", "S": 3, "K": 2, "E": 4, "R": 2, "B": None, "token_padding": 4, "topk": G1}


def test_run_prints_evidence_table_meaning_and_code(cli: Cli) -> None:
    code, out, err = cli("run", "--case", CASE)
    assert (code, err) == (0, "")
    assert "evidence: reference moonep_validate.reference" in out
    for word in (
        "plan      L1 ",
        "dispatch  A1",
        "prefetch  H4 I6",
        "experts   H2",
        "combine   C1",
        "layer     I16",
    ):
        assert word in out
    assert "proves: the suite's own reference transport and experts keep the contract" in out
    assert "values were compared at load, prepare, plan, dispatch, prefetch, experts, combine, layer\n" in out
    assert "leaves open: nothing outside this project ran" in out
    assert "passed: 1 of 1 cases ran (1 passed)" in out
    assert "exit code 0" in out


def test_a_small_run_has_a_small_table_and_the_whole_one_on_request(cli: Cli) -> None:
    _, out, _ = cli("run", "--case", CASE)
    rows = out[out.index("stage ") : out.index("events seen")].splitlines()
    assert len(rows) <= 11, "a head, one row a stage, one line of idle checks"
    assert rows[-1].startswith("idle, ")
    assert rows[-1].endswith("checks and events: --all-checks names them")
    _, out, _ = cli("run", "--case", CASE, "--all-checks")
    assert "W1 slot-content" in out
    assert "Each used slot holds the weights of" in out
    idle = next(line for line in out.splitlines() if line.startswith("idle, "))
    assert {"R1", "Z1", "V1", "@triple"} <= set(idle.split())


def test_a_check_that_failed_has_a_row_in_a_small_table(cli: Cli) -> None:
    _, out, _ = cli("run", "--case", CASE, "--fault", "slot-not-filled", "--shrink-seconds", "0")
    (row,) = [line for line in out.splitlines() if line.startswith(" ") and "W1 slot-content  " in line]
    assert row.split()[2:4] == ["failed", "0/1"]


def test_a_pass_names_only_stages_at_which_values_were_compared(cli: Cli) -> None:
    code, out, _ = cli("run", "--case", CASE, "--record", "plan")
    assert code == 0
    said = "; values were compared at plan; as far as --record plan reaches, also at prepare, dispatch, "
    assert said in out
    assert "layer" not in next(line for line in out.splitlines() if line.startswith("proves: "))


def test_failing_run_names_stage_place_and_smallest_reproducer(cli: Cli) -> None:
    code, out, _ = cli("run", "--case", "genB+R4+E8+K2+S9+H24+I20+hot:5", "--fault", "slot-not-filled")
    assert code == 1
    assert (
        "failed at stage prefetch (check W1 slot-content: each used slot holds the weights of its expert, step base)"
        in out
    )
    assert "gate weight bits at rank 1, slot 0, expert 5, weight row 0" in out
    assert "proves: " not in out
    smallest = "moonep-validate run --case 'genB+R2+E2+K1+S1+H8+I8+pad1+table:0,0' --fault slot-not-filled"
    assert smallest in out
    again, out, _ = cli("run", "--case", "genB+R2+E2+K1+S1+H8+I8+pad1+table:0,0", "--fault", "slot-not-filled")
    assert again == 1
    assert (
        "failed at stage prefetch (check W1 slot-content: each used slot holds the weights of its expert, step base)"
        in out
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--case", f"{CASE}+@triple"], 10),
        (["--case", CASE, "--fault", "slot-not-filled:rank=7"], 11),
        (["--case", CASE, "--fault", "rank-skips-combine"], 13),
        (["--case", CASE, "--fault", "rank-never-returns", "--deadline", "0.5"], 13),
        (["--case", CASE, "--fault", "rank-raises"], 1),
    ],
)
def test_exit_codes_of_verdicts(cli: Cli, arguments: list[str], code: int) -> None:
    got, out, _ = cli("run", *arguments)
    assert got == code
    assert f"exit code {code}" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--case", "genB+R4+E9+K2+S9"], "E=9 is not divisible by R=4"),
        (["run", "--case", f"{CASE}+K33"], "sets K a second time"),
        (["run", "--profile", "smok"], "unknown profile 'smok'"),
        (["run", "--moonep-module", "no_such_moonep"], "cannot be imported: ModuleNotFoundError"),
        (["run", "--moonep-module", "json"], "has no class Buffer; it offers: JSONDecodeError"),
        (["run", "--api", "B"], "--api, --policy, --relaxed and --destructive go with --moonep-module"),
        (["run", "--moonep-module", "json", "--api", "C"], "--api is 'C'; known: A, B"),
        (["run", "--fault", "slot"], "unknown fault 'slot'"),
        (["run", "--keep", "some"], "--keep is 'some'; known: failed, all, none"),
        (["run", "--deadline", "0"], "--deadline"),
        (["rum"], "No such command 'rum'"),
        (["run", "--casse", CASE], "No such option"),
        (["plan"], "plan needs either --case or --input"),
        (["plan", "--case", CASE, "--format", "int3"], "--format is 'int3'; known: bf16, fp8, mxfp4"),
        (["plan", "--input", "absent.jsonl"], "--input absent.jsonl is not a file"),
        (["check", "absent"], "absent is not a folder"),
        (["bench", "gpu"], "bench is 'gpu'; known: core, worlds"),
    ],
)
def test_usage_errors_are_one_line_with_code_4(cli: Cli, arguments: list[str], message: str) -> None:
    code, out, err = cli(*arguments)
    assert code == 4
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


def test_out_keeps_report_and_traces_and_check_judges_them_again(cli: Cli, tmp_path: Path) -> None:
    code, _, _ = cli("run", "--case", CASE, "--case", f"{CASE}+fill:real", "--out", str(tmp_path), "--keep", "all")
    assert code == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["status"], report["exit_code"], report["planned"], len(report["cases"])) == ("passed", 0, 2, 2)
    first = report["cases"][0]
    assert (first["case"], first["level"], first["parts"]["combine"]["origin"]) == (CASE, "reference", "reference")
    assert {r["check"] for r in first["results"]} >= {"L3", "L4", "X1", "D1", "W1", "P1", "C1", "M1", "F1"}
    assert sorted(p.stem for p in (tmp_path / "traces").iterdir()) == sorted([CASE, f"{CASE}+fill:real"])
    code, out, _ = cli("check", str(tmp_path))
    assert code == 0
    assert "passed: 2 of 2 cases ran (2 passed)" in out
    cli("run", "--case", CASE, "--out", str(tmp_path))
    assert list((tmp_path / "traces").iterdir()) == [], (
        "traces of the earlier run stay beside a report without them"
    )


def test_only_traces_that_did_not_pass_are_kept_by_default(cli: Cli, tmp_path: Path) -> None:
    code, _, _ = cli("run", "--case", CASE, "--case", f"{CASE}+@triple", "--out", str(tmp_path / "a"))
    assert code == 10
    assert [p.stem for p in (tmp_path / "a" / "traces").iterdir()] == [f"{CASE}+@triple"]
    options = ["--fault", "duplicates-dropped", "--out", str(tmp_path / "b"), "--shrink-seconds", "0"]
    code, out, _ = cli("run", "--case", "genB+R2+E4+K4+S3+H8+I8", *options)
    assert code == 1
    assert "smallest failing case" not in out
    code, out, _ = cli("check", str(tmp_path / "b"))
    assert code == 1
    assert "failed at stage combine (check C1 combine-sum" in out
    assert "--fault duplicates-dropped" in out


def test_damaged_trace_folder_is_a_usage_error(cli: Cli, tmp_path: Path) -> None:
    cli("run", "--case", CASE, "--out", str(tmp_path), "--keep", "all")
    path = next((tmp_path / "traces").iterdir())
    path.write_bytes(path.read_bytes()[:-7])
    code, out, err = cli("check", str(tmp_path))
    assert (code, out) == (4, "")
    assert "is damaged or no trace" in err
    path.unlink()
    code, _, err = cli("check", str(tmp_path))
    assert code == 4
    assert "cannot be read: No such file" in err


def test_unwritable_output_folder_is_a_usage_error(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    code, out, err = cli("run", "--case", CASE, "--out", str(tmp_path / "file" / "out"))
    assert (code, out) == (4, "")
    assert "cannot be used: Not a directory" in err


def test_a_passing_case_is_not_shrunk(cli: Cli) -> None:
    code, out, _ = cli("shrink", "--case", CASE)
    assert code == 0
    assert "has no failing check, so there is nothing to shrink" in out


def test_shrink_prints_the_smallest_case(cli: Cli) -> None:
    code, out, _ = cli("shrink", "--case", "genB+R4+E8+K2+S9+fill:real", "--fault", "duplicates-dropped")
    assert code == 1
    assert "no smaller case fails in this way" in out
    assert "genB+R2+E2+K2+S1+H8+I8+pad1+table:" in out


def test_plan_json_is_the_golden_vector(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "routings.jsonl"
    path.write_text(json.dumps(ROUTING) + "\n\n" + json.dumps({**ROUTING, "generation": "A", "B": 1}) + "\n")
    shape = ["--hidden", "64", "--intermediate", "32", "--format", "mxfp4"]
    code, out, _ = cli("plan", "--input", str(path), "--json", *shape)
    assert code == 0
    first, second = (json.loads(line) for line in out.splitlines())
    golden = GOLDEN["G1-B"][2]
    assert first["NvS"] == golden["num_rows"]
    for name in ("dst", "cu_seqlens", "experts_to_copy", "zero_fill_ranges", "remote_stats", "alloc"):
        assert first[name] == golden[name]
    assert second["dst"] == GOLDEN["G1-A-one-slot"][2]["dst"]
    stats: dict[str, Any] = first["stats"]
    assert (stats["slots_used"], stats["slots"], stats["slots_used_per_rank"]) == (1, 4, [0, 1])
    assert (stats["rows"], stats["rows_moved"], stats["padding_rows"]) == (12, 4, 8)
    assert stats["load_imbalance"] == 10 / 6
    assert stats["padding_ratio"] == 8 / 20
    assert stats["capacity_utilisation"] == 12 / 20
    assert stats["prefetch_bytes"] == stats["prefetch_bytes_max_rank"] == 3 * 64 * 32 * 17 // 32
    assert second["stats"]["experts_read_remotely"] == 0
    overflow = {"generation": "A", "S": 2, "K": 2, "E": 8, "R": 4, "B": 1, "token_padding": 2, "topk": G3}
    path.write_text(json.dumps(overflow))
    code, out, _ = cli("plan", "--input", str(path), "--json")
    assert json.loads(out)["stats"]["experts_read_remotely"] == 1


def test_loads_alone_give_the_plan_of_their_routing(cli: Cli, tmp_path: Path) -> None:
    """As a list or as CSV in a row or a column, with the sizes of a case; all but the destinations is the same."""
    golden = GOLDEN["G1-B"][2]
    path = tmp_path / "loads"
    path.write_text(json.dumps({**without("topk"), "loads": [6, 4, 1, 1]}))
    sizes = ["--case", "genB+R2+E4+K2+S3+pad4", "--input", str(path), "--json"]
    answers = [cli("plan", "--input", str(path), "--json")]
    for text in ("[6, 4, 1, 1]", "6,4,1,1", "6; 4; 1; 1", "6\n4\n1\n1\n"):
        path.write_text(text)
        answers.append(cli("plan", *sizes))
    for code, out, _ in answers:
        got = json.loads(out)
        assert (code, "dst" in got) == (0, False)
        for name in ("cu_seqlens", "experts_to_copy", "zero_fill_ranges", "remote_stats", "alloc"):
            assert got[name] == golden[name]
    path.write_text("6\n4\n1\n")
    code, _, err = cli("plan", *sizes)
    assert (code, "E=4 numbers" in err) == (4, True)


def test_standard_input_is_planned_and_rows_of_zeros_are_remarked(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps(ROUTING) + "\n" + json.dumps({**ROUTING, "topk": [[[0, 1], [0, 0], [0, 0]], G1[1]]}) + "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    code, out, err = cli("plan", "--input", "-", "--json")
    assert code == 0
    assert json.loads(out.splitlines()[0])["dst"] == GOLDEN["G1-B"][2]["dst"]
    assert err.splitlines() == [
        "moonep-validate: line 2: 2 of 6 tokens have expert 0 for every k: rows left at zero? MoonEP computes them all"
    ]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe{}")))
    code, _, err = cli("plan", "--input", "-", "--json")
    assert (code, err) == (4, "moonep-validate: -, line 1: is not UTF-8: byte 0xff at 0\n")


def test_plan_table(cli: Cli) -> None:
    code, out, _ = cli("plan", "--case", "genB+R2+E4+K2+S3+pad4+table:0,1,0,2,1,0,0,3,1,0,0,1")
    assert code == 0
    assert "NvS=20 rows" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["0", "10", "6", "0", "-", "1", "2", "8", "of", "20"] in rows
    assert ["1", "2", "6", "4", "0", "0", "6", "12", "of", "20"] in rows
    assert ["1", "2", "0", "4", "0", "12", "slot"] in rows


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in ROUTING.items() if name != key}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ("[1]", "a routing is a JSON object"),
        (
            "3,1,4,1",
            "one JSON object a line is needed, this looks like CSV; loads of experts alone need the sizes",
        ),
        ("{", "one JSON object a line is needed, this looks like one over several lines: try jq -c . FILE"),
        ("topk", "one JSON object a line is needed, this is no JSON"),
        (json.dumps({**ROUTING, "loads": [1]}), "of which topk (ids of each token) or loads"),
        (json.dumps({**without("topk"), "loads": [6, 4, 1, 0]}), "the loads add up to 11, R*S*K = 12 are needed"),
        (json.dumps({**without("topk"), "loads": [6, 4, 2]}), "loads has shape (3,), E=4 numbers"),
        (json.dumps({**without("topk"), "loads": [6, 4, 3, -1]}), "E=4 numbers from 0 on are needed"),
        (json.dumps({**without("topk"), "loads": [6, 4, 1, 1.0]}), "a list of whole numbers, one an expert"),
        (
            json.dumps({**ROUTING, "topk": [G1[0], G1[1][:2]]}),
            "the ranks have 2 to 3 tokens, every rank dispatches S",
        ),
        (json.dumps({**ROUTING, "topk": [[[0, 10**30]] * 3] * 2}), "a number has more than 64 bits"),
        (json.dumps({**ROUTING, "topk": [[[0, True]] * 3] * 2}), "uneven or other content"),
        (json.dumps({**ROUTING, "R": 10**9}), "R=1000000000 ranks: must be 1 to 128"),
        (json.dumps({**ROUTING, "S": 10**400}), "S is a number of 1329 bits, a whole number of 64 bits is needed"),
        ("[" * 10**5, "nested too deep"),
        ('{"S": ' + "9" * 5000 + "}", "one JSON object a line is needed"),
        (json.dumps(without("topk")), "missing keys ['topk']"),
        (json.dumps({**ROUTING, "pad": 3}), "unknown keys ['pad']"),
        (json.dumps({**ROUTING, "S": "3"}), "S is '3', a whole number is needed"),
        (json.dumps({**ROUTING, "E": 5}), "E=5 is not divisible by R=2"),
        (json.dumps({**ROUTING, "K": 33}), "K=33 experts per token: must be 1 to 32"),
        (json.dumps({**ROUTING, "B": 2}), "only generation A takes a slot count"),
        (json.dumps({**ROUTING, "generation": "C"}), "generation 'C' is not A or B"),
        (
            json.dumps({**ROUTING, "S": 2}),
            "topk is not a list of whole numbers [rank][token][k] with sizes (2, 2, 2)",
        ),
        (json.dumps({**ROUTING, "topk": [[1], [2, 3]]}), "uneven or other content"),
        (json.dumps({**ROUTING, "topk": "none"}), "uneven or other content"),
        (json.dumps({**ROUTING, "topk": [[[0, 1]] * 3, [[0, 4]] * 3]}), "expert id 4 at rank 1, token 0, k 1"),
    ],
)
def test_plan_refuses_bad_lines_by_number(cli: Cli, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(ROUTING) + "\n" + line + "\n")
    code, _, err = cli("plan", "--input", str(path), "--json")
    assert code == 4
    assert f"{path}, line 2: " in err
    assert message in err


def test_bench_prints_ratios_and_says_what_it_could_not_run(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from moonep_validate.cases.case import Case
    from moonep_validate.studies import bench

    monkeypatch.setattr(bench, "_LARGE", Case.parse("genB+R4+E16+K4+S4096+pad128+zipf:1.0"))
    monkeypatch.setattr(bench, "_SMALL", Case.parse("genB+R2+E4+K2+S3+H8+I8"))
    monkeypatch.setattr(bench, "_PROCESSES", 1)
    monkeypatch.setattr(bench, "_MANY", 3)
    code, out, _ = cli("bench", "core")
    assert code == 0
    assert "for twice the tokens" in out
    assert "extrapolated linearly" in out
    assert "a minute" in out
    monkeypatch.setattr(bench, "_small_cases", lambda say, case: None)
    code, out, _ = cli("bench", "core", "--naive", str(tmp_path / "absent.py"))
    assert code == 0
    assert "naive loop: not run" in out


def test_ctrl_c_keeps_what_is_known(tmp_path: Path) -> None:
    """A real interrupt of a real process, while the second case waits for a rank that never returns."""
    command = [sys.executable, "-m", "moonep_validate", "run", "--case", "genB+R1+E4+K2+S3+H8", "--case", CASE]
    command += ["--fault", "rank-never-returns", "--deadline", "300", "--out", str(tmp_path)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    report = tmp_path / "report.json"
    end = time.monotonic() + 60
    while time.monotonic() < end and not (report.is_file() and '"not_exercised"' in report.read_text()):
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 2, err
    assert "Traceback" not in err
    assert "interrupted: 1 of 2 cases ran (1 not_exercised)" in out
    data = json.loads(report.read_text())
    assert (data["interrupted"], data["planned"], len(data["cases"])) == (True, 2, 1)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["cases"], 0),
        (["run", "--case", CASE], 0),
        (["run", "--case", CASE, "--fault", "slot-not-filled", "--shrink-seconds", "0"], 1),
    ],
)
def test_a_reader_that_goes_away_changes_no_exit_code(arguments: list[str], code: int, tmp_path: Path) -> None:
    """As ``| head -0`` does; the report is whole all the same."""
    reader, writer = os.pipe()
    os.close(reader)
    more = ["--out", str(tmp_path)] if arguments[0] == "run" else []
    command = [sys.executable, "-m", "moonep_validate", *arguments, *more]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (code, "")
    assert not more or json.loads((tmp_path / "report.json").read_text())["exit_code"] == code


def test_a_full_disk_names_the_file_and_does_not_lose_the_table(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    from moonep_validate.doors.report.files import OutputFolder

    folder = OutputFolder(tmp_path)
    monkeypatch.setattr("moonep_validate.doors.report.files.OutputFolder", lambda path: folder)
    monkeypatch.setattr(OutputFolder, "plan", lambda self, cases, keep: None)
    monkeypatch.setattr(Path, "write_text", full)
    code, out, err = cli("run", "--case", CASE, "--out", str(tmp_path))
    assert code == 4
    assert "passed: 1 of 1 cases ran (1 passed)" in out
    assert err.startswith(
        f"moonep-validate: {tmp_path / 'manifest.json'} cannot be written: No space left on device"
    )
    code, out, _ = cli("run", "--case", f"{CASE}+@triple", "--out", str(tmp_path))
    assert code == 10


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_to_a_full_disk_is_said_and_is_no_success() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "moonep_validate", "cases"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 4
    assert done.stderr == "moonep-validate: standard output cannot be written: No space left on device\n"


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['moonep-validate', '--help']; from moonep_validate.doors.cli.main import main\n"
    )
    code += "try:\n    main()\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(("needed", "code"), [("1", 0), ("2", 1)])
def test_require_cases_asks_for_so_many(cli: Callable[..., tuple[int, str, str]], needed: str, code: int) -> None:
    found, out, _ = cli("run", "--case", "genB+R2+E4+K2+S3+H8+I8", "--require-cases", needed)
    assert found == code
    assert ("--require-cases 2: 1 cases were judged" in out) == bool(code)
    assert f"{'failed' if code else 'passed'}: 1 of 1 cases ran (1 passed)" in out
