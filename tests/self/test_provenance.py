"""What really was imported: read off real repositories, real metadata and real import paths."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import moonep_validate
from moonep_validate.trace.provenance import Provenance, describe, provenance

NAME = "moonep_probe"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
Load = Callable[..., ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Import a module with folders put first on sys.path, as PYTHONPATH would, and forget it afterwards.

    What is really installed here is out of sight, since reading it is slow and no test's business.
    """
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if "site-packages" not in folder])

    def get(*folders: Path, name: str = NAME) -> ModuleType:
        sys.path[:0] = map(str, folders)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield get
    for name in set(sys.modules) - before:
        if name.startswith("moonep_probe"):
            del sys.modules[name]


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def package(folder: Path, text: str = "", name: str = NAME) -> Path:
    return write(folder / name / "__init__.py", text)


def git(folder: Path, *arguments: str) -> str:
    """Run git without anybody's configuration."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for who in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{who}_NAME": "t", f"GIT_{who}_EMAIL": "t@example.org"}
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], env=env, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(folder: Path) -> str:
    """Commit all in ``folder``, a new repository if it is none; the short revision."""
    if not (folder / ".git").exists():
        git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "-m", "c")
    return git(folder, "rev-parse", "HEAD")[:12]


def install(
    site: Path,
    version: str | None = "1.2",
    *,
    name: str = "moonep-probe",
    files: tuple[str, ...] = (),
    origin: object = None,
    top_level: str = "",
) -> Path:
    """Write the metadata that an installer would write."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    write(
        info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\n" + (f"Version: {version}\n" if version else "")
    )
    write(info / "RECORD", "".join(f"{file},,\n" for file in files))
    if origin is not None:
        write(info / "direct_url.json", origin if isinstance(origin, str) else json.dumps(origin))
    if top_level:
        write(info / "top_level.txt", top_level)
    return info


def editable(project: Path) -> dict[str, object]:
    return {"url": project.as_uri(), "dir_info": {"editable": True}}


LISTED = (f"{NAME}/__init__.py",)


# Repositories


def test_clean_repository(tmp_path: Path, load: Load) -> None:
    file = package(tmp_path, "__version__ = '7.1'")
    revision = commit(tmp_path)
    p = provenance(load(tmp_path))
    assert p == Provenance(NAME, "7.1", revision, None, False, None, str(file))
    assert describe(p) == f"{NAME} 7.1 at {revision}, from {file}"


def test_changes_have_digests(tmp_path: Path, load: Load) -> None:
    file = package(tmp_path, "a = 1\n")
    write(tmp_path / ".gitignore", "ignored.py\n")
    write(tmp_path / "doc.txt", "text\n")
    revision = commit(tmp_path)
    module = load(tmp_path)

    def dirty() -> str | None:
        p = provenance(module)
        assert p.revision == revision
        return p.dirty

    os.utime(file, (1, 1))
    write(tmp_path / "ignored.py", "b = 1\n")
    write(tmp_path / "notes.txt", "untracked, but no code\n")
    assert dirty() is None

    seen: list[str | None] = [None]
    extra = tmp_path / "sub" / "néw file.py"
    for path, text in [(file, "a = 2\n"), (file, "a = 3\n"), (extra, "c = 1\n"), (extra, "c = 2\n")]:
        write(path, text)
        assert dirty() not in seen
        assert dirty() == dirty()
        seen.append(dirty())

    extra.rename(tmp_path / "other.py")
    assert dirty() not in seen
    git(tmp_path, "checkout", "--quiet", "--", NAME)
    (tmp_path / "other.py").unlink()
    assert dirty() is None
    write(tmp_path / "doc.txt", "a tracked file elsewhere in the repository\n")
    assert re.fullmatch("[0-9a-f]{12}", dirty() or "")


def test_staged_and_deleted_files_are_changes(tmp_path: Path, load: Load) -> None:
    package(tmp_path)
    other = write(tmp_path / "other.py", "x = 1\n")
    commit(tmp_path)
    module = load(tmp_path)
    other.unlink()
    deleted = provenance(module).dirty
    git(tmp_path, "add", "--update")
    assert provenance(module).dirty == deleted
    assert deleted


def test_users_diff_configuration_does_not_change_the_digest(tmp_path: Path, load: Load) -> None:
    file = package(tmp_path, "a = 1\n" * 20)
    commit(tmp_path)
    module = load(tmp_path)
    write(file, "a = 1\n" * 20 + "b = 2\n")
    before = provenance(module).dirty
    for key, value in {
        "diff.noprefix": "true",
        "diff.context": "9",
        "color.ui": "always",
        "diff.external": "false",
    }.items():
        git(tmp_path, "config", key, value)
    assert provenance(module).dirty == before
    assert before not in (None, "unknown")


