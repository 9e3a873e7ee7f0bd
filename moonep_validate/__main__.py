"""``python -m moonep_validate`` is ``moonep-validate``."""

from moonep_validate.cli import main

if __name__ == "__main__":
    main()
