"""``history``: what went red between revisions, told without a change to the repository that is asked."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from moonep_validate.cases.case import CaseError
from moonep_validate.doors.cli import history as command
from moonep_validate.subjects.engines.path import holder
from moonep_validate.tools.history import Seen, bisect, changes
from moonep_validate.tools.revisions import Revision, scratch
from moonep_validate.worlds import processes

Cli = Callable[..., tuple[int, str, str]]
ENGINES = Path(__file__).with_name("engines")
GOOD = "fake_engine:Good"
CASE = "genA+R2+E8+K2+S16+pad4+hot:5"
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed here")


def git(folder: Path, *arguments: str) -> str:
    settings = ("user.name=some", "user.email=some@example.org", "commit.gpgsign=false")
    options = [part for one in settings for part in ("-c", one)]
    done = subprocess.run(
        ["git", *options, "-C", str(folder), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five revisions of a small engine: before it, good, broken, still broken, mended; and work not committed."""
    folder = tmp_path_factory.mktemp("repo")
    file, text = folder / "python" / "fake_engine.py", (ENGINES / "fake_engine.py").read_text()
    broken = text.replace("return y * weight\n", "return y * weight * weight\n")
    assert broken != text
    git(folder, "init", "--quiet", "--initial-branch", "main")
    file.parent.mkdir()
    for title, content in {
        "empty": "",
        "good": text,
        "weights twice": broken,
        "a comment": broken + "# some\n",
        "mended": text,
    }.items():
        (folder / "README").write_text(title)
        if content:
            file.write_text(content)
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", title)
    hooks = folder / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    (hooks / "post-checkout").write_text(f"#!/bin/sh\ntouch {folder}/hook-ran\n")
    (hooks / "post-checkout").chmod(0o755)
    file.write_text("raise SystemExit('what is not committed')\n")
    return folder


@pytest.fixture
def _engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(ENGINES))
    yield
    processes.close_pools()


