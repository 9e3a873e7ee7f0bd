"""How are revisions of a user's repository laid out, without a change to it? In worktrees of a scratch clone.

The clone borrows the repository's objects and writes nothing into it: no worktree entry, no lock, no index.
No hook runs.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

from moonep_validate.cases.case import CaseError

#: Variables by which git would work on another repository than the one that is named.
_FOREIGN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
#: No hook of the user's runs; large files stay pointers.
_QUIET = ("-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false")


@dataclass(frozen=True)
class Revision:
    """One commit: its full hash, and the first line of its message."""

    sha: str
    title: str

    @property
    def short(self) -> str:
        """As it is printed."""
        return self.sha[:10]


class Scratch:
    """A repository, and a folder for worktrees of it.

    Args:
        repo: the user's.
        folder: empty; all is written there.
    """

    def __init__(self, repo: Path, folder: Path) -> None:
        self._repo, self._folder, self._clone = repo, folder, folder / "clone.git"

    def revisions(self, named: Sequence[str]) -> list[Revision]:
        """What is named, in that order: a commit, or a range ``A..B`` from old to new.

        Raises:
            CaseError: if git does not know one, or nothing is left.
        """
        found = [sha for name in named for sha in self._resolved(name)]
        return [self._revision(sha) for sha in dict.fromkeys(found)]

    def between(self, good: Revision, bad: Revision) -> list[Revision]:
        """The commits after ``good`` up to ``bad``, by first parents, from old to new.

        Raises:
            CaseError: if ``good`` is no ancestor of ``bad``.
        """
        if _git(self._repo, "merge-base", "--is-ancestor", good.sha, bad.sha, check=False) is None:
            raise CaseError(f"--bisect: {good.short} is no ancestor of {bad.short}")
        return self.revisions([f"{good.sha}..{bad.sha}"])

    @contextmanager
    def laid_out(self, revision: Revision) -> Iterator[Path]:
        """The files of a revision, in a folder of their own that goes away again."""
        if not self._clone.exists():
            _git(
                self._folder, "clone", "--quiet", "--bare", "--shared", str(self._repo.resolve()), str(self._clone)
            )
        place = self._folder / revision.sha  # never the same folder twice: bytecode is told from it
        _git(self._clone, "worktree", "add", "--quiet", "--detach", "--force", str(place), revision.sha)
        try:
            yield place
        finally:
            rmtree(place, ignore_errors=True)

    def _resolved(self, name: str) -> list[str]:
        if ".." in name:
            lines = _git(self._repo, "rev-list", "--reverse", "--first-parent", "--end-of-options", name)
            if not lines:
                raise CaseError(f"{name} names no revision of {self._repo}")
            return lines.split()
        sha = _git(
            self._repo, "rev-parse", "--verify", "--quiet", "--end-of-options", name + "^{commit}", check=False
        )
        if not sha:
            raise CaseError(f"{name} is no revision of {self._repo}")
        return sha.split()[-1:]

    def _revision(self, sha: str) -> Revision:
        return Revision(sha, (_git(self._repo, "show", "--no-patch", "--format=%s", sha) or "").strip()[:60])


@contextmanager
def scratch(repo: Path) -> Iterator[Scratch]:
    """A scratch of a repository.

    Raises:
        CaseError: if it is none, or git is not there.
    """
    if not repo.is_dir():
        raise CaseError(f"--repo {repo}: there is no such folder")
    if _git(repo, "rev-parse", "--git-dir", check=False) is None:
        raise CaseError(f"--repo {repo} is no git repository")
    with TemporaryDirectory(prefix="moonep-history-") as folder:
        yield Scratch(repo, Path(folder))


def _git(folder: Path, *arguments: str, check: bool = True) -> str | None:
    """What git prints; None if it fails and may.

    Raises:
        CaseError: with git's last line.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    environment = kept | {"GIT_LFS_SKIP_SMUDGE": "1", "GIT_TERMINAL_PROMPT": "0"}
    command = ["git", *_QUIET, "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError:
        raise CaseError("git is not installed here") from None
    if done.returncode == 0:
        return done.stdout
    if check:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CaseError(f"git {arguments[0]} in {folder}: {last}")
    return None
