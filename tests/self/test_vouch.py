"""Who claims to be what it is not: each lowers the level, fails, or is said; and ``--require`` is not met by it."""

from __future__ import annotations

import base64
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import moonep_validate.reference as reference
from moonep_validate.cases.case import Case
from moonep_validate.judge.verdict import LEVELS, Verdict
from moonep_validate.pipeline.make import make_job
from moonep_validate.pipeline.options import Options
from moonep_validate.pipeline.require import unmet, unmet_by
from moonep_validate.pipeline.run import run_case
from moonep_validate.subjects.vouch import compared, part_of
from moonep_validate.trace.trace import Part, Said, Trace

Cli = Callable[..., tuple[int, str, str]]
NAME = "moonep_vouched"
CASE = Case.parse("genB+R2+E8+K2+S5+pad4+hot:1")
BUFFER = "class Buffer:\n    pass\n"


def installed(site: Path, files: dict[str, str], record: str | None = "hashes", version: str = "1.0") -> None:
    """Write a package and what an installer writes about it; a record of ``names`` has no hashes, None is none."""
    info = site / f"{NAME}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n")
    lines = []
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(text)}" if record == "hashes" else f"{name},,")
    if record is not None:
        (info / "RECORD").write_text("\n".join(lines) + "\n")


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Part]]:
    """The part of the module in the test's folder."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(one for one in sys.path if "site-packages" not in one)])

    def get() -> Part:
        importlib.invalidate_caches()
        module = importlib.import_module(NAME)
        return part_of(module, module.Buffer)

    yield get
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


INIT = f"{NAME}/__init__.py"


def test_a_record_with_the_hashes_of_all_files_is_real(tmp_path: Path, load: Callable[[], Part]) -> None:
    installed(tmp_path, {INIT: f"from {NAME}.core import Buffer\n", f"{NAME}/core.py": BUFFER})
    part = load()
    assert (part.level, part.version, part.doubts) == ("real", "1.0", ())


@pytest.mark.parametrize(
    ("record", "change", "doubt"),
    [
        (None, "", "no installed distribution lists {init}"),
        ("names", "", f"the record of {NAME} 1.0 has no hash of {{init}}"),
        ("hashes", "__version__ = '99'\n", f"{{init}} is not the file that {NAME} 1.0 installed"),
        ("hashes", "__moonep_origin__ = 'real'\n", f"{{init}} is not the file that {NAME} 1.0 installed"),
    ],
)
def test_a_made_up_distribution_or_a_changed_file_is_unverified(
    tmp_path: Path, load: Callable[[], Part], record: str | None, change: str, doubt: str
) -> None:
    installed(tmp_path, {INIT: BUFFER}, record)
    (tmp_path / INIT).write_text(BUFFER + change)
    part = load()
    assert (part.level, part.doubts) == ("unverified", (doubt.format(init=tmp_path / INIT),))
    assert "99" not in part.version
    assert unmet_by({"plan": part}, [f"plan={NAME}"])[0].startswith(
        f"--require plan={NAME} is not met: unverified"
    )


def test_a_part_of_the_package_that_was_changed_counts(tmp_path: Path, load: Callable[[], Part]) -> None:
    installed(tmp_path, {INIT: f"from {NAME}.core import Buffer\n", f"{NAME}/core.py": BUFFER})
    (tmp_path / NAME / "core.py").write_text(BUFFER + "    changed = 1\n")
    assert load().doubts == (f"{tmp_path / NAME / 'core.py'} is not the file that {NAME} 1.0 installed",)


def test_a_distribution_without_the_package_vouches_for_nothing(tmp_path: Path, load: Callable[[], Part]) -> None:
    installed(tmp_path, {})
    (tmp_path / f"{NAME}.py").write_text("__version__ = '1.0'\n" + BUFFER)
    assert load().level == "unverified"


def test_an_editable_install_covers_its_checkout(tmp_path: Path, load: Callable[[], Part]) -> None:
    installed(tmp_path, {INIT: BUFFER}, None)
    origin = f'{{"url": "{tmp_path.as_uri()}", "dir_info": {{"editable": true}}}}'
    (tmp_path / f"{NAME}-1.0.dist-info" / "direct_url.json").write_text(origin)
    assert load().level == "real"


@pytest.mark.parametrize("mark", ["stand-in", "reference"])
def test_a_mark_of_ours_lowers_and_never_raises(tmp_path: Path, load: Callable[[], Part], mark: str) -> None:
    installed(tmp_path, {INIT: f"__moonep_origin__ = {mark!r}\n{BUFFER}"})
    assert load().level == "stand-in"


def test_a_subclass_of_our_reference_is_ours(tmp_path: Path, load: Callable[[], Part]) -> None:
    text = "from moonep_validate.reference.moonep_b import Buffer as Ours\n__moonep_origin__ = 'real'\n"
    installed(tmp_path, {INIT: text + "class Buffer(Ours):\n    pass\n"})
    part = load()
    assert (part.level, part.doubts) == (
        "stand-in",
        ("it inherits from moonep_validate.reference.moonep_b.Buffer",),
    )


def test_a_stub_without_a_file_is_unverified() -> None:
    stub = ModuleType(NAME)
    stub.Buffer = type("Buffer", (), {"__module__": NAME})  # type: ignore[attr-defined]
    assert part_of(stub, stub.Buffer).doubts == ("it has no file",)


@pytest.mark.parametrize(
    ("word", "level", "doubt"),
    [
        (Said("m", "/a", "1", False), "real", None),
        (Said("m", "/b", "1", False), "unverified", "rank 3 imported /b, files 1, not 1"),
        (Said("m", "/a", "2", False), "unverified", "rank 3 imported /a, files 2, not 1"),
        (Said("other", "/a", "1", False), "unverified", "rank 3 did not say what it imported"),
        (Said("m", "/a", "1", True), "stand-in", "this suite's own reference ran in its place"),
    ],
)
def test_every_rank_has_a_word(word: Said, level: str, doubt: str | None) -> None:
    part, ours = Part("real", "m", "1.0", file="/a", digest="1"), Part("reference", "ours", "1")
    trace = Trace(CASE, "m", [], {"plan": part, "experts": ours})
    compared(trace, 3, [word])
    assert trace.parts["plan"].level == level
    assert trace.parts["plan"].doubts == ((doubt,) if doubt else ())
    assert trace.parts["experts"] == ours


def test_levels_are_ordered() -> None:
    assert LEVELS == ("stand-in", "reference", "unverified", "patched", "real")
    assert Part("real", "m", "1", seams=("s",), doubts=("d",)).level == "unverified"


# In worker processes.

INSIDE = """
from moonep_validate.reference import moonep_b
class Buffer:
    def __init__(self, *given, **named):
        self.inner = moonep_b.Buffer(*given, **named)
    def __getattr__(self, name):
        return getattr(self.inner, name)
