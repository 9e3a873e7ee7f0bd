"""Where, and on whom, does a case run? A job travels to the ranks as JSON; the case says what."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from moonep_validate.cases.case import CaseError, Spec
from moonep_validate.pipeline import target as targets
from moonep_validate.pipeline.target import EMBEDDED, Target
from moonep_validate.subjects import Subject, subject_with_experts
from moonep_validate.subjects.experts import DEFAULT, is_own
from moonep_validate.trace.trace import Part


@dataclass(frozen=True)
class Job:
    """A target, and where it runs.

    Attributes:
        target: who is judged.
        world: ``threads``, ``processes`` or ``torchrun``; None is the target's own.
        device: ``cpu`` or ``cuda``.
        faults: seeded faults.
        deadline: seconds that a rank may run without a sign of life.
        first_deadline: the same in the first case of a Buffer key, where memory is mapped and kernels compiled;
            None is three times the deadline.
        recording: how much of each tensor is recorded, see keep.py.
        experts: who computes the expert rows around a Buffer, see ``experts.find``.
        experts_part: what that is, or None where it cannot run.
        experts_activations: that it has.
        not_run: why nothing can run here, or None.
        waivers: a file of known defects; None is what ships with the suite, an empty text is none.
    """

    target: Target = EMBEDDED
    world: str | None = None
    device: str = "cpu"
    faults: tuple[Spec, ...] = ()
    deadline: float = 30.0
    first_deadline: float | None = None
    recording: str = "full"
    experts: str = DEFAULT
    experts_part: Part | None = None
    experts_activations: tuple[str, ...] = ()
    not_run: str | None = None
    waivers: str | None = None

    @property
    def subject(self) -> Subject:
        """What runs: the target, with another part in the place of our experts if one was named."""
        subject = self.target.subject(self.device, self.not_run)
        if self.experts == DEFAULT:
            return subject
        return subject_with_experts(
            subject, self.experts, self.experts_part, self.experts_activations, self.not_run
        )

    @property
    def runs_in(self) -> str:
        """The world in which the ranks run."""
        return self.world or self.own_world

    @property
    def own_world(self) -> str:
        """Where the ranks run if nobody says: code from outside runs in processes."""
        return self.target.kind.world if is_own(self.experts) else "processes"

    @property
    def reproducer(self) -> str:
        """The command-line options that differ from the defaults."""
        own = self.world in (None, "torchrun", self.own_world)
        options = {
            "world": None if own else self.world,
            "device": None if self.device == "cpu" else self.device,
            "experts": None if self.experts == DEFAULT else self.experts,
            "waivers": "none" if self.waivers == "" else self.waivers,
            "record": None if self.recording == "full" else self.recording,
        }
        texts = [self.target.spelled, *(f"--{name} {value}" for name, value in options.items() if value)]
        return " ".join(filter(None, [*texts, *(f"--fault {fault}" for fault in self.faults)]))

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the worker processes."""
        return self.target.environment(self.device)

    @property
    def deadline_at_first(self) -> float:
        """Seconds without a sign of life in the first case of a Buffer key."""
        return 3 * self.deadline if self.first_deadline is None else self.first_deadline

    def to_json(self) -> dict[str, Any]:
        """The job as JSON data."""
        data = {one.name: getattr(self, one.name) for one in fields(self)}
        part = self.experts_part
        return {
            **data,
            "target": targets.to_json(self.target),
            "faults": [str(fault) for fault in self.faults],
            "experts_part": asdict(part) if part else None,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        """Read ``to_json``.

        Raises:
            CaseError: for fields that a job does not have or lacks; both ends must be one version of the suite.
        """
        if (wanted := {one.name for one in fields(cls)}) != set(data):
            raise CaseError(f"a job has {sorted(wanted)}, got {sorted(data)}")
        part = data["experts_part"]
        read = {
            "target": targets.from_json(data["target"]),
            "faults": tuple(Spec.parse(fault) for fault in data["faults"]),
            "experts_part": Part.from_json(part) if part else None,
            "experts_activations": tuple(data["experts_activations"]),
        }
        return cls(**{**data, **read})
