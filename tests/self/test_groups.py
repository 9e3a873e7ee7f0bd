"""Groups that are not WORLD: group ranks differ from global ones, and several groups work at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moonep_validate.worlds import mapped

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


@pytest.mark.parametrize("here", ["the same file", "another file", "no file"])
def test_memory_is_mapped_only_from_the_file_that_rank_0_made(here: str, tmp_path: Path) -> None:
    """On another host a path names nothing, or another file: then rows travel as messages on all ranks."""
    path, mark, answers = tmp_path / "shared", b"m" * 16, []
    if here != "no file":
        path.write_bytes((mark if here == "the same file" else b"o" * 16) + bytes(2 * 3 * 4))

    def exchange(name: str, value: object) -> list[object]:
        answers.append(value)
        return [(str(path), mark), None] if len(answers) == 1 else [None, value]

    comm = SimpleNamespace(rank=1, size=2, device=torch.device("cpu"), exchange=exchange)
    memory = mapped.allocate(comm, "pool", (3,), torch.float32)
    assert (memory is not None) == (here == "the same file")
    if memory is not None:
        memory.rows[0].fill_(7.0)
        assert path.read_bytes()[:12] == torch.full((3,), 7.0).numpy().tobytes()
