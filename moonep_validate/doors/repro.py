"""How do people without this suite see a failing case? A script of at most 100 lines that needs only torch.

The text around the case is ``repro_template.py.txt``. Its data is not the case's: rows, route weights and expert
weights are small integers that name where they come from, so that a finding reads without tools.
"""

from __future__ import annotations

from keyword import iskeyword
from pathlib import Path
from string import Template

from moonep_validate.cases.case import Case, CaseError
from moonep_validate.cases.layout import Layout
from moonep_validate.data.routing import topk_ids
from moonep_validate.scenarios import SCENARIOS

#: What people read in a bug report; a larger routing has to be shrunk first.
MAX_LINES = 100
MAX_ROUTES = 4096
MAX_EXPERTS = 4096
_TILE = 128

#: Scenario -> the passes that the script makes.
PASSES: dict[str, tuple[str, ...]] = {
    "base": ("plain",),
    "variants": ("plain", "again", "async_finish", "zero_copy", "replay"),
    "combine_only": ("plain", "again", "zero_copy"),
}

_SETUP = {
    "A": """
full = torch.stack([weight(expert) for expert in [*range(E), *[-1] * $B]], dim=1).to(device)  # all experts, slots
slots, arguments = full[:, E:], {f"full_{part}_weight": full[n] for n, part in enumerate(("gate", "up", "down"))}
""",
    "B": """
local = torch.stack([weight(rank * E // R + n) for n in range(E // R)], dim=1).to(device)
pools = list(torch.zeros(3, R, E // R, 128, 128, dtype=bf16, device=device))
if cuda and hasattr(moonep, "buffer"):  # peers write into my slots: these must be memory that they map
    size = [moonep.buffer.pad_dim0_for_alignment([E // R, 128, 128], bf16), 128, 128]
    pools = [moonep.buffer.create_nvl_dist_tensor(size, bf16, rank, R).view(R, *size)[:, : E // R] for _ in pools]
slots, parts = [pool[rank] for pool in pools], ("gate", "up", "down")
arguments = {f"local_{part}_weight": local[n] for n, part in enumerate(parts)}
arguments |= {f"{part}_prefetch_buffer": pools[n] for n, part in enumerate(parts)}
""",
}
_GROUPS = {"A": "range(E)", "B": "range(rank * E // R, (rank + 1) * E // R)"}


def standalone(case: Case, module: str) -> str:
    """A script for ``torchrun --nproc-per-node R`` that judges one case on ``module``.

    Args:
        case: its scenario is one of ``PASSES``; its routing is written into the script.
        module: the importable package with MoonEP's ``Buffer`` of the case's generation.

    Raises:
        CaseError: if the case cannot be written as a script; the message says why and what can.
    """
    _refuse(case, module)
    layout, hidden = Layout.of(case), -(-case.H // _TILE) * _TILE
    generation = case.generation
    values = {
        "module": module,
        "case": str(case),
        "R": str(case.R),
        "note": _note(case, hidden),
        "sizes": _listed([case.R, case.E, case.K, case.S, case.pad, hidden, layout.num_rows]),
        "tokens": str([case.token_count(rank) for rank in range(case.R)]),
        "passes": "[" + ", ".join(f'"{name}"' for name in PASSES[case.scenario.name]) + "]",
        "scales": _scales(case),
        "setup": Template(_SETUP[generation].strip()).substitute(B=layout.num_slots),
        "slots": f", B={layout.num_slots}" if generation == "A" else "",
        "groups": _GROUPS[generation],
    }
    template = Template(Path(__file__).with_name("repro_template.py.txt").read_text(encoding="utf-8"))
    fixed = len(template.substitute(values, topk="").splitlines())
    assert fixed <= MAX_LINES, f"the script has {fixed} lines without its routing"
    return template.substitute(values, topk=_table(case, MAX_LINES - fixed + 1))


def _refuse(case: Case, module: str) -> None:
    """Raise if the case or the module cannot be written into a script."""
    if not all(part.isidentifier() and not iskeyword(part) for part in module.split(".")):
        raise CaseError(f"{module!r} is not the name of a Python module; give one like moonep")
    if case.scenario.name not in PASSES:
        raise CaseError(
            f"scenario {case.scenario} cannot be written as a standalone script; supported: {', '.join(PASSES)}. "
            "Try the case with one of these, or give the case line itself"
        )
    if case.model.name != "moe":
        raise CaseError(f"model {case.model}: a script holds MoonEP's path only; leave {case.model} out")
    if case.format.name != "bf16":
        raise CaseError(f"format {case.format}: a script holds BF16 weights only; leave {case.format} out")
    routes = case.R * case.S * case.K
    if routes > MAX_ROUTES:
        raise CaseError(
            f"the routing has R*S*K = {routes} routes, and a script holds at most {MAX_ROUTES}; "
            "lower S, or find a smaller case with `moonep-validate shrink`"
        )
    if case.E > MAX_EXPERTS:
        raise CaseError(f"E={case.E}: a script allocates weights for at most {MAX_EXPERTS} experts; lower E")


def _note(case: Case, hidden: int) -> str:
    """Comment lines on where the script differs from the case."""
    notes = []
    if hidden != case.H:
        notes.append(
            f"Note: H is rounded up from {case.H} to {hidden}, since real hardware needs a multiple of 128."
        )
    if case.R % 2 and case.experts_per_rank % 4:
        notes.append("Note: real hardware refuses this case, since R is odd and E/R is no multiple of 4.")
    return "".join(f"\n# {note}" for note in notes)


def _scales(case: Case) -> str:
    """Factors of the rows: 1, or such that the order of a sum shows, as with the fills that are not exact."""
    exact = case.fill.name == "ints" and not SCENARIOS[case.scenario.name].injects
    return "[1.0]" if exact else "[1.0, 2.0**30, -(2.0**30)]"


def _table(case: Case, lines: int) -> str:
    """The expert ids of all ranks as a list, on at most ``lines`` lines."""
    per_line = -(-case.R // lines)
    ranks = [str(topk_ids(case, rank).tolist()) for rank in range(case.R)]
    rows = [", ".join(ranks[first : first + per_line]) for first in range(0, case.R, per_line)]
    return "[" + ",\n        ".join(rows) + "]"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