def test_changes_that_git_cannot_tell_are_not_clean(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path)
    revision = commit(tmp_path)
    real = subprocess.run

    def slow(command: list[str], **options: object) -> object:
        if "diff" in command:
            raise subprocess.TimeoutExpired(command, 5)
        return real(command, **options)  # type: ignore[call-overload]

    module = load(tmp_path)
    monkeypatch.setattr(subprocess, "run", slow)
    p = provenance(module)
    assert (p.revision, p.dirty) == (revision, "unknown")
    assert "(dirty unknown)" in describe(p)


@pytest.mark.parametrize("ignored", [True, False])
def test_enclosing_repository_that_does_not_track_the_file_is_unrelated(
    tmp_path: Path, load: Load, ignored: bool
) -> None:
    write(tmp_path / ".gitignore", "site/\n" if ignored else "")
    commit(tmp_path)
    package(tmp_path / "site")
    p = provenance(load(tmp_path / "site"))
    assert (p.revision, p.dirty) == (None, None)


def test_repository_without_a_commit(tmp_path: Path, load: Load) -> None:
    package(tmp_path)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    p = provenance(load(tmp_path))
    assert (p.revision, p.dirty) == (None, None)


def test_git_variables_of_a_hook_do_not_answer(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path / "mine")
    revision = commit(tmp_path / "mine")
    package(tmp_path / "other", "other = 1")
    commit(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    assert provenance(load(tmp_path / "mine")).revision == revision


def test_links_to_an_installers_cache(tmp_path: Path, load: Load) -> None:
    real = package(tmp_path / "cache").parent
    install(tmp_path / "site", files=LISTED)
    (tmp_path / "site" / NAME).mkdir()
    (tmp_path / "site" / NAME / "__init__.py").symlink_to(real / "__init__.py")
    assert provenance(load(tmp_path / "site")).version == "1.2"


def test_link_into_a_repository_counts_as_the_repository(tmp_path: Path, load: Load) -> None:
    package(tmp_path / "repo")
    revision = commit(tmp_path / "repo")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / NAME).symlink_to(tmp_path / "repo" / NAME)
    assert provenance(load(tmp_path / "site")).revision == revision


def test_file_names_are_no_patterns(tmp_path: Path) -> None:
    write(tmp_path / "ab.py")
    commit(tmp_path)
    module = ModuleType("odd")
    module.__file__ = str(write(tmp_path / "a*.py"))
    assert provenance(module).revision is None


