"""What does a process of ours run first? Run as a file with PACKAGE HERE PARENT MODULE …, see launch.py.

Nothing but ``sys`` may be imported before the import path is right.
"""

import sys


def main() -> None:
    """Load this package from PACKAGE, append HERE to the import path, and go on in launch.py."""
    package, here = sys.argv[1:3]
    if sys.path and sys.path[0] == __file__.rpartition("/")[0]:  # Python puts the folder of this file first
        del sys.path[0]
    if here and here not in sys.path:
        sys.path.append(here)
    import importlib.util

    if "moonep_validate" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "moonep_validate", f"{package}/__init__.py", submodule_search_locations=[package]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules["moonep_validate"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["moonep_validate"])
    from moonep_validate.worlds.launch import begin

    begin(*sys.argv[3:])


if __name__ == "__main__":
    main()
