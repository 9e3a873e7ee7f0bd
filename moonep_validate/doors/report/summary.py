"""What do many verdicts add up to? Counts per check, the overall status and the exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonep_validate.judge.checks import CHECKS, Check
from moonep_validate.judge.coverage import proven
from moonep_validate.judge.stages import PLACE
from moonep_validate.judge.verdict import EXIT_CODES, NO_CHECK, Verdict, worst
from moonep_validate.judge.witnesses import WITNESSES
from moonep_validate.pipeline.require import unmet_by
from moonep_validate.trace.recording import Recording

INTERRUPTED = 2
NOTHING_RAN = 5


@dataclass
class Row:
    """One check over all cases."""

    stage: str
    check: Check
    examined: int = 0
    information: bool = False
    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def status(self) -> str:
        """The worst status of the check."""
        return worst(list(self.statuses))


@dataclass
class Summary:
    """A run so far.

    Attributes:
        planned: cases that were to run.
        required: cases that must be judged.
        require: what must really run, see pipeline/require.py.
        interrupted: whether the user, or a signal, stopped it.
        ended: whether no more verdicts come; until then a report of it is no pass.
        cut: why the rest of the cases was left out, or empty; a run that was cut is no pass.
        smallest: how the first failure can be had again, and its case; empty where nobody looked.
    """

    planned: int
    verdicts: list[Verdict] = field(default_factory=list)
    interrupted: bool = False
    required: int = 0
    require: Sequence[str] = ()
    ended: bool = False
    cut: str = ""
    smallest: tuple[str, str] = ("", "")

    @property
    def status(self) -> str:
        """The worst status of the cases that ran."""
        return worst([verdict.status for verdict in self.verdicts])

    @property
    def counts(self) -> Counter[str]:
        """Cases by status."""
        return Counter(verdict.status for verdict in self.verdicts)

    @property
    def exit_code(self) -> int:
        """The documented process exit code."""
        if self.interrupted:
            return INTERRUPTED
        if code := EXIT_CODES[self.status]:
            return code
        if self.missed:
            return EXIT_CODES["failed"]
        return 0 if self.counts["passed"] or self.counts["waived"] else NOTHING_RAN

    @property
    def unmet(self) -> list[str]:
        """Demands on what really runs that a case did not meet, once its ranks had their say."""
        judged = (
            [verdict.parts for verdict in self.verdicts if verdict.status != "not_run"] if self.require else []
        )
        return list(dict.fromkeys(text for parts in judged for text in unmet_by(parts, self.require)))

    @property
    def missed(self) -> list[str]:
        """What was asked for and not reached, one sentence each; a run that missed anything is no pass."""
        few = f"--require-cases {self.required}: {self.ran} cases were judged" if self.ran < self.required else ""
        return [*self.unmet, *filter(None, [few, self.cut])]

    @property
    def ran(self) -> int:
        """How many cases were judged."""
        return len(self.verdicts) - self.counts["not_run"]

    def rows(self) -> list[Row]:
        """One row per check that any verdict mentions, in pipeline order.

        F1 and relations judge several stages; only where they did not pass do they get a row at that stage.
        """
        rows: dict[tuple[int, str], Row] = {}
        for result in (result for verdict in self.verdicts for result in verdict.results):
            if result.check == NO_CHECK:
                continue
            stage = result.stage
            if result.status == "passed":
                stage = CHECKS[result.check].stage
            if result.status == "not_applicable":
                continue
            row = rows.setdefault((PLACE[stage], result.check), Row(stage, CHECKS[result.check]))
            row.examined += result.examined
            row.statuses[result.status] += 1
            row.information |= not result.gates
        return [rows[key] for key in sorted(rows, key=lambda key: (key[0], key[1][0], int(key[1][1:])))]

    def proven(self) -> tuple[list[str], list[str]]:
        """Stages at which values were compared and nothing is known to be wrong: all of them, and only in part."""
        found = [proven(verdict.results, Recording.parse(verdict.recording)) for verdict in self.verdicts]
        parts = {stage for _, part in found for stage in part}
        whole = {stage for stages, _ in found for stage in stages} - parts
        return [stage for stage in PLACE if stage in whole], [stage for stage in PLACE if stage in parts]

    def idle(self) -> list[str]:
        """Checks that compared nothing in any case, and known events that no case showed."""
        active = {r.check for verdict in self.verdicts for r in verdict.results if r.examined}
        seen = self.witnesses()
        return [id for id in CHECKS if id not in active] + [f"@{w}" for w in WITNESSES if not seen[w]]

    def witnesses(self) -> Counter[str]:
        """Cases in which each event occurred."""
        return Counter(name for v in self.verdicts for name, count in v.witnesses.items() if count)


def first_failures(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """One verdict per (status, stage, check) that went wrong, in order of appearance."""
    seen: dict[tuple[str, ...], Verdict] = {}
    for verdict in verdicts:
        if first := verdict.first:
            seen.setdefault((first.status, first.stage, first.check), verdict)
    return list(seen.values())