def test_without_git(tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "__version__ = '7.1'")
    commit(tmp_path)
    module = load(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    p = provenance(module)
    assert (p.version, p.revision, p.dirty) == ("7.1", None, None)


# Distributions


@pytest.mark.parametrize("top_level", ["", NAME])
def test_installed_wheel(tmp_path: Path, load: Load, top_level: str) -> None:
    file = package(tmp_path, "__version__ = 'what the module says'")
    install(tmp_path, files=LISTED, top_level=top_level)
    p = provenance(load(tmp_path))
    assert p == Provenance(NAME, "1.2", None, None, False, None, str(file))
    assert describe(p) == f"{NAME} 1.2, from {file}"


def test_distribution_of_another_name_and_a_submodule(tmp_path: Path, load: Load) -> None:
    package(tmp_path)
    file = write(tmp_path / NAME / "sub.py")
    install(tmp_path, name="something-else", files=(*LISTED, f"{NAME}/sub.py"))
    p = provenance(load(tmp_path, name=f"{NAME}.sub"))
    assert (p.package, p.version, p.file) == (f"{NAME}.sub", "1.2", str(file))


def test_installed_from_a_repository_by_url(tmp_path: Path, load: Load) -> None:
    # The site-packages is tracked by a repository of its own, whose revision is not the package's.
    url = "https://example.org/moonep.git"
    package(tmp_path)
    install(tmp_path, files=LISTED, origin={"url": url, "vcs_info": {"vcs": "git", "commit_id": COMMIT}})
    commit(tmp_path)
    p = provenance(load(tmp_path))
    assert (p.version, p.revision, p.dirty, p.editable, p.url) == ("1.2", COMMIT[:12], None, False, url)


def test_folder_installed_as_a_copy_is_not_editable(tmp_path: Path, load: Load) -> None:
    site, project = tmp_path / "site", tmp_path / "project"
    package(site)
    package(project)
    commit(project)
    install(site, files=LISTED, origin={"url": project.as_uri(), "dir_info": {}})
    p = provenance(load(site))
    assert (p.version, p.revision, p.editable, p.url) == ("1.2", None, False, project.as_uri())


def test_project_whose_copy_is_installed_is_not_that_installation(tmp_path: Path, load: Load) -> None:
    site, project = tmp_path / "site", tmp_path / "project"
    package(site)
    package(project)
    install(site, files=LISTED, origin={"url": project.as_uri(), "dir_info": {}}, top_level=NAME)
    assert provenance(load(project, site)).version == "unknown"


def test_file_that_the_distribution_beside_it_does_not_list(tmp_path: Path, load: Load) -> None:
    package(tmp_path)
    package(tmp_path, name="moonep_probe_other")
    install(tmp_path, files=("moonep_probe_other/__init__.py",), top_level=NAME)
    assert provenance(load(tmp_path)).version == "unknown"


HOOKS = {
    "pth": ("_moonep_probe.pth", "{src}\n"),
    "finder": ("__editable___moonep_probe_1_2_finder.py", "MAPPING = {{'moonep_probe': '{src}/moonep_probe'}}\n"),
    "editables": (
        "_editable_impl_moonep_probe.py",
        "F.map_module('moonep_probe', '{src}/moonep_probe/__init__.py')\n",
    ),
    "nothing": ("RECORD", ""),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_editable(tmp_path: Path, load: Load, hook: str) -> None:
    # The project's folder has the package's name and a space, which the URL spells %20.
    site, project = tmp_path / "site", tmp_path / "a b" / NAME
    file = package(project / "src")
    revision = commit(project)
    name, text = HOOKS[hook]
    write(site / name, text.format(src=project / "src"))
    install(site, files=(name,), origin=editable(project))
    module = load(project / "src", site)
    assert provenance(module) == Provenance(NAME, "1.2", revision, None, True, project.as_uri(), str(file))
    write(file, "changed = 1\n")
    p = provenance(module)
    assert describe(p) == f"{NAME} 1.2 at {revision} (dirty {p.dirty}), editable, from {file}"


@pytest.mark.parametrize("hook", ["pth", "finder", "editables"])
def test_copy_inside_an_editable_project_is_not_the_install(tmp_path: Path, load: Load, hook: str) -> None:
    site, project = tmp_path / "site", tmp_path / NAME
    package(project)
    package(project / "build" / "lib")
    name, text = HOOKS[hook]
    write(site / name, text.format(src=project))
    install(site, files=(name,), origin=editable(project), top_level=NAME)
    p = provenance(load(project / "build" / "lib", site))
    assert (p.version, p.editable, p.url) == ("unknown", False, None)


def test_unrelated_module_inside_an_editable_project(tmp_path: Path, load: Load) -> None:
    site, project = tmp_path / "site", tmp_path / "project"
    package(project / "vendor")
    install(site, name="other", origin=editable(project))
    assert provenance(load(project / "vendor", site)).version == "unknown"


def test_shadowed_installation_lends_nothing(tmp_path: Path, load: Load) -> None:
    site, shadow, elsewhere = tmp_path / "site", tmp_path / "shadow", tmp_path / "elsewhere"
    package(site, "__version__ = '1.2'")
    file = package(shadow)
    install(site, files=LISTED, top_level=NAME, origin={"url": "https://x", "vcs_info": {"commit_id": COMMIT}})
    install(elsewhere, "3", origin=editable(elsewhere), top_level=NAME)
    p = provenance(load(shadow, site, elsewhere))
    assert p == Provenance(NAME, "unknown", None, None, False, None, str(file))


def test_of_two_installations_the_one_that_holds_the_file_speaks(tmp_path: Path, load: Load) -> None:
    for version in ("1.2", "3.4"):
        package(tmp_path / version)
        install(tmp_path / version, version, files=LISTED)
    assert provenance(load(tmp_path / "3.4", tmp_path / "1.2")).version == "3.4"


def test_pythonpath_shadows_an_installed_package(tmp_path: Path) -> None:
    package(tmp_path, "__version__ = 'shadow'", name="pluggy")
    code = (
        "import pluggy, moonep_validate.trace.provenance as m; p = m.provenance(pluggy); print(p.version, p.file)"
    )

    def version(*folders: Path) -> list[str]:
        path = os.pathsep.join(map(str, [*folders, Path(moonep_validate.__file__).parents[1]]))
        env = os.environ | {"PYTHONPATH": path}
        done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
        return done.stdout.split(maxsplit=1)

    assert version()[0] == importlib.metadata.version("pluggy")
    assert version(tmp_path) == ["shadow", f"{tmp_path / 'pluggy' / '__init__.py'}\n"]


@pytest.mark.parametrize("origin", ["{", "[]", '{"url": 3, "dir_info": [], "vcs_info": {"commit_id": null}}'])
def test_broken_direct_url(tmp_path: Path, load: Load, origin: str) -> None:
    package(tmp_path)
    install(tmp_path, files=LISTED, origin=origin)
    p = provenance(load(tmp_path))
    assert (p.version, p.revision, p.editable, p.url) == ("1.2", None, False, None)


def test_broken_metadata_of_others_and_no_version(tmp_path: Path, load: Load) -> None:
    package(tmp_path, "__version__ = '7.1'")
    install(tmp_path, None, files=LISTED)
    (tmp_path / "broken-1.dist-info").mkdir()
    write(tmp_path / "worse-1.dist-info" / "RECORD", '"\n')
    (tmp_path / "worse-1.dist-info" / "METADATA").write_bytes(b"\xff\xfe")
    assert provenance(load(tmp_path)).version == "7.1"


# Odd modules


def test_builtin_module() -> None:
    p = provenance(sys)
    assert p == Provenance("sys", "unknown", None, None, False, None, "")
    assert describe(p) == "sys, version unknown"


def test_frozen_and_standard_modules() -> None:
    frozen = importlib.import_module("zipimport")
    assert provenance(frozen).file == (getattr(frozen, "__file__", None) or "")
    assert provenance(json).file == json.__file__
    assert provenance(os).version == "unknown"


def test_namespace_package(tmp_path: Path, load: Load) -> None:
    write(tmp_path / "a" / NAME / "one.py")
    write(tmp_path / "b" / NAME / "two.py")
    install(tmp_path / "a", files=(f"{NAME}/one.py",))
    revision = commit(tmp_path / "a")
    module = load(tmp_path / "a", tmp_path / "b")
    p = provenance(module)
    assert p == Provenance(NAME, "1.2", revision, None, False, None, str(tmp_path / "a" / NAME))
    # With a second distribution in the same folder, none of the two speaks for the folder; each does for its file.
    write(tmp_path / "a" / NAME / "three.py")
    install(tmp_path / "a", "9", name="third", files=(f"{NAME}/three.py",))
    assert provenance(module).version == "unknown"
    assert provenance(importlib.import_module(f"{NAME}.three")).version == "9"


def test_namespace_package_that_is_the_repository(tmp_path: Path, load: Load) -> None:
    write(tmp_path / NAME / "one.py")
    revision = commit(tmp_path / NAME)
    assert provenance(load(tmp_path)).revision == revision


def test_module_in_an_archive(tmp_path: Path, load: Load) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(f"{NAME}.py", "__version__ = '7.1'")
    p = provenance(load(tmp_path / "x.zip"))
    assert (p.version, p.revision) == ("7.1", None)
    assert p.file == str(tmp_path / "x.zip" / f"{NAME}.py")


def test_version_of_the_top_level_package(tmp_path: Path, load: Load) -> None:
    package(tmp_path, "__version__ = '7.1'")
    package(tmp_path / NAME, name="sub")
    write(tmp_path / NAME / "sub" / "__version__.py")
    module = load(tmp_path, name=f"{NAME}.sub")
    importlib.import_module(f"{NAME}.sub.__version__")
    assert provenance(module).version == "7.1"


def test_modules_made_by_hand() -> None:
    class Raising(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    assert provenance(Raising("raising")).version == "unknown"
    for file in (None, "", "/nowhere/x.py", "<string>", "nul\0", "long" * 9999, 3, b"/nowhere/y.py"):
        module = ModuleType("made")
        module.__dict__["__file__"] = file
        p = provenance(module)
        assert (p.package, p.version, p.revision) == ("made", "unknown", None)
        assert isinstance(p.file, str)
    del module.__dict__["__name__"]
    assert describe(replace(provenance(module), package="nameless")).startswith("nameless")


def test_this_package_itself() -> None:
    p = provenance(moonep_validate)
    assert p.file == moonep_validate.__file__
    assert p.version == moonep_validate.__version__