"""
TAMPERS = (
    INSIDE
    + """
from moonep_validate.trace.trace import Call
Call.unchanged = lambda self, **inputs: None
"""
)


def copy_of_reference() -> dict[str, str]:
    """An honest implementation that is nobody's: the reference under another name."""
    folder, own = Path(reference.__path__[0]), f"{NAME}.core"
    texts = {path.name: path.read_text() for path in folder.glob("*.py")}
    texts["moonep.py"] = (folder / "moonep_b" / "__init__.py").read_text().replace("__moonep_origin__", "_origin")
    files = {f"{NAME}/core/{n}": text.replace("moonep_validate.reference", own) for n, text in texts.items()}
    return {INIT: f"from {own}.moonep import Buffer\n", **files}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def judged(api: str | None = None) -> Verdict:
    return run_case(make_job(Options(moonep_module=NAME, api=api)), CASE)[1]


def test_an_installed_module_of_its_own_is_real_until_its_file_changes(site: Path) -> None:
    installed(site, copy_of_reference())
    job = make_job(Options(moonep_module=NAME))
    assert unmet(job, [f"transport={NAME}"]) == []
    verdict = run_case(job, CASE)[1]
    assert verdict.status == "passed", verdict.diagnosis
    assert verdict.parts["plan"].level == "real", verdict.parts["plan"]
    (site / INIT).write_text((site / INIT).read_text() + "changed = 1\n")
    part = run_case(job, CASE)[1].parts["plan"]
    assert part.level == "unverified"
    assert part.doubts[0].startswith(f"rank 0 imported {site / INIT}, files ")


def test_results_of_the_reference_inside_a_module_are_ours(site: Path, cli: Cli) -> None:
    installed(site, {INIT: INSIDE})
    options = ["run", "--moonep-module", NAME, "--api", "B", "--case", str(CASE)]
    code, out, _ = cli(*options, "--require", f"transport={NAME}")
    assert code == 1, out
    assert f"stand-in: {NAME}: this suite's own reference ran in its place" in out
    assert f"--require transport={NAME} is not met: stand-in {NAME} 1.0" in out
    assert judged("B").level == "stand-in"


def test_a_module_that_replaces_the_recorder_is_an_error(site: Path) -> None:
    installed(site, {INIT: TAMPERS})
    verdict = judged("B")
    assert verdict.status == "error"
    assert (
        "code of this suite was replaced in the process of this rank: moonep_validate.trace.trace.Call.unchanged"
        in (verdict.errors[0])
    )


@pytest.mark.parametrize("hook", ["sitecustomize.py", "stub.pth"])
def test_a_stub_that_an_install_hook_puts_in_place_is_not_real(
    site: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """A .pth file only works in a site folder, so that the environment's own is what the hook adds."""
    installed(site, {INIT: BUFFER})
    (site / "made_by_hook.py").write_text(
        f"import sys, types\nm = sys.modules[{NAME!r}] = types.ModuleType({NAME!r})\nm.__version__ = '1.0'\n"
        "class Buffer:\n    def __init__(self, *a, **k): pass\nm.Buffer = Buffer\n"
    )
    (site / hook).write_text("import made_by_hook\n")
    if hook.endswith(".pth"):
        (site / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(site)!r})\n")
    job = make_job(Options(moonep_module=NAME, api="B"))
    assert job.subject.parts["plan"].level == "unverified"
    assert unmet(job, [f"transport={NAME}"]) != []
