"""What was asked of a served model, and what came? One file format, JSON Lines, that is judged without any engine.

The first line says who answered. Every further line is one answer: the token ids that were asked, the tokens that
came, the log probability of each, and the largest few at each place. A line is one dataclass, checked on reading.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from moonep_validate.errors import CaseError
from moonep_validate.trace.schema import SchemaError, build, parsed

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

FORMAT = 1
KIND = "moonep-validate answers"
#: A line of more bytes is refused: 32,768 tokens with 20 alternatives each take about 10 MB.
MAX_LINE = 64 * 2**20
#: Fields of a line with a number for each token.
_LONG = ("logprobs", "prompt_logprobs", "top_ids", "top_logprobs")
#: The run that is compared: greedy tokens, each prompt once. Every other run of a side is a measure of its noise.
GREEDY = "greedy"
#: The other side's tokens as a prompt: log probabilities of all of them, though this side would say others.
FORCED = "forced"


@dataclass(frozen=True)
class PathTaken:
    """What taps inside the engine counted, one number a rank.

    Attributes:
        dispatches: calls of ``Buffer.dispatch``.
        slots_used: dispatches whose plan put rows into a prefetched slot.
        real_rows: rows of real tokens, not of padding, that were computed from a slot; empty where not counted.
    """

    dispatches: list[int]
    slots_used: list[int]
    real_rows: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Layers:
    """What became of the MoE layer calls that were sampled inside the engine.

    Attributes:
        calls: how many were judged.
        layers: which MoE layers they were of, counted from 0 in the order of the model.
        status: the worst of their verdicts.
        said: one sentence.
    """

    calls: int
    layers: list[int]
    status: str
    said: str


@dataclass(frozen=True)
class Who:
    """Who answered.

    Attributes:
        engine, version, revision: what served.
        model: name or folder, for people.
        dtype: of activations, e.g. ``float32`` or ``bfloat16``; empty where nobody said.
        backend: the expert-parallel backend as the engine itself reports it.
        arguments: of the engine, without secrets.
        path: what taps saw, or None where there were none.
        expects: the path that must have been used, e.g. ``moonep``.
        vocab: size of the vocabulary; 0 where nobody said.
        layers: the verdict on its sampled MoE layer calls, or None where there were no taps.
    """

    engine: str
    version: str = ""
    revision: str = ""
    model: str = ""
    dtype: str = ""
    backend: str = ""
    arguments: list[str] = field(default_factory=list)
    path: PathTaken | None = None
    expects: str = ""
    vocab: int = 0
    layers: Layers | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, (self.engine, self.version, self.dtype, self.backend)))


@dataclass(frozen=True)
class _Head:
    kind: str
    format: int
    who: Who
    recording: str = ""


@dataclass(frozen=True)
class _Line:
    prompt: str
    group: str
    run: str
    asked: list[int]
    tokens: list[int]
    logprobs: list[Any]
    top_ids: list[list[int]]
    top_logprobs: list[list[Any]]
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish: str = ""
    error: str = ""


@dataclass(frozen=True, eq=False)
class Answer:
    """One answer.

    Attributes:
        prompt: name of the prompt, unique in its run.
        group: the group of prompts that it belongs to.
        run: ``greedy``, ``forced``, or the name of a repetition.
        asked: int64 ``[P]``, token ids of the prompt.
        tokens: int64 ``[T]``, what came; of a forced run what was given.
        logprobs: float64 ``[T]``, natural logarithms; NaN where the engine gave none.
        top_ids, top_logprobs: ``[T, N]``, the largest ones at each place; -1 and NaN fill up.
        prompt_logprobs: float64 ``[P]`` of the asked tokens, the first one NaN; empty where not asked for.
        finish: why it ended, as the engine says.
        error: what went wrong in place of an answer, or empty.
        bad: how many of the numbers that the engine gave were NaN or infinite.
    """

    prompt: str
    group: str
    run: str
    asked: Ints
    tokens: Ints
    logprobs: Floats
    top_ids: Ints
    top_logprobs: Floats
    prompt_logprobs: Floats
    finish: str = ""
    error: str = ""
    bad: int = 0


def make_answer(
    prompt: str,
    group: str,
    run: str,
    asked: Iterable[int],
    tokens: Iterable[int] = (),
    logprobs: Iterable[float | None] = (),
    top: Iterable[dict[int, float]] = (),
    prompt_logprobs: Iterable[float | None] = (),
    finish: str = "",
    error: str = "",
) -> Answer:
    """An answer from what a client has in hand; ``top`` maps token id to log probability, one dict a token."""
    tops = [sorted(one.items(), key=lambda pair: -pair[1]) for one in top]
    line = _Line(
        prompt,
        group,
        run,
        list(asked),
        list(tokens),
        list(logprobs),
        [[token for token, _ in one] for one in tops],
        [[value for _, value in one] for one in tops],
        list(prompt_logprobs),
        finish,
        error,
    )
    return _answer(line, f"prompt {prompt}")


def _answer(line: _Line, where: str) -> Answer:
    _check_lengths(line, where)
    top_ids, top_logprobs = _square(line, where)
    logprobs = _numbers(line.logprobs or [None] * len(line.tokens), where)
    prompt_logprobs = _numbers(line.prompt_logprobs, where)
    given = [line.logprobs, line.prompt_logprobs, *line.top_logprobs]
    finite = sum(int(np.isfinite(values).sum()) for values in (logprobs, prompt_logprobs, top_logprobs))
    return Answer(
        line.prompt,
        line.group,
        line.run,
        np.array(line.asked, dtype=np.int64),
        np.array(line.tokens, dtype=np.int64),
        logprobs,
        top_ids,
        top_logprobs,
        prompt_logprobs,
        line.finish,
        line.error,
        sum(len(values) - values.count(None) for values in given) - finite,
    )


def _check_lengths(line: _Line, where: str) -> None:
    count = len(line.tokens)
    for name in ("logprobs", "top_ids", "top_logprobs"):
        if (got := len(getattr(line, name))) not in (0, count):
            raise SchemaError(f"{where}: {name} has {got} places, and there are {count} tokens")
    if len(line.prompt_logprobs) not in (0, len(line.asked)):
        raise SchemaError(
            f"{where}: prompt_logprobs has {len(line.prompt_logprobs)} places, and {len(line.asked)} were asked"
        )
    for name in ("top_ids", "top_logprobs"):
        if not set(map(type, getattr(line, name))) <= {list}:
            raise SchemaError(f"{where}: {name} must be a list of lists, one for each token")
    if list(map(len, line.top_ids)) != list(map(len, line.top_logprobs)):
        raise SchemaError(f"{where}: top_ids and top_logprobs differ in length")


def _square(line: _Line, where: str) -> tuple[Ints, Floats]:
    """The alternatives as arrays ``[T, N]``, filled up with -1 and NaN."""
    counts = np.array([len(one) for one in line.top_ids] or [0] * len(line.tokens), dtype=np.int64)
    known = np.arange(counts.max(initial=0)) < counts[:, None]
    flat = list(chain.from_iterable(line.top_ids))
    if not set(map(type, flat)) <= {int} or (flat and (min(flat) < 0 or max(flat) >= 2**63)):
        raise SchemaError(f"{where}: top_ids must be token ids, whole numbers from 0")
    ids, values = np.full(known.shape, -1, dtype=np.int64), np.full(known.shape, np.nan)
    ids[known] = flat
    values[known] = _numbers(list(chain.from_iterable(line.top_logprobs)), where)
    return ids, values


def _numbers(values: Sequence[Any], where: str) -> Floats:
    """Numbers, with NaN for null."""
    if set(map(type, values)) <= {int, float, type(None)}:
        with suppress(OverflowError):
            return np.array(values, dtype=np.float64)  # null is None, and becomes NaN
    raise SchemaError(f"{where}: log probabilities must be numbers or null")


@dataclass(eq=False)
class Answers:
    """All answers of one side.

    Attributes:
        who: who answered.
        runs: run -> prompt -> answer, in the order in which they were asked.
        name: what errors and reports call this side.
        recording: drawn when a side is asked, and kept by every copy of its file: two sides with the same one are
            one recording. Empty in a file that does not say.
    """

    who: Who
    runs: dict[str, dict[str, Answer]] = field(default_factory=dict)
    name: str = ""
    recording: str = field(default_factory=lambda: uuid4().hex)

    def add(self, answer: Answer) -> None:
        """Take an answer.

        Raises:
            SchemaError: if the prompt has one in this run already.
        """
        run = self.runs.setdefault(answer.run, {})
        if answer.prompt in run:
            raise SchemaError(f"prompt {answer.prompt} is answered twice in run {answer.run}")
        run[answer.prompt] = answer

    def run(self, name: str) -> dict[str, Answer]:
        """The answers of one run; none if there is no such run."""
        return self.runs.get(name, {})

    @property
    def again(self) -> list[str]:
        """Names of the runs in which the same was asked once more."""
        return [name for name in self.runs if name not in (GREEDY, FORCED)]


def write(answers: Answers, path: Path) -> None:
    """Write a file of answers.

    Raises:
        CaseError: if it cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(lines(answers))
    except OSError as error:
        raise CaseError(f"{path} cannot be written: {error.strerror}") from None


