"""Groups that are not WORLD: group ranks differ from global ones, and several groups work at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_groups_at_once_and_all_ranks_together(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"]
    done = subprocess.run(
        [*command, "-m", "tests.self.ranks_of_groups", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("("))
    assert said == [
        "(0, 1, 2, 3): passed, peers mapped: True",
        "(0, 2): passed, peers mapped: True",
        "(1, 3): passed, peers mapped: True",
    ], done.stdout + done.stderr
    assert done.returncode == 0
