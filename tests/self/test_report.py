"""Pages of earlier runs, several side by side; whether a result was edited; what the environment says and hides."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonep_validate.doors.report import environment
from moonep_validate.doors.report.files import sealed

Cli = Callable[..., tuple[int, str, str]]
CASE = "genB+R2+E4+K2+S3+H8+I8+hot:0"


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a gate with traces, of one run that fails."""
    from unittest.mock import patch

    from moonep_validate.doors.cli.main import main

    out = tmp_path_factory.mktemp("gate") / "first"
    arguments = ["gate", "--profile", "smoke", "--keep", "all", "--shrink-seconds", "0", "--out", str(out)]
    faulty = ["moonep-validate", *arguments, "--fault", "slot-not-filled:rank=all"]
    with patch.object(sys, "argv", faulty), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    return out


@pytest.fixture
def copy(gated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(gated, tmp_path / "copy"))


def test_a_page_of_an_earlier_run(cli: Cli, tmp_path: Path) -> None:
    assert cli("run", "--case", CASE, "--out", str(tmp_path / "run"))[0] == 0
    code, out, err = cli("report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html"))
    assert (code, out.split()[0], err) == (0, "wrote", "")
    text = (tmp_path / "page.html").read_text()
    assert CASE in text
    assert '<h2 id="manifest">' in text
    code, _, err = cli("report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html"))
    assert (code, err) == (0, ""), "a page of ours is replaced"


def test_runs_side_by_side_have_the_folder_in_their_name(cli: Cli, gated: Path, tmp_path: Path) -> None:
    assert cli("run", "--profile", "smoke", "--out", str(tmp_path / "second"), "--shrink-seconds", "0")[0] == 0
    code, _, _ = cli("report", str(gated), str(tmp_path / "second"), "--out", str(tmp_path / "page.html"))
    assert code == 0
    text = (tmp_path / "page.html").read_text()
    assert "<th>first</th><th>second</th>" in text
    assert '<h2 id="differ">' in text
    differing = text[text.index('<h2 id="differ">') : text.index('<h2 id="plans">')]
    assert differing.count("<code>gen") == 4
    assert re.search(r'bad">failed</span></td><td><span class="s good">passed', differing)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "absent cannot be read: No such file"),
        (["{gate}", "{gate}"], "is given twice"),
        (["{gate}", "--out", "{gate}/report.json"], "report.json is no page of ours, and stays"),
        (["{gate}", "--out", "absent/page.html"], "absent/page.html cannot be written: No such file"),
        ([], "Missing argument"),
    ],
)
def test_wrong_usage_is_one_line(cli: Cli, gated: Path, arguments: list[str], message: str) -> None:
    code, _, err = cli("report", *(one.format(gate=gated) for one in arguments))
    assert code == 4
    assert message in err
    assert len(err.splitlines()) == 1


def test_what_was_not_edited_is_verified(cli: Cli, gated: Path) -> None:
    code, out, _ = cli("report", "--verify", str(gated))
    assert code == 0
    assert "report.json is as it was written: failed, 4 cases" in out
    assert "the manifest and 4 traces have their seals" in out


def edited(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def resealed(file: Path, old: str, new: str) -> None:
    """An edit by somebody who knows how a report ends."""
    body = file.read_text().rpartition(',\n"digest"')[0]
    assert old in body
    file.write_bytes(sealed(body.replace(old, new) + "}"))


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("report.json", lambda f: edited(f, '"failed"', '"passed"'), "does not match its digest: it was changed"),
        ("report.json", lambda f: edited(f, "slot-not-filled", "slot-was-filled"), "does not match its digest"),
        ("report.json", lambda f: f.write_text(f.read_text().rpartition(",\n")[0] + "}"), "has no digest"),
        ("reference/report.json", lambda f: edited(f, '"failed"', '"passed"'), "is not the file that"),
        ("reference/report.json", lambda f: resealed(f, '"failed"', '"passed"'), "is not the file that"),
        ("reference/report.json", lambda f: f.unlink(), "cannot be read"),
        ("reference/manifest.json", lambda f: edited(f, '"failed"', '"passed"'), "is not the file that"),
        ("reference/traces", lambda f: next(f.iterdir()).unlink(), "cannot be read"),
        ("reference/traces", lambda f: shutil.copy(next(f.iterdir()), f / "more.safetensors"), "is not in"),
    ],
)
def test_an_edit_is_noticed(cli: Cli, copy: Path, name: str, edit: Any, message: str) -> None:
    edit(copy / name)
    code, _, err = cli("report", "--verify", str(copy))
    assert code == 4, err
    assert message in err
    assert len(err.splitlines()) == 1


def test_an_edit_of_a_run_alone_is_noticed_by_its_manifest(cli: Cli, copy: Path) -> None:
    resealed(copy / "reference" / "report.json", '"status": "failed", "level"', '"status": "passed", "level"')
    code, _, err = cli("report", "--verify", str(copy / "reference"))
    assert code == 4
    assert "is passed here, and failed in manifest.json" in err


