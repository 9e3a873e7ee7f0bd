"""What runs? A case is one line of text with one spelling, and this is its value.

The single letters mirror the MoonEP contract and are used with this meaning everywhere:

==== ==========================================================================
R    ranks of the expert-parallel (EP) group
E    experts of the whole EP group; rank ``r`` owns ``E/R`` of them, contiguously
K    routed experts per token (top-k)
S    tokens that each rank passes to every dispatch
H    hidden size of a dispatched row; with ``k3`` the latent width, and a token of the model is wider
I    intermediate size of an expert
==== ==========================================================================

A case is a ``+``-separated list, e.g. ``genB+R4+E8+K2+S9+hot:5+@slot_used``. Defaults are omitted when a case
is printed, so a case has exactly one spelling: as CLI argument, as pytest id and as file name.
The grammar is in ``grammar``, the words in ``vocabulary``, what can run in ``limits``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from moonep_validate.cases.grammar import (
    MAX_LINE,
    REQUIRED,
    SPECS,
    Spec,
    normalised,
    printed,
    read_token,
    renewed,
    shown,
)
from moonep_validate.cases.limits import check_case, check_geometry
from moonep_validate.errors import CaseError
from moonep_validate.formats.stored import FORMATS

__all__ = ["Case", "CaseError", "Spec"]


@dataclass(frozen=True)
class Case:
    """One problem for one subject: *what* runs, never where or on whom.

    Attributes:
        generation: API generation of MoonEP, ``"A"`` or ``"B"`` (docs/contract.md, Generations).
        R, E, K, S, H, I: sizes, see the module docstring.
        slots: redundant expert slots per rank, generation A only; None means ``E/R``.
        pad: ``token_padding``, the alignment of a group in rows.
        tokens: real tokens per rank, each at most S; the rest of S are padding tokens of route weight 0.
            None means S everywhere.
        routing, fill, model, format, scenario: see ``VOCABULARY``.
        seed: varies all data of the case.
        witnesses: events that must occur in the trace, or the verdict is vacuous.

    Raises:
        CaseError: if a value is outside its limit (contract section Limits).
    """

    generation: str
    R: int
    E: int
    K: int
    S: int
    H: int = 128
    I: int = 128
    slots: int | None = None
    pad: int = 16
    tokens: tuple[int, ...] | None = None
    routing: Spec = Spec("uniform")
    fill: Spec = Spec("ints")
    model: Spec = Spec("moe")
    format: Spec = Spec("bf16")
    scenario: Spec = Spec("base")
    seed: int = 0
    witnesses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _set = object.__setattr__
        for name in SPECS:
            _set(self, name, normalised(getattr(self, name), name))
        _set(self, "witnesses", tuple(sorted({normalised(Spec(w), "witness").name for w in self.witnesses})))
        # R is not checked yet: nothing of that size may be built here
        if self.tokens is not None and len(self.tokens) == self.R and set(self.tokens) == {self.S}:
            _set(self, "tokens", None)
        if self.slots is not None and self.slots == self.E // max(self.R, 1):
            _set(self, "slots", None)
        check_geometry(self.generation, self.R, self.E, self.K, self.S, self.pad, self.slots)
        check_case(self)

    @property
    def experts_per_rank(self) -> int:
        """``E/R``."""
        return self.E // self.R

    @property
    def portable(self) -> bool:
        """Whether real hardware accepts the geometry (docs/contract.md, Limits)."""
        return self.unportable is None

    @property
    def unportable(self) -> str | None:
        """The first limit of real hardware that the geometry misses (docs/contract.md, Limits), or None."""
        if self.R % 2 and self.experts_per_rank % 4:
            return f"R={self.R} is odd, and E/R={self.experts_per_rank} is no multiple of 4"
        missed = FORMATS[self.format.name].unportable(self.H, self.I)
        return f"H={self.H}, I={self.I}: {missed}" if missed else None

    @property
    def refusal(self) -> str:
        """Why nobody can make the data of this case again, or empty."""
        told = "its data are what a served engine was given; `moonep-validate check` judges its trace"
        return told if self.routing.name == "sampled" else ""

    def token_count(self, rank: int) -> int:
        """Real tokens of ``rank``; tokens from this index on are padding."""
        return self.S if self.tokens is None else self.tokens[rank]

    def but(self, **changes: Any) -> Case:
        """The same case with some fields changed."""
        return replace(self, **changes)

    def session(self, **differs: Any) -> Case:
        """The case of a session that differs in some fields: a pass like any other, without the script's limits.

        Args:
            differs: field -> value, a text for a word.
        """
        words = {name: Spec(value) if isinstance(value, str) else value for name, value in differs.items()}
        return self.but(scenario=Spec("base"), witnesses=(), **words)

    def __str__(self) -> str:
        parts = [f"gen{self.generation}"]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name in REQUIRED or value != field.default:
                parts += printed(field.name, value)
        return "+".join(parts)

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read a case line; words that it had in an earlier version are understood, see ``renewed``.

        Raises:
            CaseError: for a typo (the nearest word is suggested), a repeated or missing part, a bad value.
        """
        if len(text) > MAX_LINE:
            raise CaseError(f"a case of {len(text)} characters: the limit is {MAX_LINE}")
        values: dict[str, Any] = {}
        for token in renewed(text).strip().split("+"):
            name, value = read_token(token)
            if name == "witnesses":
                values[name] = (*values.get(name, ()), value)
            elif name in values:
                raise CaseError(f"{shown(token)} sets {name} a second time in {shown(text)}; keep one")
            else:
                values[name] = value
        missing = [name for name in REQUIRED if name not in values]
        if missing:
            raise CaseError(
                f"case {shown(text)} lacks {', '.join(missing)}; a case starts like 'genB+R4+E8+K2+S9'"
            )
        return cls(**values)
