"""MoonEP's groups as tiles: one id per tile, moved only where it must be, refused where it may not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonep_validate.subjects.experts.permute import PermuteError, Tiles, misaligned, row_groups, tile


def ends_of(lengths: list[int], pad: int) -> torch.Tensor:
    return torch.tensor([-(-length // pad) * pad for length in lengths]).cumsum(0).int()


def test_rows_behind_the_last_group_have_none() -> None:
    assert row_groups(torch.tensor([2, 2, 5], dtype=torch.int32), 7).tolist() == [0, 0, 2, 2, 2, -1, -1]
    assert row_groups(torch.tensor([0, 0], dtype=torch.int32), 2).tolist() == [-1, -1]


def test_groups_that_fit_stay_where_they_are() -> None:
    tiles = tile(torch.tensor([4, 4, 12], dtype=torch.int32), 15, 4)
    assert tiles.source is None
    assert tiles.ids.tolist() == [0] * 4 + [2] * 8
    rows = torch.arange(15)[:, None].float()
    assert tiles.gather(rows).data_ptr() == rows.data_ptr()
    back = tiles.scatter(tiles.gather(rows))
    assert back[:12, 0].tolist() == list(range(12))
    assert bool(back[12:].isnan().all())


def test_groups_that_do_not_fit_are_moved_to_the_next_tile() -> None:
    tiles = tile(torch.tensor([3, 3, 8], dtype=torch.int32), 10, 4)
    assert tiles.ids.tolist() == [0] * 4 + [2] * 8
    assert tiles.source is not None
    assert tiles.source.tolist() == [0, 1, 2, -1, 3, 4, 5, 6, 7, -1, -1, -1]
    rows = torch.tensor([[float(i)] for i in range(10)])
    rows[8:] = torch.nan
    assert tiles.gather(rows)[:, 0].tolist() == [0, 1, 2, 0, 3, 4, 5, 6, 7, 0, 0, 0]
    assert tiles.scatter(tiles.gather(rows))[:8, 0].tolist() == list(range(8))


def test_a_row_of_no_group_is_written_nowhere() -> None:
    tiles = Tiles(torch.tensor([0, 0]), torch.tensor([0, -1]), 3)
    assert tiles.scatter(torch.tensor([[5.0], [9.0]]))[0, 0] == 5
    assert bool(tiles.scatter(torch.tensor([[5.0], [9.0]]))[1:].isnan().all())


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([4, 6, 8], "group 1 spans rows 4 to 6, and one group id is read per tile of 4 rows"),
        ([4, 3, 8], "must rise, and end at most at the 9 rows"),
        ([4, 8, 12], "must rise, and end at most at the 9 rows"),
    ],
)
def test_what_does_not_fit_is_refused(ends: list[int], message: str) -> None:
    with pytest.raises(PermuteError, match=message):
        tile(torch.tensor(ends, dtype=torch.int32), 9, 4, repack=False)
    with pytest.raises(PermuteError, match="an alignment of 0 rows"):
        tile(torch.tensor([4], dtype=torch.int32), 9, 0)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 6), st.integers(1, 7), st.integers(0, 8)
)
def test_each_tile_has_one_id_and_each_row_comes_back(
    lengths: list[int], pad: int, alignment: int, spare: int
) -> None:
    ends = ends_of(lengths, pad)
    num_rows = int(ends[-1]) + spare
    tiles = tile(ends, num_rows, alignment)
    assert len(tiles.ids) % alignment == 0
    assert bool((tiles.ids.view(-1, alignment) == tiles.ids.view(-1, alignment)[:, :1]).all())
    assert (tiles.source is None) == (misaligned(ends, alignment) is None)
    rows = torch.arange(num_rows, dtype=torch.float64)[:, None] + 1
    moved = tiles.gather(rows)
    groups = torch.cat([row_groups(ends, num_rows).double(), torch.tensor([-1.0])])  # row 0 stands for none
    held = moved[:, 0].long() - 1
    assert bool((tiles.ids[held >= 0] == groups[held[held >= 0]]).all())
    end = int(ends[-1])
    assert torch.equal(tiles.scatter(moved)[:end], rows[:end])
    assert bool(tiles.scatter(moved)[end:].isnan().all())
