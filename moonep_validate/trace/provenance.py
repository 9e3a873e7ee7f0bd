"""What really was imported? Version, source revision and uncommitted changes of a module, told from its file.

A name proves nothing: a folder on PYTHONPATH shadows an installed package, a site-packages lies inside somebody's
checkout, an editable install points at changed files. So everything here starts at the module's file, and a
distribution or a repository speaks for the module only if it holds that file. Nothing here raises, whatever the
module is; what cannot be told is ``unknown`` or None.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

if TYPE_CHECKING:  # it imports torch, which doctor does without
    from moonep_validate.trace.trace import Part

UNKNOWN = "unknown"
#: For git, on a disk that may be slow: a part that it says nothing of is unknown, and no error.
_TIMEOUT = 5.0
#: The same change gives the same digest, whatever the user's configuration of ``git diff``.
_PLAIN = (
    *("--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--unified=3"),
    *("--src-prefix=a/", "--dst-prefix=b/", "--diff-algorithm=myers", "--submodule=short"),
    "--ignore-submodules=untracked",
)


@dataclass(frozen=True)
class Provenance:
    """What stands behind one imported module.

    Attributes:
        package: the module's full name.
        version: of the distribution that holds the file, else ``__version__``, else ``unknown``.
        revision: first 12 digits of the commit that the file was installed from or is checked out at.
        dirty: first 12 digits of the digest of the work tree's uncommitted changes; None if there are none
            or no work tree; ``unknown`` if git could not tell, since that is not clean.
        editable: whether the distribution is an editable install.
        url: where the distribution was installed from, if not from an index (PEP 610).
        file: the module's file; the first folder of a namespace package; empty if there is neither.
    """

    package: str
    version: str
    revision: str | None
    dirty: str | None
    editable: bool
    url: str | None
    file: str


def provenance(module: ModuleType) -> Provenance:
    """Find out where ``module`` came from."""
    package = _text(_attribute(module, "__name__"))
    file = file_of(module)
    path = _resolved(file)
    top = package.partition(".")[0]
    owner = _owner(top, file, path) if path else None
    origin = _origin(owner) if owner else {}
    commit = _text(_mapping(origin.get("vcs_info")).get("commit_id"))
    editable = _is_editable(origin)
    revision, dirty = _work_tree(path) if path and (editable or not commit) else (commit[:12] or None, None)
    version = _version(owner) or _declared(module) or _declared(sys.modules.get(top)) or UNKNOWN
    return Provenance(package, version, revision, dirty, editable, _text(origin.get("url")) or None, file)


def owner_of(top: str, file: Path) -> tuple[Distribution | None, bool]:
    """The distribution that holds a file of the top-level package, and whether it is an editable install."""
    path = _resolved(str(file))
    owner = _owner(top, str(file), path) if path else None
    return owner, owner is not None and _is_editable(_origin(owner))


def kind_of(part: Part) -> str:
    """The word for a part in evidence: its origin, or ``unverified`` where that is in doubt."""
    return "unverified" if part.level == "unverified" else part.origin


def describe(p: Provenance | Part) -> str:
    """One line for the terminal."""
    text = p.package + (", version unknown" if p.version == UNKNOWN else f" {p.version}")
    text += f" at {p.revision}" if p.revision else ""
    text += f" (dirty {p.dirty})" if p.dirty else ""
    text += ", editable" if p.editable else ""
    return text + (f", from {p.file}" if p.file else "")


# The module itself


def _attribute(module: ModuleType | None, name: str) -> Any:
    """An attribute or None; a module's own ``__getattr__`` may raise anything."""
    with suppress(Exception):
        return getattr(module, name, None)
    return None


def _text(value: object) -> str:
    return str(value) if isinstance(value, str) else ""


def _declared(module: ModuleType | None) -> str:
    """``__version__`` if it is text; in some packages it is a submodule of that name."""
    return _text(_attribute(module, "__version__"))


def file_of(module: ModuleType) -> str:
    """The module's file; the first folder of a namespace package; empty if there is neither."""
    with suppress(Exception):  # built-in: neither; namespace package: __file__ is None or absent
        return os.fsdecode(_attribute(module, "__file__") or next(iter(_attribute(module, "__path__"))))
    return ""


def _resolved(file: str) -> Path | None:
    """The real file: what a link points at is what runs."""
    with suppress(OSError, RuntimeError, ValueError):
        return Path(file).resolve() if file else None
    return None


def _is_folder(path: Path) -> bool:
    with suppress(OSError):
        return path.is_dir()
    return False


# The distribution that holds a file


def _owner(top: str, file: str, path: Path) -> Distribution | None:
    """The distribution that lists ``path`` among its files, else the editable one that makes it importable."""
    claimed = _claimed(top)
    known = sorted(
        _installed(), key=lambda found: found[0] not in claimed
    )  # the likely ones first: lists are long

    def lists(name: str, distribution: Distribution) -> bool:
        return _lists(distribution, Path(file), path)

    def links(name: str, distribution: Distribution) -> bool:
        return _links(distribution, top, path, name in claimed or name == _canonical(top))

    return _first(known, lists, path) or _first(known, links, path)