def state(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its time and bytes, those of git among them."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_repository_is_not_touched_and_a_worktree_has_the_revision(repo: Path) -> None:
    before = state(repo)
    with scratch(repo) as place:
        for revision in place.revisions(["main~3", "HEAD~2..main"]):
            with place.laid_out(revision) as tree:
                text = (tree / "README").read_text()
                assert text == revision.title
                (tree / "README").write_text("what an engine writes there")
            assert not tree.exists()
    assert state(repo) == before


def test_revisions_are_named_as_git_names_them(repo: Path) -> None:
    with scratch(repo) as place:
        titles = [one.title for one in place.revisions(["main", "main~4..main", "main"])]
        assert titles == ["mended", "good", "weights twice", "a comment"]
        with pytest.raises(CaseError, match="none is no revision of"):
            place.revisions(["none"])
        with pytest.raises(CaseError, match="--help is no revision of"):
            place.revisions(["--help"])
        good, bad = place.revisions(["main~3", "main~1"])
        assert [one.title for one in place.between(good, bad)] == ["weights twice", "a comment"]
        with pytest.raises(CaseError, match="is no ancestor of"):
            place.between(bad, good)


def test_what_is_no_repository_is_said(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="there is no such folder"), scratch(tmp_path / "none"):
        pass
    with pytest.raises(CaseError, match="is no git repository"), scratch(tmp_path):
        pass


def test_the_folder_that_holds_the_package_is_found(tmp_path: Path) -> None:
    (tmp_path / "python").mkdir()
    assert holder(tmp_path, "some") is None
    (tmp_path / "python" / "some.py").touch()
    assert holder(tmp_path, "some") == tmp_path / "python"
    (tmp_path / "some.py").touch()
    assert holder(tmp_path, "some") == tmp_path


# What follows from the answers.


def seen(number: int, status: str, **checks: str) -> Seen:
    return Seen(Revision(f"{number:040}", f"revision {number}"), status, checks, "some")


def test_changes_are_between_revisions_that_were_judged() -> None:
    told = changes(
        [
            seen(0, "passed", M1="passed", P1="passed"),
            seen(1, "not_run"),
            seen(2, "failed", M1="failed", P1="passed"),
            seen(3, "failed", M1="failed", P1="passed"),
            seen(4, "passed", M1="passed"),
            seen(5, "hung"),
        ]
    )
    assert [(int(one.before.sha), int(one.after.sha), one.red, one.green, one.gone) for one in told] == [
        (0, 2, ("M1",), (), ()),
        (3, 4, (), ("M1",), ("P1",)),
        (4, 5, ("hung",), (), ("M1",)),
    ]


@pytest.mark.parametrize("first", range(1, 9))
@pytest.mark.parametrize("lost", [(), (4,), (2, 3, 5, 6)])
def test_bisection_finds_the_first_bad_revision_or_names_those_it_could_not_judge(
    first: int, lost: Sequence[int]
) -> None:
    asked = []

    def judge(revision: Revision) -> Seen:
        number = int(revision.sha)
        asked.append(number)
        if number in lost:
            return seen(number, "not_run")
        other = "failed" if number == 2 else "passed"  # of another check, which does not count
        return seen(number, "failed", P1="failed" if number >= first else "passed", D1=other)

    line = [Revision(f"{number:040}", "") for number in range(9)]
    found = bisect(line[0], line[1:], judge)
    assert found.first is not None
    assert found.why == "P1"
    named = {int(one.sha) for one in (*found.suspects, found.first)}
    assert first in named
    assert named - {int(found.first.sha)} <= set(lost)
    assert len(asked) == len(set(asked))


def test_bisection_needs_ends_that_differ() -> None:
    line = [Revision(f"{number:040}", "") for number in range(3)]
    found = bisect(line[0], line[1:], lambda one: seen(int(one.sha), "failed", P1="failed"))
    assert (found.first, found.why) == (None, "nothing is red at 0000000000 that is green at 0000000000")
    found = bisect(line[0], line[1:], lambda one: seen(int(one.sha), "not_run"))
    assert found.why == "0000000000 was not judged: some"


# The command.


@pytest.mark.usefixtures("_engines")
def test_history_says_what_went_red_and_leaves_the_repository_alone(cli: Cli, repo: Path) -> None:
    before = state(repo)
    asked = ("history", "--repo", str(repo), "--subject", GOOD, "--case", CASE)
    code, out, err = cli(*asked, "main~4", "main~3", "main~2")
    assert (code, err) == (1, ""), out
    empty, good, bad = (git(repo, "rev-parse", f"main~{back}")[:10] for back in (4, 3, 2))
    assert (
        f"{empty} not_run  0 checks passed  empty: it holds no package fake_engine, neither at its root nor" in out
    )
    assert f"{good} passed " in out
    assert "red: M1 P1  weights twice: failed at stage experts, P1 expert-rows: each row is" in out
    assert "P1 expert-rows               not run    passed     failed" in out
    assert f"{bad} after {good}, went red: M1 " in out
    assert state(repo) == before


@pytest.mark.usefixtures("_engines")
def test_a_revision_that_does_not_end_is_hung(cli: Cli, repo: Path) -> None:
    code, out, _ = cli("history", "--repo", str(repo), "--subject", GOOD, "--case", CASE, "--seconds", "1", "main")
    assert (code, "hung     0 checks passed; red: hung  mended: it did not end within 1 s" in out) == (13, True), (
        out
    )


def test_bisect_prints_the_revision(cli: Cli, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(place: Any, revision: Revision, *_: Any) -> Seen:
        bad = revision.title in ("weights twice", "a comment")
        return Seen(revision, "failed" if bad else "passed", {"P1": "failed" if bad else "passed"})

    monkeypatch.setattr(command, "_judged", judged)
    asked = ("history", "--repo", str(repo), "--subject", GOOD, "--bisect")
    code, out, _ = cli(*asked, "main~3", "main~1")
    assert code == 0, out
    assert f"first bad revision: {git(repo, 'rev-parse', 'main~2')} weights twice (P1)" in out
    code, out, _ = cli(*asked, "main~3", "main")
    assert (code, "nothing to find: nothing is red at" in out) == (1, True), out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--subject", GOOD, "--bisect", "main"],
            "--bisect takes two revisions, a good and a bad one; 1 were given",
        ),
        (["main"], "history goes with an engine: --subject vllm, sglang or MODULE:CLASS"),
        (["--subject", GOOD, "none"], "none is no revision of"),
    ],
)
def test_wrong_usage_is_one_line(cli: Cli, repo: Path, arguments: list[str], says: str) -> None:
    code, _, err = cli("history", "--repo", str(repo), *arguments)
    assert (code, len(err.splitlines())) == (4, 1), err
    assert says in err
