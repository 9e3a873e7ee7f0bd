"""Does an engine lie in the folder that was named? Another copy of it must not be judged in its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def misses(path: str, package: str) -> str | None:
    """Why a package cannot be imported from a folder, and which folder to give instead; None if it can.

    Args:
        path: what ``--engine-path`` says.
        package: its top-level name.
    """
    folder = Path(path)
    if not folder.is_dir():
        return f"--engine-path {path}: there is no such folder"
    if _holds(folder, package):
        return None
    advice = next(_others(folder, package), None)
    instead = f"give {advice} instead" if advice else f"give the folder that has {package}/ in it"
    return f"--engine-path {path} holds no package {package}; {instead}"


def holder(folder: Path, package: str) -> Path | None:
    """The folder that holds a package: a checkout's root, or one just below it; None if there is none."""
    return folder if _holds(folder, package) else next(_others(folder, package), None)


def outside(path: str, package: str, file: str) -> str | None:
    """What to say if a package was imported from elsewhere than the folder that was named, else None."""
    if file and Path(file).resolve().is_relative_to(Path(path).resolve()):
        return None
    return (
        f"--engine-path {path}: the {package} that was imported is {file or 'built in'}, which does not lie in "
        "that folder; give the folder that holds it, or take the other one off the import path"
    )


def _holds(folder: Path, package: str) -> bool:
    """Whether a package or a module lies there; a folder without ``__init__.py`` yields to one installed later."""
    return (folder / package / "__init__.py").is_file() or (folder / f"{package}.py").is_file()


def _others(folder: Path, package: str) -> Iterator[Path]:
    """Folders nearby that hold it: in a checkout's root, or above where the package itself was named."""
    below = (one for one in sorted(folder.iterdir()) if one.is_dir())
    around = (folder.absolute().parent,) if folder.absolute().name == package else ()
    return (one for one in (*around, *below) if _holds(one, package))
