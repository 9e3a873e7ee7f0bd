"""What the documents say is true: ids, exit codes, commands, and the support of the text by the code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from moonep_validate.cases.case import Case
from moonep_validate.doors import reference
from moonep_validate.doors.cli.main import app
from moonep_validate.faults import FAULTS
from moonep_validate.judge.checks import CHECKS
from moonep_validate.judge.stages import STAGES
from moonep_validate.judge.verdict import EXIT_CODES

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
CONTRACT = (DOCS / "contract.md").read_text()


def test_every_check_is_explained_and_marked_as_checked() -> None:
    marked = re.findall(r"^\| \*\*(\w+)\*\*([^|]*)\|", CONTRACT, flags=re.MULTILINE)
    told, known = {(id, name.strip()) for id, name in marked}, {(c.id, c.name) for c in CHECKS.values()}
    assert known <= told, (
        f"{sorted(known - told)}: add a row `| **ID** name | promise | ... |` to docs/contract.md"
    )
    assert told <= known, f"{sorted(told - known)} is no check: mend or unmark its row in docs/contract.md"
    assert len(marked) == len(told), "docs/contract.md has a check twice"


def test_every_row_of_the_contract_has_a_source() -> None:
    rows = re.findall(r"^\| (?:\*\*)?([A-Z]\d+)(?:\*\*)?(?: [a-z-]+)? \|(.*)\|$", CONTRACT, flags=re.MULTILINE)
    assert len(rows) > 40
    for id, rest in rows:
        assert len(rest.split("|")[-1].strip()) >= 3, id


@pytest.mark.parametrize("status", [status for status, code in EXIT_CODES.items() if code])
def test_exit_codes_are_documented(status: str) -> None:
    word = status.replace("_", " ")
    code = EXIT_CODES[status]
    assert re.search(rf"\| {code} \| [^|]*{'a check failed' if code == 1 else word.split()[-1]}", README)


def test_case_lines_in_documents_are_cases() -> None:
    for path in DOCUMENTS:
        lines = re.findall(r"gen[AB]\+[\w+:.,@]*\w", path.read_text())
        for line in lines:
            assert str(Case.parse(line)) == line, path
    assert lines or README.count("genB+") > 3


def test_a_score_in_a_document_is_that_of_the_last_whole_run() -> None:
    pages = " ".join(" ".join(path.read_text().split()) for path in [ROOT / "README.md", *DOCS.glob("*.md")])
    (score,) = re.findall(r"^\d+ of \d+ faults killed.*(?=\.$)", (DOCS / "faults.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"\d+ of \d+ faults killed, [^.*]* kill one", pages)) == {score}


def test_every_stage_is_described_as_its_record_says() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \|$", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    owner = {"moonep": "MoonEP", "any": "all"}
    assert rows == [(s.name, owner.get(s.owner, s.owner), s.does) for s in STAGES.values()]


def test_seeded_faults_in_readme_exist() -> None:
    assert set(re.findall(r"--fault ([\w-]+)", README)) <= set(FAULTS)


def commands() -> list[str]:
    """Every ``moonep-validate`` command of the README that names all its arguments."""
    found = re.findall(r"(?:^\$ |^  |`)(moonep-validate [^`\n]*)", README, flags=re.MULTILINE)
    return sorted(
        {command for command in found if "…" not in command and not re.search(r"\b(DIR|FILE)\b", command)}
    )


@pytest.mark.parametrize("command", commands())
def test_readme_commands_run(command: str, cli: Callable[..., tuple[int, str, str]]) -> None:
    arguments = shlex.split(command)[1:]
    if (
        arguments[0] in ("bench", "false-alarms", "mutate", "parity", "races", "run", "search")
        and "--case" not in arguments
    ):
        pytest.skip("runs in tests of its own: test_cli.py, the tox environment validate")
    code, out, err = cli(*arguments)
    assert code == (1 if "--fault" in command else 0), err
    if "--fault" in command:
        assert f"reproduce: {command}" in out


def test_commands_in_documents_have_only_known_options() -> None:
    group = typer.main.get_group(app)
    tried = 0
    for path in DOCUMENTS:
        for line in re.findall(r"^\$ moonep-validate (.*)", path.read_text(), flags=re.MULTILINE):
            name, *arguments = shlex.split(line, comments=True)
            command = group.commands[name]
            command.make_context(name, arguments)  # raises for an option that there is not
            tried += 1
    assert tried > 30


def test_the_reference_is_current() -> None:
    assert (ROOT / reference.PATH).read_text() == reference.page(), (
        f"docs/reference.md is not what the code declares; write it anew: {reference.COMMAND}"
    )


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        text = path.read_text()
        for target in re.findall(r"\]\(([^):]+)\)", text):
            name, _, heading = target.partition("#")
            assert not name or (path.parent / name).exists(), f"{path.name} links to {target}, which is not there"
            titles = [
                re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in re.findall(r"^#+ (.*)", text, re.M)
            ]
            assert not heading or name or heading in titles, f"{path.name} links to {target}, which is no heading"


def test_the_experts_of_the_recipe_pass(tmp_path: Path) -> None:
    """The recipe is followed: its file is written, and its command is run in that folder."""
    text = (DOCS / "recipes.md").read_text().partition("## Experts")[2]
    file, command = re.findall(r"```(?:python|console)\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_kernels.py").write_text(file)
    arguments = shlex.split(command)[2:]
    done = subprocess.run(
        [sys.executable, "-m", "moonep_validate", *arguments, "--shrink-seconds", "0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_names_the_tox_environments() -> None:
    tox = (ROOT / "tox.ini").read_text()
    for name in re.findall(r"tox -e ([\w-]+)", README):
        assert f"[testenv:{name}]" in tox
    gate = (ROOT / ".ci" / "run").read_text()
    assert "tox run -e tests" in gate
    assert "tox run -e validate" in gate


def test_the_site_has_every_document() -> None:
    nav = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(nav) == sorted(path.name for path in DOCS.glob("*.md")), "mkdocs.yml: one line of nav a document"
