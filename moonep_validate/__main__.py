"""``python -m moonep_validate`` is ``moonep-validate``."""

from moonep_validate.doors.cli.main import main

if __name__ == "__main__":
    main()
