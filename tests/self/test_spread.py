"""The map of a difference: what it says of each axis, and which cells are marked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moonep_validate.judge.checks import axes, differ
from moonep_validate.judge.spread import spread


def mapped(wrong: Any, *names: str) -> Any:
    return spread(wrong.shape, np.argwhere(wrong), axes(*names))


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (slice(None), "all 1024 rows"),
        (slice(0, None, 128), "every 128th row, 0 to 896 of 1024"),
        (slice(1, None, 2), "every 2nd row, 1 to 1023 of 1024"),
        (slice(3, 18), "rows 3 to 17 of 1024"),
        ([5], "row 5"),
        ([5, 9, 700], "3 of 1024 rows"),
        ([5, 9], "2 of 1024 rows"),
    ],
)
def test_an_axis_is_said_in_words(rows: Any, text: str) -> None:
    wrong = np.zeros((4, 1024, 8), bool)
    wrong[2, rows] = True
    assert [axis["text"] for axis in mapped(wrong, "rank", "row", "column")["axes"]] == [
        "rank 2",
        text,
        "all 8 columns",
    ]


def test_marks_say_what_share_of_a_cell_is_wrong() -> None:
    wrong = np.zeros((2, 48, 128), bool)
    wrong[1, :2, :2] = True  # a whole cell of 2 by 2
    wrong[1, 46, 127] = True  # a quarter of the last cell
    found = mapped(wrong, "rank", "row", "column")
    empty, marked = found["panels"]
    assert set("".join(empty)) == {"."}
    assert (marked[0], marked[-1]) == ("9" + "." * 63, "." * 63 + "3")
    assert set("".join(marked[1:-1])) == {"."}


def test_a_map_is_small_whatever_the_array_is() -> None:
    wrong = np.zeros((3, 11, 100, 700), bool)
    wrong[2, 10, 99, 699] = True
    found = mapped(wrong, "rank", "slot", "weight_row", "weight_column")
    assert [axis["name"] for axis in found["axes"]] == ["rank", "slot", "weight row", "weight column"]
    assert [len(found["panels"]), len(found["panels"][0]), len(found["panels"][0][0])] == [8, 24, 64]
    assert found["panels"][7][23] == "." * 63 + "1"


def test_fixed_places_are_no_axes() -> None:
    wrong = np.zeros((4, 5), bool)
    wrong[2, 2] = True
    where = np.argwhere(wrong)
    found = spread(wrong.shape, where, lambda i: {"slot": 2, "weight_row": i[0], "weight_column": i[1]})
    assert [axis["name"] for axis in found["axes"]] == ["weight row", "weight column"]
    assert found["panels"] == [[".....", ".....", "..9..", "....."]]


def test_a_finding_carries_its_map_and_one_element_has_none() -> None:
    (finding,) = differ("rows", np.zeros(6), np.eye(6)[3], axes("row")).findings
    assert finding.spread == {"axes": [{"name": "row", "size": 6, "text": "row 3"}], "panels": [["...9.."]]}
    (finding,) = differ("rows", [1], [2], axes("row")).findings
    assert finding.spread is None