def test_an_interrupted_run_has_no_digest(cli: Cli, tmp_path: Path) -> None:
    from moonep_validate.doors.report.files import OutputFolder

    OutputFolder(tmp_path)
    code, _, err = cli("report", "--verify", str(tmp_path))
    assert code == 4
    assert "has no digest: it is of a run that did not end" in err


SECRETS = (
    "hf_abcdefghijklmnop",
    "ghp_abcdefghijklmnop1234",
    "sk-abcdefghijklmnop",
    "AKIAABCDEFGHIJKLMNOP",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc",
    "0123456789abcdef0123456789abcdef",
    "-----BEGIN PRIVATE KEY-----MIIE",
)


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_are_hidden_by_shape(secret: str) -> None:
    assert environment.public(f"x={secret}") == f"x={environment.HIDDEN}" or secret not in environment.public(
        secret
    )
    assert secret not in environment.command(["run", f"--case={secret}", secret])
    assert secret not in environment.variables({"VLLM_SOMETHING": secret})["VLLM_SOMETHING"]


def test_secrets_are_hidden_by_name_and_the_rest_is_shown() -> None:
    given = {
        "VLLM_API_KEY": "short",
        "NCCL_AUTH": "short",
        "SGLANG_TOKEN_X": "short",
        "NCCL_DEBUG": "INFO",
        "VLLM_KEYWORD": "shown",
        "HOME": "/home/somebody",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PYTHONPATH": "/a/b/0123456789abcdef0123456789abcdef/c",
        "VLLM_PROXY": "http://me:pass@host/x",
    }
    assert environment.variables(given) == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_AUTH": "(hidden)",
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/a/b/0123456789abcdef0123456789abcdef/c",
        "SGLANG_TOKEN_X": "(hidden)",
        "VLLM_API_KEY": "(hidden)",
        "VLLM_KEYWORD": "shown",
        "VLLM_PROXY": "http://(hidden)host/x",
    }
    said = environment.command(["run", "--api-key", "abc", "--token=def", "--api", "B", "--case", CASE])
    assert said == f"run --api-key '(hidden)' '--token=(hidden)' --api B --case {CASE}"
    long = "genA+R2+E8+K2+S128+pad128+tokens:37,5+fill:real+hot:0+@slot_used"
    assert long in environment.command(["run", "--case", long]), "a case line is no secret"


def test_the_environment_says_what_ran(gated: Path) -> None:
    found = json.loads((gated / "report.json").read_text())["environment"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["time"])
    assert found["torch"]["version"] in found["packages"]["torch"]
    assert "moonep_validate 0.1.0" in found["suite"]
    assert "--fault slot-not-filled:rank=all" in found["command"]
    assert found["machine"]["cores"].isdigit()


def test_a_tool_that_is_missing_fails_or_hangs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_TIMEOUT", 0.2)
    assert environment._output("no-such-tool") == []
    assert environment._output(sys.executable, "-c", "raise SystemExit(3)") == []
    assert environment._output(sys.executable, "-c", "import time; time.sleep(9)") == []


def test_a_plan_is_a_page(cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    code, out, _ = cli("plan", "--case", "genB+R4+E16+K4+S17+hot:0", "--html", str(page))
    assert (code, out.strip()) == (0, f"wrote {page}")
    text = page.read_text()
    assert text.count("<rect") == 8, "two bars a rank"
    _, said, _ = cli("plan", "--case", "genB+R4+E16+K4+S17+hot:0", "--json")
    moved = json.loads(said)["stats"]["rows_moved"] if "stats" in json.loads(said) else None
    assert moved is None or f'<td class="n">{moved}</td>' in text
    assert "http" not in text
    (tmp_path / "mine.html").write_text("mine")
    code, _, err = cli("plan", "--case", CASE, "--html", str(tmp_path / "mine.html"))
    assert (code, (tmp_path / "mine.html").read_text()) == (4, "mine")
    assert "is no page of ours, and stays" in err
    code, _, err = cli("plan", "--case", CASE, "--html", str(page), "--json")
    assert (code, "--json and --html: give one of them" in err) == (4, True)


def test_a_page_of_plans_needs_no_torch(tmp_path: Path) -> None:
    line = {
        "generation": "B",
        "S": 3,
        "K": 2,
        "E": 4,
        "R": 2,
        "B": None,
        "token_padding": 4,
        "loads": [6, 2, 2, 2],
    }
    (tmp_path / "in.jsonl").write_text((json.dumps(line) + "\n") * 2)
    script = (
        "import sys; sys.argv = ['moonep-validate', 'plan', '--input', 'in.jsonl', '--html', 'out.html']\n"
        "from moonep_validate.doors.cli.main import main\n"
        "try: main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0 False"
    assert (tmp_path / "out.html").read_text().count("<circle") == 5, "equal routings are one dot a figure"
