"""What stands in a trace file beside its tensors? Everything that JSON can hold, checked before it is believed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from moonep_validate.trace.schema import SchemaError, Within, build, build_known, shown

ORIGINS = ("real", "reference", "stand-in", "none")
#: Calls of all ranks, and the size of an axis.
MAX_CALLS, MAX_AXIS = 2**16, 2**24


@dataclass(frozen=True)
class Part:
    """What stood behind one stage.

    Attributes:
        origin: ``real`` (the package under test), ``reference`` (ours) or ``stand-in`` (ours, in a real
            package's place), ``none`` (no such stage runs).
        package, version, revision, dirty, editable, url, file: what was imported, see provenance.py.
        policy: ``upstream`` where the part promises upstream's exact plan and rounding, else ``legal``.
        seams: where code was replaced; each lowers the level.
        rounds: rounding points beyond those of the reference experts (oracle/arithmetic.py).
        doubts: why it is not known to be the package that it says it is, see subjects/vouch.py.
        digest: of the files that were imported.
    """

    origin: str
    package: str
    version: str
    revision: str | None = None
    dirty: str | None = None
    editable: bool = False
    url: str | None = None
    file: str = ""
    policy: str = "legal"
    seams: tuple[str, ...] = ()
    rounds: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    digest: str = ""

    @property
    def level(self) -> str:
        """What a result of this part counts as; real code in which something was replaced is ``patched``."""
        if self.origin != "real":
            return self.origin
        return "unverified" if self.doubts else "patched" if self.seams else "real"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Part:
        """Read ``asdict`` after a trip through JSON.

        Raises:
            SchemaError: for anything else.
        """
        return build(cls, data, "part")


@dataclass(frozen=True)
class Relation:
    """A promise between steps: the named taps of ``step`` equal those of ``base``, moved or summed as it says.

    It is data, so that judging needs neither the case's data nor its scenario.

    Attributes:
        id: which promise of docs/contract.md it is an instance of.
        taps: ``op.tensor`` names; of row buffers only the rows inside groups count, the rest is undefined.
        tokens: for taps of ``[R, S, ...]``: for each token of each rank of ``step`` the token ``rank * S + token``
            of ``base`` that it must equal, or -1 where nothing is promised. None: each its own.
        terms: steps and factors whose sum takes the place of ``base``, computed in float64. Without terms the
            taps agree bit for bit; with them by value: +0 equals -0, and NaN equals nothing.
    """

    id: str
    step: str
    base: str
    taps: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...] | None = None
    terms: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Said:
    """What a rank says of a part that it imported.

    Attributes:
        package, file, digest: as in ``Part``.
        reference: whether this suite's reference ran in its place.
    """

    package: str
    file: str
    digest: str
    reference: bool


@dataclass(frozen=True)
class _Error:
    """What a call raised, see ``Call``."""

    type: str
    message: str
    where: str
    peer: bool


@dataclass(frozen=True)
class _Form:
    """The form of a tensor when it was recorded, see ``trace.form_of``."""

    shape: list[Annotated[int, Within(0, MAX_AXIS)]]
    dtype: str
    device: str
    contiguous: bool


_Size = Annotated[int, Within(1, MAX_AXIS)]


@dataclass(frozen=True)
class _Differs:
    """In what a session differs from its case, see ``Recorder.of``."""

    R: _Size | None = None
    E: _Size | None = None
    K: _Size | None = None
    S: _Size | None = None
    H: _Size | None = None
    I: _Size | None = None
    pad: _Size | None = None
    slots: _Size | None = None
    seed: int | None = None
    format: str | None = None
    ranks: list[Annotated[int, Within(0, 127)]] | None = None


@dataclass(frozen=True)
class _Info:
    """JSON data of a call that the judge reads; there may be more."""

    layer: Annotated[int, Within(0, 10**6)] | None = None
    tokens: Annotated[int, Within(0, MAX_AXIS)] | None = None
    slots: Annotated[int, Within(1, MAX_AXIS)] | None = None
    differs: _Differs | None = None
    sizes: dict[str, int] | None = None
    repeat: Annotated[int, Within(0, 10**6)] | None = None
    living: int | None = None
    changed: list[str] | None = None
    leases: list[dict[str, Any]] | None = None
    inputs: list[str] | None = None
    forms: dict[str, _Form] | None = None
    what: str | None = None
    wanted: str | None = None
    raised: str | None = None
    message: str | None = None


@dataclass(frozen=True)
class CallHead:
    """A call without its tensors."""

    step: str
    op: str
    info: dict[str, Any]
    error: _Error | None
    done: bool

    def checked(self) -> None:
        """Check those of its JSON data that the judge reads.

        Raises:
            SchemaError: for a wrong type.
        """
        build_known(_Info, self.info, f"{self.op} of {self.step}: info")


@dataclass(frozen=True)
class _Hung:
    """A rank whose deadline passed."""

    rank: Annotated[int, Within(0, 127)]
    stack: str
    deadline: float


@dataclass(frozen=True)
class _LostRank:
    """What reports say of a rank of an autopsy; there is more."""

    rank: int
    state: str
    completed: str
    collective: int


@dataclass(frozen=True)
class _Autopsy:
    """What reports say of an autopsy (worlds/autopsy.py); there is more."""

    diagnosis: str
    ranks: list[dict[str, Any]]


@dataclass(frozen=True)
class Head:
    """Everything in a trace file but its tensors."""

    format: int
    case: str
    subject: str
    calls: list[list[CallHead]]
    parts: dict[str, Part]
    relations: list[Relation]
    hung: list[_Hung]
    errors: list[str]
    autopsy: dict[str, Any]
    proves: str
    leaves_open: str
    not_run: str
    reproducer: str
    keep: str
    layer_door: bool = False
    faults: list[str] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)

    def checked(self) -> Head:
        """Check what type hints do not say.

        Raises:
            SchemaError: for too many calls, an unknown origin, or free data of a wrong form.
        """
        if sum(map(len, self.calls)) > MAX_CALLS:
            raise SchemaError(f"it has more than {MAX_CALLS} calls")
        if bad := [part.origin for part in self.parts.values() if part.origin not in ORIGINS]:
            raise SchemaError(f"a part's origin is {shown(bad[0])}; known: {', '.join(ORIGINS)}")
        if self.autopsy:
            for number, rank in enumerate(build_known(_Autopsy, self.autopsy, "autopsy").ranks):
                build_known(_LostRank, rank, f"autopsy.ranks[{number}]")
        for call in (call for rank in self.calls for call in rank):
            call.checked()
        return self