def lines(answers: Answers) -> Iterator[str]:
    """The lines of a file of answers."""
    yield head_line(answers.who, answers.recording)
    for run in answers.runs.values():
        yield from map(line_of, run.values())


def head_line(who: Who, recording: str) -> str:
    """The first line of a file of answers."""
    return json.dumps(asdict(_Head(KIND, FORMAT, who, recording))) + "\n"


def line_of(one: Answer) -> str:
    """The line of an answer."""
    return json.dumps(_as_line(one)) + "\n"


def _as_line(one: Answer) -> dict[str, Any]:
    known = one.top_ids >= 0
    line = _Line(
        one.prompt,
        one.group,
        one.run,
        one.asked.tolist(),
        one.tokens.tolist(),
        _or_null(one.logprobs),
        [ids[mask].tolist() for ids, mask in zip(one.top_ids, known, strict=True)],
        [values[mask].tolist() for values, mask in zip(one.top_logprobs, known, strict=True)],
        _or_null(one.prompt_logprobs),
        one.finish,
        one.error,
    )
    return vars(line)


def _or_null(values: Floats) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]


def read(path: Path) -> Answers:
    """Read a file of answers, line by line.

    Raises:
        CaseError: if it cannot be read, is no file of answers, or a line is not of the promised form.
    """
    number = 0
    try:
        if not path.is_file():
            raise CaseError(f"{path} is no file")
        with path.open("rb") as file:
            answers: Answers | None = None
            while data := file.readline(MAX_LINE + 1):
                number += 1
                if len(data) > MAX_LINE:
                    raise SchemaError(f"is longer than {MAX_LINE} bytes")
                content = parsed(data.decode("utf-8"))
                if answers is None:
                    head = _head(content)
                    answers = Answers(head.who, name=str(path), recording=head.recording)
                else:
                    line = _line(content)
                    answers.add(_answer(line, f"prompt {line.prompt[:40]}"))
    except OSError as error:
        raise CaseError(f"{path} cannot be read: {error.strerror}") from None
    except (SchemaError, UnicodeDecodeError) as error:
        raise CaseError(f"{path}, line {number}: {error}") from None
    if answers is None:
        raise CaseError(f"{path} is empty; `moonep-validate compare SIDE --save FILE` writes such files")
    return answers


def _line(content: Any) -> _Line:
    """A line by its schema; long lists are only lists here, ``_answer`` checks them at the speed of C."""
    long = {name: content[name] for name in _LONG if name in content} if isinstance(content, dict) else {}
    line = build(_Line, {**content, **{name: [] for name in long}} if long else content)
    for name, value in long.items():
        if not isinstance(value, list):
            raise SchemaError(f"{name} must be a list")
    return replace(line, **long)


def _head(content: Any) -> _Head:
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise SchemaError(f'the first line must say who answered, with "kind": "{KIND}"')
    if content.get("format") != FORMAT:
        raise SchemaError(f"has format {content.get('format')}, this version reads {FORMAT}: record anew")
    return build(_Head, content)
