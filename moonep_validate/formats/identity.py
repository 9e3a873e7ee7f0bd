"""Who are these bytes? MXFP4 weights of which every block of 32 codes says where it belongs.

A block's codes are two scrambles of one 64-bit word that holds load, layer, expert, matrix, row and block.
Scrambling is invertible, so ``identify`` reads the word back without a table of candidates; the second scramble is
a checksum, so bytes that are nobody's are known as such. Scale bytes lie within +-6 of 127, so that products stay
exact in float32; 13 values cannot name a place, but neighbours along both axes differ, so a moved scale shows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from moonep_validate.formats import FormatError, mxfp4
from moonep_validate.formats.kimi_k3 import ROLES, Geometry, Source
from moonep_validate.hashing import below, hashed

#: Field -> bits, from the lowest; Kimi-K3 needs 7, 10, 2, 12 and 7 of them.
BITS = {"group": 9, "row": 14, "matrix": 2, "expert": 12, "layer": 8, "load": 5}
MATRICES = tuple(ROLES)
#: Scale bytes are 127 - 6 .. 127 + 6.
LOWEST, COUNT = 121, 13
RADIUS = 6

#: What is left of the word is a mark: random bytes have it in one block of 16,384.
_MAGIC_BITS = 64 - sum(BITS.values())
_MAGIC = 0x2A5B & ((1 << _MAGIC_BITS) - 1)
_ODD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
#: Mixed into the second word of a block, so that it is no copy of the first: half a block never says who it is.
_SECOND = 0x5851F42D4C957F2D
_MASK = 2**64 - 1


@dataclass(frozen=True)
class Identity:
    """Who each block is: int64 tensors ``[..., blocks]``, -1 where the bytes are nobody's."""

    load: Tensor
    layer: Tensor
    expert: Tensor
    matrix: Tensor
    row: Tensor
    group: Tensor

    @property
    def known(self) -> Tensor:
        """Blocks whose bytes name a place."""
        return self.layer >= 0

    def same(self, other: Identity) -> Tensor:
        """Blocks that are known and who ``other`` says."""
        equal = [getattr(self, one.name) == getattr(other, one.name) for one in fields(self)]
        return self.known & torch.stack(equal).all(0)


def identity(rows: int, columns: int, layer: int, expert: int, matrix: str, load: int = 0) -> Identity:
    """Who the blocks of a whole matrix ``[rows, columns]`` are: each field ``[rows, columns/32]``.

    Raises:
        FormatError: for a number that does not fit its field, or a name that is no matrix.
    """
    if matrix not in MATRICES:
        raise FormatError(f"matrix {matrix!r} is not known; known: {', '.join(MATRICES)}")
    blocks = columns // mxfp4.BLOCK
    numbers = {"load": load, "layer": layer, "expert": expert, "row": rows - 1, "group": blocks - 1}
    for name, value in numbers.items():
        if not 0 <= value < 1 << BITS[name]:
            raise FormatError(
                f"{name} {value} cannot be named; at most {(1 << BITS[name]) - 1} fits its {BITS[name]} bits"
            )
    grid = torch.zeros(rows, blocks, dtype=torch.int64)
    return Identity(
        load=grid + load,
        layer=grid + layer,
        expert=grid + expert,
        matrix=grid + MATRICES.index(matrix),
        row=grid + torch.arange(rows)[:, None],
        group=grid + torch.arange(blocks),
    )


def weights(rows: int, columns: int, layer: int, expert: int, matrix: str, load: int = 0) -> tuple[Tensor, Tensor]:
    """The bytes of a matrix that says who it is.

    Returns:
        ``(packed uint8 [rows, columns/2], scale uint8 [rows, columns/32])``.

    Raises:
        FormatError: see ``identity``.
    """
    who = identity(rows, columns, layer, expert, matrix, load)
    return codes_of(who), scales_of(who)


def source(geometry: Geometry, load: int = 0) -> Source:
    """The weights of a whole model, for ``kimi_k3.write_checkpoint``."""

    def make(layer: int, expert: int, matrix: str) -> tuple[Tensor, Tensor]:
        return weights(*geometry.matrix(matrix), layer, expert, matrix, load)

    return make


