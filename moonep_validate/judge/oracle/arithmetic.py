"""What is right for these experts? Their activation, what they round, and whether their data are exact.

Made once, from a case and what the part behind the experts declares; the oracle and the checks get it whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moonep_validate.cases.case import Case
from moonep_validate.judge.oracle.activation import SILU, Activation, activation_of
from moonep_validate.judge.oracle.bounds import within

#: Rounding points that an experts part may declare beyond those of the reference experts: the SiLU by itself is
#: rounded, the route weight is rounded, the weight is applied before the down projection; FP8: what goes into a
#: product is rounded to E4M3 under a scale per 1 x 128, its weights under one per 128 x 128.
ROUNDS = ("silu", "route_weight", "weighted_activation", "fp8_inputs", "fp8_weights")


@dataclass(frozen=True)
class Arithmetic:
    """How expert rows are computed, and so how they are judged.

    Attributes:
        exact: the data leave nothing to round (fill ``ints``): results are equal bit for bit, variances are zero
            and are not computed.
        rounds: rounding points beyond those of the reference, of ``ROUNDS``.
        activation: what is between the matrix products.
    """

    exact: bool = False
    rounds: tuple[str, ...] = ()
    activation: Activation = SILU

    @classmethod
    def of(cls, case: Case, rounds: Sequence[str]) -> Arithmetic:
        """The arithmetic of a case on a part that declares these rounding points."""
        return cls(case.fill.name == "ints", tuple(rounds), activation_of(case.model))

    def wrong(self, want: Tensor, got: Tensor, variance: Tensor) -> Tensor:
        """Which elements are not as they should be: bool, shape kept; NaN is right only where NaN is due.

        Args:
            want: float64 ``[..., columns]``.
            got: the subject's values, float64, same shape.
            variance: error variance per element, same shape; not read where ``exact``.
        """
        if not self.exact:
            return ~within(want, got, variance)
        return (want != got) & ~(want.isnan() & got.isnan())
