"""What is asked? Prompts by token ids, from a hash: no text, no licence, the same on every machine.

Each group aims at one way in which a served layer is driven: the number of tokens of a step, how uneven they are
over ranks, how often an expert is chosen in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from moonep_validate.errors import CaseError
from moonep_validate.hashing import below, hashed
from moonep_validate.trace.schema import SchemaError, Within, build, decoded, parsed, read_bytes

#: Ids below are special tokens in most vocabularies (padding, begin, end).
FIRST_ID = 8
_LONG, _SHORT = 192, 6
#: Bytes of a file of prompts.
_LIMIT = 256 * 2**20


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        name: unique.
        group: why it is asked.
        tokens: ids.
        max_tokens: how many tokens shall come.
    """

    name: str
    group: str
    tokens: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Group:
    """A kind of prompt.

    Attributes:
        why: one sentence for tables.
        make: (index, vocabulary size, seed) -> token ids and how many shall come.
    """

    why: str
    make: Callable[[int, int, int], tuple[list[int], int]]


def _ids(name: str, index: int, vocab: int, seed: int, length: int) -> list[int]:
    bits = hashed(f"prompt/{name}", seed, index, torch.arange(length))
    return (below(bits, vocab - FIRST_ID) + FIRST_ID).tolist()


def _short(index: int, vocab: int, seed: int) -> tuple[list[int], int]:
    return _ids("short", index, vocab, seed, _SHORT + index % 5), 24


def _one(index: int, vocab: int, seed: int) -> tuple[list[int], int]:
    return _ids("one", index, vocab, seed, 1), 16


def _decode(index: int, vocab: int, seed: int) -> tuple[list[int], int]:
    return _ids("decode", index, vocab, seed, 3), 64


def _prefill(index: int, vocab: int, seed: int) -> tuple[list[int], int]:
    return _ids("prefill", index, vocab, seed, _LONG - 7 * (index % 9)), 2


def _repeated(index: int, vocab: int, seed: int) -> tuple[list[int], int]:
    return _ids("repeated", index, vocab, seed, 1) * (16 + index % 17), 12


def _pattern(index: int, vocab: int, seed: int) -> tuple[list[int], int]:
    return _ids("pattern", index, vocab, seed, 3 + index % 3) * 9, 12


def _uneven(index: int, vocab: int, seed: int) -> tuple[list[int], int]:
    length = (1, 2, 5, 127, 128, 129)[index % 6]
    return _ids("uneven", index, vocab, seed, length), 8 + index % 9


GROUPS: dict[str, Group] = {
    "short": Group("a few tokens, as a chat turn begins", _short),
    "one": Group("one token alone: all ranks but one may have none", _one),
    "decode": Group("long answers: steps of one token a sequence", _decode),
    "prefill": Group("long prompts: full batches that fill the capacity", _prefill),
    "repeated": Group("one id again and again: the same experts for all tokens", _repeated),
    "pattern": Group("a short pattern repeated: few experts, close router margins", _pattern),
    "uneven": Group("lengths around 128 beside lengths of one: uneven batches", _uneven),
}


def make_prompts(vocab: int, count: int, seed: int = 0, longest: int | None = None) -> list[Prompt]:
    """Prompts of all groups in turn.

    Args:
        vocab: size of the vocabulary; ids from ``FIRST_ID`` on are drawn.
        count: how many.
        seed: of the hash.
        longest: tokens of a sequence at most, prompt and answer together; longer prompts are cut.

    Raises:
        CaseError: for a vocabulary or a count that is too small.
    """
    if vocab <= FIRST_ID:
        raise CaseError(f"a vocabulary of {vocab} ids has none above the special ones (below {FIRST_ID})")
    if count < 1:
        raise CaseError(f"{count} prompts: at least 1 is needed")
    made = []
    for number in range(count):
        group = tuple(GROUPS)[number % len(GROUPS)]
        tokens, more = GROUPS[group].make(number // len(GROUPS), vocab, seed)
        if longest is not None:
            more = min(more, max(1, longest - 1))
            tokens = tokens[: longest - more]
        made.append(Prompt(f"{group}-{number // len(GROUPS)}", group, tuple(tokens), more))
    return made


@dataclass(frozen=True)
class _Line:
    name: str
    tokens: list[int]
    group: str = "own"
    max_tokens: Annotated[int, Within(1, 2**20)] = 16


def read_prompts(path: Path) -> list[Prompt]:
    """The user's own prompts: JSON Lines with name, tokens, and if wanted group and max_tokens.

    Raises:
        CaseError: naming the file and the line.
    """
    found: dict[str, Prompt] = {}
    number = 0
    try:
        for text in decoded(read_bytes(path, _LIMIT)).splitlines():
            number += 1
            line = build(_Line, parsed(text))
            if line.name in found or not line.tokens or min(line.tokens) < 0:
                why = (
                    "its name is there twice" if line.name in found else "tokens must be ids from 0, at least one"
                )
                raise SchemaError(f"prompt {line.name[:40]}: {why}")
            found[line.name] = Prompt(line.name, line.group, tuple(line.tokens), line.max_tokens)
    except OSError as error:
        raise CaseError(f"{path} cannot be read: {error.strerror}") from None
    except SchemaError as error:
        raise CaseError(f"{path}, line {number}: {error}") from None
    if not found:
        raise CaseError(f"{path} holds no prompts")
    return list(found.values())