def codes_of(who: Identity) -> Tensor:
    """Packed codes, 16 bytes a block, uint8 ``[..., 16 * blocks]``."""
    word = torch.zeros_like(who.layer) + _MAGIC
    for name in reversed(BITS):
        word = (word << BITS[name]) | getattr(who, name)
    words = torch.stack([_scramble(word), _scramble(word ^ _signed(_SECOND))], dim=-1)
    return words.contiguous().view(torch.uint8).flatten(-2)


def scales_of(who: Identity) -> Tensor:
    """Scale bytes, uint8 ``[..., blocks]``: 13 blocks of a row differ, as do 13 rows from a multiple of 13 on."""
    run = hashed("scale", 0, who.load, who.layer, who.expert, who.matrix, who.row // COUNT)
    along = 1 + below(run, COUNT - 1)
    down = 1 + (along + below(run >> 16, COUNT - 2)) % (COUNT - 1)  # never the same step
    place = below(run >> 32, COUNT) + down * who.row + along * who.group
    return (LOWEST + place % COUNT).to(torch.uint8)


def identify(packed: Tensor) -> Identity:
    """Read who the bytes are.

    Args:
        packed: uint8 or int8 ``[..., 16 * blocks]``, in the order of the checkpoint.

    Returns:
        Fields ``[..., blocks]``.
    """
    words = mxfp4.as_bytes(packed).contiguous().unflatten(-1, (-1, 16)).view(torch.int64)
    word = _unscramble(words[..., 0])
    known = (word >> (64 - _MAGIC_BITS)) & ((1 << _MAGIC_BITS) - 1) == _MAGIC
    known &= words[..., 1] == _scramble(word ^ _signed(_SECOND))
    found: dict[str, Tensor] = {}
    for name, bits in BITS.items():
        found[name] = torch.where(known, word & ((1 << bits) - 1), -1)
        word >>= bits
    return Identity(**found)


def identify_values(values: Tensor) -> Identity:
    """Read who decoded weights are, whatever scale of ours they were decoded with.

    Args:
        values: float ``[..., 32 * blocks]``; a factor of ``2**-6 .. 2**6`` on a block is allowed for.
    """
    blocks = values.double().unflatten(-1, (-1, mxfp4.BLOCK))
    found = identify(torch.zeros(*blocks.shape[:-1], mxfp4.BLOCK // 2, dtype=torch.uint8).flatten(-2))
    for power in range(-RADIUS, RADIUS + 1):
        codes = mxfp4.encode_elements(blocks * 2.0**-power)
        who = identify(mxfp4.pack(codes).flatten(-2))
        found = _either(who, found)
    return found


def _either(first: Identity, second: Identity) -> Identity:
    """The first where it is known, else the second."""
    names = [one.name for one in fields(Identity)]
    return Identity(**{n: torch.where(first.known, getattr(first, n), getattr(second, n)) for n in names})


def findings(packed: Tensor, scale: Tensor, due: Identity) -> list[str]:
    """Say what is wrong with one matrix, in words; empty if it is all as due.

    Args:
        packed, scale: as loaded, ``[rows, columns/2]`` and ``[rows, columns/32]``.
        due: who should be there, fields ``[rows, columns/32]``.

    Returns:
        One line per kind of fault, e.g. ``got expert 5 up rows 0-95 where expert 3 gate rows 0-95 were due``.
    """
    got = identify(packed)
    lines = _unknown(packed) if not bool(got.known.all()) else []
    pairs = _groups(got, due)
    lines += [_wrong_place(got, due, at) for at in pairs]
    owner = _either(got, due)
    if bool((wrong := mxfp4.as_bytes(scale) != scales_of(owner)).any()):
        lines.append(_scale_line(scale, owner, wrong))
    return lines


def _unknown(packed: Tensor) -> list[str]:
    """Blocks that name nobody: find the nibble order that they would name somebody in."""
    bytes = mxfp4.as_bytes(packed)
    codes = mxfp4.unpack(bytes).unflatten(-1, (-1, mxfp4.BLOCK))
    split = codes.unflatten(-1, (16, 2)).transpose(-1, -2).flatten(-2)
    orders = {
        "the nibbles of a byte are swapped": bytes >> 4 | bytes << 4,
        "low nibbles hold elements 0-15, high ones 16-31 (GGML order)": mxfp4.pack(split.flatten(-2)),
    }
    missing = ~identify(bytes).known
    for why, other in orders.items():
        if bool(identify(other).known[missing].all()):
            return [f"{int(missing.sum())} blocks are right in another nibble order: {why}"]
    row, group = (int(i) for i in missing.nonzero()[0])
    return [
        f"{int(missing.sum())} of {missing.numel()} blocks are nobody's bytes, first at row {row}, block {group}"
    ]


def _groups(got: Identity, due: Identity, limit: int = 3) -> list[Tensor]:
    """Masks of known blocks in a wrong place, by who they are and who was due there; the largest first."""
    wrong = got.known & ~got.same(due)
    keys = torch.zeros_like(got.load)
    for who, names in ((got, ("load", "layer", "expert", "matrix")), (due, ("expert", "matrix"))):
        for name in names:  # 41 bits
            keys = keys << BITS[name] | getattr(who, name)
    kinds, of, count = torch.unique(keys[wrong], return_inverse=True, return_counts=True)
    masks = []
    for kind in count.argsort(descending=True)[:limit].tolist() if len(kinds) else ():
        mask = torch.zeros_like(wrong)
        mask[wrong] = of == kind
        masks.append(mask)
    return masks


def _wrong_place(got: Identity, due: Identity, at: Tensor) -> str:
    row, group = (int(i) for i in at.nonzero()[0])
    first = f"first at row {row}, block {group}, which holds row {int(got.row[row, group])}, block "
    return (
        f"got {_spell(got, due, at)} where {_spell(due, got, at)} was due "
        f"({int(at.sum())} blocks, {first}{int(got.group[row, group])})"
    )


def _spell(who: Identity, other: Identity, at: Tensor) -> str:
    """``expert 3 gate``, and whatever else differs between the two: load, layer, rows, blocks."""
    words = [f"expert {int(who.expert[at][0])} {ROLES[MATRICES[int(who.matrix[at][0])]]}"]
    for name, word in (("row", "rows"), ("group", "blocks"), ("layer", "layer"), ("load", "load")):
        mine = getattr(who, name)[at]
        if bool((mine != getattr(other, name)[at]).any()) or name == "row":
            words.append(f"{word} {_range(mine)}")
    return " ".join(words)


def _range(numbers: Tensor) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    return str(low) if low == high else f"{low}-{high}"


def _scale_line(scale: Tensor, owner: Identity, wrong: Tensor) -> str:
    got = mxfp4.as_bytes(scale)
    row, group = (int(i) for i in wrong.nonzero()[0])
    text = (
        f"{int(wrong.sum())} of {wrong.numel()} scale bytes are not those of their codes, first at row {row}, "
        f"block {group}: expected {int(scales_of(owner)[row, group])}, got {int(got[row, group])}"
    )
    rows = (scales_of(owner) == got[row]).all(-1).nonzero().flatten().tolist()
    return text + (f"; these are the scales of row {rows[0]}" if len(rows) == 1 and rows[0] != row else "")


def _scramble(x: Tensor) -> Tensor:
    """A bijection of 64-bit words: odd multipliers and xor-shifts by half a word, each with an inverse."""
    for odd in _ODD:
        x = x * _signed(odd)
        x = x ^ ((x >> 32) & 0xFFFFFFFF)
    return x


def _unscramble(x: Tensor) -> Tensor:
    for odd in reversed(_ODD):
        x = x ^ ((x >> 32) & 0xFFFFFFFF)
        x = x * _signed(pow(odd, -1, 2**64))
    return x


def _signed(word: int) -> int:
    word &= _MASK
    return word - (word >> 63 << 64)
