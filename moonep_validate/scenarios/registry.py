"""Which scenarios are there? One decorator declares all that anybody needs to know of one.

Case lines, help texts and the pytest plugin read these declarations, and none of them may cost an import of torch.
So scripts import types only: tensors come from the rig that they get, which stands in a room above (``sessions``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from moonep_validate.errors import CaseError

if TYPE_CHECKING:
    from moonep_validate.cases.case import Case
    from moonep_validate.sessions.rig import Rig

    Script = Callable[[Rig], None]
    Limit = Callable[[Case], "str | None"]

Need = Literal["buffer", "engine", "gpu", "gradients", "destructive"]


@dataclass(frozen=True)
class Scenario:
    """What a script is, and what it needs.

    Attributes:
        script: what each rank runs; its docstring is the sentence that ``moonep-validate cases`` prints.
        args: names of its arguments in the case line, and what reads each (it raises ValueError for a bad one).
        needs: ``buffer``, calls of a Buffer stage by stage; ``engine``, calls of an engine around it; ``gpu``;
            ``gradients``, of unpacked weights in E/R slots; ``destructive``, leave to give bad input on which
            upstream is undefined.
        models: which models it can run.
        limits: why a case cannot be run by it, as the end of a sentence that its name begins, or None.
        injects: it makes rows of its own for combine, so that the fill ``cancel`` has a meaning.
        packs: what it prefetches are bytes in shapes of their own, whatever the case's format.
        overlaps: batches are in flight at a time, so that only stamps of leases prove their order.
    """

    script: Script
    args: Mapping[str, Callable[[str], object]] = field(default_factory=dict)
    needs: tuple[Need, ...] = ()
    models: tuple[str, ...] = ("moe",)
    limits: tuple[Limit, ...] = ()
    injects: bool = False
    packs: bool = False
    overlaps: bool = False

    @property
    def name(self) -> str:
        """Its word in a case line."""
        return self.script.__name__

    @property
    def usage(self) -> str:
        """The word with its arguments, as a help text shows it."""
        return self.name + (":" + ",".join(self.args) if self.args else "")

    @property
    def sentence(self) -> str:
        """What it does, and what it needs that not every subject has."""
        said = (self.script.__doc__ or "").splitlines()[0].rstrip(".")
        said = said if said[1:2].isupper() else said[:1].lower() + said[1:]
        return f"{said} (needs: {', '.join(self.needs)})" if self.needs else said


#: Word -> scenario, in the order in which the modules declare them.
SCENARIOS: dict[str, Scenario] = {}


def scenario(
    *,
    args: Mapping[str, Callable[[str], object]] | None = None,
    needs: tuple[Need, ...] = (),
    models: tuple[str, ...] = ("moe",),
    limits: tuple[Limit, ...] = (),
    injects: bool = False,
    packs: bool = False,
    overlaps: bool = False,
) -> Callable[[Script], Script]:
    """Declare a script as the scenario of its name; the arguments are those of ``Scenario``."""

    def declare(script: Script) -> Script:
        SCENARIOS[script.__name__] = Scenario(script, args or {}, needs, models, limits, injects, packs, overlaps)
        return script

    return declare


def unlike(case: Case, **changes: int) -> str | None:
    """Why a case has no sessions that differ from it so, as the end of a sentence, or None."""
    try:
        case.session(**changes)
    except CaseError as error:
        return f"needs sessions with {changes}, which the case does not allow: {error}"
    return None
