"""--engine-path: the engine must come from the folder that was named, or nothing is judged."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonep_validate.cases.case import Case
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.target import Engine
from moonep_validate.subjects.engines.path import misses, outside
from moonep_validate.subjects.engines.start import declared
from moonep_validate.trace.trace import Part
from moonep_validate.worlds import processes

Cli = Callable[..., tuple[int, str, str]]
ENGINES = Path(__file__).with_name("engines")
GOOD = "fake_engine:Good"
CASE = "genA+R2+E8+K2+S16+pad4+hot:5"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """As SGLang's: the package is in ``python``."""
    package = tmp_path / "checkout" / "python" / "some"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "checkout" / "some").mkdir()  # a folder of that name, and no package
    return tmp_path / "checkout"


def test_a_folder_that_holds_the_package_is_taken(checkout: Path, tmp_path: Path) -> None:
    assert misses(str(checkout / "python"), "some") is None
    (tmp_path / "one.py").touch()
    assert misses(str(tmp_path), "one") is None


def test_another_folder_says_what_to_give_instead(checkout: Path, tmp_path: Path) -> None:
    root, python = str(checkout), checkout / "python"
    assert misses(root, "some") == f"--engine-path {root} holds no package some; give {python} instead"
    assert misses(str(python / "some"), "some") == (
        f"--engine-path {python / 'some'} holds no package some; give {python} instead"
    )
    assert misses(root, "other") == (
        f"--engine-path {root} holds no package other; give the folder that has other/ in it"
    )
    assert misses(str(tmp_path / "none"), "some") == f"--engine-path {tmp_path / 'none'}: there is no such folder"


def test_what_was_imported_must_lie_there(checkout: Path, tmp_path: Path) -> None:
    file = str(checkout / "python" / "some" / "__init__.py")
    assert outside(str(checkout / "python"), "some", file) is None
    (tmp_path / "link").symlink_to(checkout / "python")
    assert outside(str(tmp_path / "link"), "some", file) is None
    said = outside(str(tmp_path / "elsewhere"), "some", file)
    assert said is not None
    assert f"the some that was imported is {file}, which does not lie in that folder" in said
    assert "is built in, which" in str(outside(str(checkout), "some", ""))


# An engine of the tests.


@pytest.fixture
def _engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(ENGINES))
    monkeypatch.syspath_prepend(str(ENGINES))
    yield
    processes.close_pools()


@pytest.mark.usefixtures("_engines")
def test_an_engine_declares_its_package_and_generations() -> None:
    assert (declared(GOOD).package, declared(GOOD).generations) == ("fake_engine", ("A",))
    assert (declared("sglang").package, declared("vllm").generations) == ("sglang", ("A",))


@pytest.mark.usefixtures("_engines")
def test_a_generation_that_was_not_declared_or_has_no_taps_is_not_run() -> None:
    part = Part("real", "some", "1.0")
    a, b = (Case.parse(f"gen{name}+R2+E8+K2+S16+pad4+hot:5") for name in "AB")
    calls_a, calls_b = (Engine(GOOD, (name,), None, part, part).subject("cpu", None) for name in "AB")
    assert (calls_a.generations, calls_b.generations) == (("A",), ("B",))
    assert calls_a.supports(a) is None
    assert calls_a.supports(b) == "genB: fake_engine:Good calls MoonEP's generation A; use genA"
    assert calls_b.supports(a) == "genA: fake_engine:Good calls MoonEP's generation B; use genB"
    assert calls_b.supports(b) == "genB: taps on an engine know MoonEP's generation A only"


@pytest.mark.usefixtures("_engines")
def test_an_engine_from_its_folder_runs_and_the_command_says_it(cli: Cli) -> None:
    code, out, err = cli("run", "--subject", GOOD, "--engine-path", str(ENGINES), "--case", CASE)
    assert (code, err) == (0, ""), out
    job = make_job(Options(subject=GOOD, engine_path=str(ENGINES)))
    assert job.reproducer == f"--subject {GOOD} --engine-path {ENGINES}"


@pytest.mark.usefixtures("_engines")
def test_a_wrong_folder_is_a_usage_error(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("run", "--subject", GOOD, "--engine-path", str(ENGINES.parent), "--case", CASE)
    assert (code, out) == (4, "")
    assert err == (
        f"moonep-validate: --engine-path {ENGINES.parent} holds no package fake_engine; give {ENGINES} instead\n"
    )


@pytest.mark.usefixtures("_engines")
def test_an_engine_imported_from_elsewhere_is_a_usage_error(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder holds a copy, but another one comes first, as an install hook can make it."""
    here, hook = tmp_path / "here", tmp_path / "hook"
    here.mkdir()
    hook.mkdir()
    shutil.copy(ENGINES / "fake_engine.py", here)
    (hook / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'fake_engine':\n"
        f"            return importlib.util.spec_from_file_location(name, {str(ENGINES / 'fake_engine.py')!r})\n"
        "sys.meta_path.insert(0, Finder)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(hook))
    code, out, err = cli("run", "--subject", GOOD, "--engine-path", str(here), "--case", CASE)
    assert (code, out) == (4, "")
    assert f"the fake_engine that was imported is {ENGINES / 'fake_engine.py'}, which does not lie in" in err