def _first(
    known: list[tuple[str, Distribution]], owns: Callable[[str, Distribution], bool], path: Path
) -> Distribution | None:
    """The first owner; None for a folder that several distributions share, since none of them speaks for it."""

    def owners() -> Iterator[Distribution]:
        for name, distribution in known:
            with suppress(Exception):  # what others installed may be broken in any way
                if owns(name, distribution):
                    yield distribution

    found = owners()
    first = next(found, None)
    return None if first and _is_folder(path) and next(found, None) else first


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _claimed(top: str) -> set[str]:
    """Distributions that say that they provide the top-level name; on Python 3.10 some do not say."""
    with suppress(Exception):
        return {_canonical(name) for name in importlib.metadata.packages_distributions().get(top, ())}
    return set()


def _installed() -> Iterator[tuple[str, Distribution]]:
    with suppress(Exception):
        for distribution in importlib.metadata.distributions():
            with suppress(Exception):
                yield _canonical(distribution.metadata["Name"]), distribution


def _lists(distribution: Distribution, file: Path, path: Path) -> bool:
    """Whether the distribution's list of files has ``path`` or, if that is a folder, something in it.

    Reading a list is slow (torch has 13000 files), so is resolving a path. ``file`` is ``path`` as it was
    imported: an installer may have put links into site-packages.
    """
    site = Path(str(distribution.locate_file("")))
    if not (file.is_relative_to(site) or path.is_relative_to(site.resolve())):
        return False
    for listed in distribution.files or ():
        if file.name in listed.parts:
            real = Path(str(distribution.locate_file(listed))).resolve()
            if path == real or path in real.parents:
                return True
    return False


def _links(distribution: Distribution, top: str, path: Path, named_alike: bool) -> bool:
    """Whether an editable install makes ``path`` importable.

    To lie in the project's folder is not enough: a build/lib or a vendored copy of the same name lies there too.
    So if the install's import hook names places of the package, one of them must hold the file.
    """
    origin = _origin(distribution)
    url = urlsplit(_text(origin.get("url")))
    if not _is_editable(origin) or url.scheme != "file":
        return False
    project = Path(url2pathname(url.path)).resolve()
    if not path.is_relative_to(project):
        return False
    places = _places(distribution, top)
    return any(path.is_relative_to(place) for place in places) if places else named_alike


def _places(distribution: Distribution, top: str) -> list[Path]:
    """Where the import hook of an editable install says that the package ``top`` is.

    Hooks are .pth files, which name folders for sys.path, and generated modules, which name packages.
    """
    places: list[Path] = []
    for hook in distribution.files or ():
        if hook.suffix == ".pth":
            folders = map(Path, hook.read_text().splitlines())
            places += [folder / name for folder in folders for name in (top, f"{top}.py")]
        elif hook.suffix == ".py" and "editable" in hook.name:
            named = map(Path, re.findall(r"""['"]([^'"\n]+)['"]""", hook.read_text()))
            packages = (path.parent if path.name == "__init__.py" else path for path in named)
            places += [path for path in packages if path.stem == top]
    return [place.resolve() for place in places if place.is_absolute() and place.exists()]


def _origin(distribution: Distribution) -> dict[str, Any]:
    """direct_url.json of PEP 610."""
    with suppress(Exception):
        return _mapping(json.loads(distribution.read_text("direct_url.json") or "{}"))
    return {}


def _is_editable(origin: dict[str, Any]) -> bool:
    return _mapping(origin.get("dir_info")).get("editable") is True


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _version(distribution: Distribution | None) -> str:
    with suppress(Exception):
        return _text(distribution.version) if distribution else ""
    return ""


# The git work tree that holds a file


def _work_tree(path: Path) -> tuple[str | None, str | None]:
    """(revision, dirty) of the work tree that tracks ``path``; an enclosing one that does not is unrelated."""
    folder, name = (path, ".") if _is_folder(path) else (path.parent, path.name)
    if not _git(folder, "--literal-pathspecs", "ls-files", "--error-unmatch", "--", name):
        return None, None
    head = _git(folder, "rev-parse", "--verify", "--quiet", "HEAD")
    root = _git(folder, "rev-parse", "--show-toplevel")
    if not head or not root:
        return None, None
    return head.decode()[:12], _dirty(Path(os.fsdecode(root.rstrip(b"\r\n"))))


def _dirty(root: Path) -> str | None:
    """Digest of the changes since HEAD and of new .py files that git does not ignore."""
    changes = _git(root, "diff", *_PLAIN, "HEAD", "--")
    listing = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", "*.py")
    if changes is None or listing is None:
        return UNKNOWN
    if not changes and not listing:
        return None
    digest = hashlib.sha256(changes)
    for name in sorted(listing.split(b"\0")[:-1]):
        path = root / os.fsdecode(name)
        content = b""
        with suppress(OSError):  # gone meanwhile
            content = path.read_bytes() if path.is_file() else b""
        digest.update(b"\0%s\0%d\0%s" % (name, len(content), content))
    return digest.hexdigest()[:12]


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Output of a git command that only reads, or None if it fails, takes too long or there is no git."""
    # GIT_DIR and its like, as set inside a hook, would answer for another repository than the folder's.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
            check=True,
        ).stdout
    return None
