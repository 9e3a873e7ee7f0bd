"""Files of answers: what is written is read, and what is not of the form is one clear error."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonep_validate.errors import CaseError
from moonep_validate.served.answers import PathTaken, Who, make_answer, read, write
from tests.self.served_data import answer, side

WHO = Who("fake", "1.2", "abc", "model", "bfloat16", "moonep", ["--x=1"], PathTaken([3, 4], [1, 2], [7, 8]))
HEAD = {"kind": "moonep-validate answers", "format": 1, "who": {"engine": "fake"}}
LINE: dict[str, Any] = {
    "prompt": "a",
    "group": "short",
    "run": "greedy",
    "asked": [1, 2],
    "tokens": [3, 4],
    "logprobs": [-1.0, None],
    "top_ids": [[3, 7], [4]],
    "top_logprobs": [[-1.0, -2.0], [-0.5]],
    "prompt_logprobs": [None, -2.5],
}


def file(folder: Path, *lines: Any, head: Any = HEAD) -> Path:
    path = folder / "a.jsonl"
    path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in (head, *lines)))
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    top = [{5: -1.0, 8: -1.5}, {6: -2.0}]
    mine = side(WHO, [answer("a", top=top), answer("b", run="again", error="gone")])
    path = tmp_path / "x.jsonl"
    write(mine, path)
    got = read(path)
    assert got.who == WHO
    assert got.again == ["again"]
    one = got.run("greedy")["a"]
    assert one.tokens.tolist() == [5, 6]
    assert one.logprobs.tolist() == [-1.0, -2.0]
    assert one.top_ids.tolist() == [[5, 8], [6, -1]]
    assert one.top_logprobs[0].tolist() == [-1.0, -1.5]
    assert math.isnan(one.top_logprobs[1, 1])
    assert math.isnan(one.prompt_logprobs[0])
    assert one.prompt_logprobs[1:].tolist() == [-3.0, -4.0]
    assert got.run("again")["b"].error == "gone"
    assert got.run("none") == {}


def test_nulls_are_unknown_and_nan_is_counted(tmp_path: Path) -> None:
    text = json.dumps(LINE | {"logprobs": [float("nan"), None], "prompt_logprobs": [None, float("-inf")]})
    one = read(file(tmp_path, text)).run("greedy")["a"]
    assert one.bad == 2  # NaN and infinity; null is no number at all
    assert np.isnan(one.logprobs).all()


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in LINE.items() if key != name}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([LINE, LINE], "line 3: prompt a is answered twice in run greedy"),
        ([LINE | {"logprobs": [-1.0]}], "line 2: prompt a: logprobs has 1 places, and there are 2 tokens"),
        ([LINE | {"prompt_logprobs": [None]}], "prompt_logprobs has 1 places, and 2 were asked"),
        ([LINE | {"top_ids": [[3], [4]]}], "top_ids and top_logprobs differ in length"),
        ([LINE | {"logprobs": ["-1", {}]}], "log probabilities must be numbers or null"),
        ([LINE | {"tokens": [3, 2**70]}], "line 2: tokens is a list of 2, whole numbers of 64 bits"),
        ([LINE | {"tokens": [3, 4.5]}], "tokens[1] is 4.5, a whole number is needed"),
        ([LINE | {"prompt": 7}], "prompt is 7, a text is needed"),
        ([LINE | {"extra": 1}], "line 2: has extra; known: "),
        ([without("asked")], "line 2: lacks asked"),
        (["{"], "line 2: "),
        (["[1]"], "line 2: it is a list of 1, an object is needed"),
        (["[" * 100_000], "line 2: "),
        (['{"asked": ' + "9" * 10_000 + "}"], "line 2: "),
        ([""], "line 2: "),
    ],
)
def test_bad_lines_are_one_short_error(tmp_path: Path, lines: list[Any], said: str) -> None:
    with pytest.raises(CaseError) as error:
        read(file(tmp_path, *lines))
    assert said in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ({}, "the first line must say who answered"),
        ("[]", "the first line must say who answered"),
        (HEAD | {"format": 2}, "has format 2, this version reads 1"),
        (HEAD | {"who": {"engine": "x", "path": {"dispatches": [1]}}}, "lacks slots_used"),
    ],
)
def test_the_first_line_says_who(tmp_path: Path, head: Any, said: str) -> None:
    with pytest.raises(CaseError, match="line 1: ") as error:
        read(file(tmp_path, LINE, head=head))
    assert said in str(error.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe")
    for path, said in (
        (empty, "is empty"),
        (tmp_path / "no", "is no file"),
        (tmp_path, "is no file"),
        (binary, "line 1"),
    ):
        with pytest.raises(CaseError, match=said):
            read(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def read_or_refused(path: Path) -> None:
    with contextlib.suppress(CaseError):
        read(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(LINE)), JSON)
def test_any_value_in_any_field_is_read_or_refused(folder: Path, name: str, value: Any) -> None:
    read_or_refused(file(folder, json.dumps(LINE | {name: value})))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 400), st.integers(0, 255))
def test_any_flipped_byte_is_read_or_refused(folder: Path, place: int, byte: int) -> None:
    path = file(folder, LINE)
    data = bytearray(path.read_bytes())
    data[place % len(data)] = byte
    path.write_bytes(data)
    read_or_refused(path)


def test_make_answer_checks_lengths() -> None:
    make: Callable[..., Any] = make_answer
    with pytest.raises(ValueError, match="prompt a: logprobs has 1 places, and there are 2 tokens"):
        make("a", "short", "greedy", [1], [2, 3], [-1.0])
