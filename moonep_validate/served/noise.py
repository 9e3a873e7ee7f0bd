"""How far apart are two sides that are both right? Noise is measured, and a defect is what noise does not explain.

Healthy sides differ since sums are taken in another order. How much that is depends on the model, on the type and
on the parallel layout, so it is measured, in this order of preference:

* ``reference``: a third opinion (another implementation, or float32) answers the same prompts. Both sides have an
  error against it, and a healthy candidate's is like the baseline's.
* ``healthy``: other sides that are known to be right, against the baseline.
* ``again``: the baseline against itself, with other batches and in another order.
* ``float32``: nothing of that is there or it is zero, and both sides compute in float32. Then a difference above
  ``FLOOR`` is none of rounding.

Anything else is ``unknown``, never a pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moonep_validate.served.answers import FORCED, GREEDY, Answers
from moonep_validate.served.drift import Drift, drift

#: Unit roundoff of float32 times 1,024. Rounding of one step is amplified on its way through a model; the largest
#: amplification that we saw is 77 (a drift of 0.30 in BF16, whose unit roundoff is 2**-8; docs/served.md).
FLOOR = 2.0**10 * 2.0**-24
#: One-sided probability of a false alarm of each test, and of seeing a defect of the stated size.
ALPHA, POWER = 1e-3, 0.95
_Z_ALPHA, _Z_POWER = 3.0902, 1.6449  # the normal quantiles of these
#: How many times as far as the noise a candidate may drift: the noise of another layout is not the noise of this
#: one. Measured on healthy pairs in docs/served.md.
MARGIN = 2.0
#: A prompt is off if it drifts so many times as far as the prompt with the most noise.
TAIL = 4.0
#: With fewer prompts their spread is no measure: its own error is over a quarter of it.
FEWEST = 8


@dataclass(frozen=True)
class Noise:
    """What healthy sides differ by.

    Attributes:
        kind: ``reference``, ``healthy``, ``again``, ``float32`` or ``unknown``.
        how: one phrase for people.
        sizes: prompt -> root mean square of its noise.
        largest: of a single place.
    """

    kind: str
    how: str
    sizes: Mapping[str, float]
    largest: float


def drifts_of(base: Answers, other: Answers, run: str = GREEDY) -> dict[str, Drift]:
    """Prompt -> how far ``other`` is from the baseline, for all prompts that both answered."""
    mine, found = base.run(GREEDY), {}
    for name, answer in other.run(run).items():
        if name in mine and not (answer.error or mine[name].error) and _same(mine[name].asked, answer.asked):
            pairs = [(base.run(FORCED).get(name), other.run(FORCED).get(name))] if run == GREEDY else []
            forced = [(a, b) for a, b in pairs if a and b and _same(a.tokens, b.tokens)]
            found[name] = drift(mine[name], answer, forced)
    return found


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.array_equal(one, other))


def measure(
    base: Answers, candidate: Answers, healthy: Sequence[Answers] = (), reference: Answers | None = None
) -> Noise:
    """The best measure of noise that there is."""
    measured = []
    if reference is not None:
        how = f"{base.who} against the third opinion {reference.who}"
        measured.append(_noise("reference", how, [drifts_of(reference, base)]))
    if healthy:
        names = ", ".join(str(one.who) for one in healthy)
        measured.append(
            _noise("healthy", f"the baseline against {names}", [drifts_of(base, one) for one in healthy])
        )
    if base.again:
        how = f"the baseline against itself, {len(base.again)} times"
        measured.append(_noise("again", how, [drifts_of(base, base, run) for run in base.again]))
    for noise in measured:
        if noise.largest > 0:  # sides that agree in every bit say nothing of how far apart healthy ones are
            return noise
    if base.who.dtype == candidate.who.dtype == "float32":
        return Noise("float32", f"both sides compute in float32, floor {FLOOR:.2g}", {}, FLOOR)
    zero = f"there is no difference at all in {measured[0].how}; " if measured else ""
    return Noise("unknown", f"{zero}nothing says how far apart two healthy sides are", {}, float("nan"))


def _noise(kind: str, how: str, samples: Sequence[Mapping[str, Drift]]) -> Noise:
    sizes: dict[str, list[float]] = {}
    largest = 0.0
    for sample in samples:
        for name, one in sample.items():
            if len(one.all):
                sizes.setdefault(name, []).append(one.size)
                largest = max(largest, float(np.abs(one.all).max()))
    return Noise(kind, how, {name: float(np.sqrt(np.mean(np.square(v)))) for name, v in sizes.items()}, largest)


@dataclass(frozen=True)
class Test:
    """Does the candidate drift further than noise does?

    Attributes:
        prompts: how many could be compared.
        ratio: typical (geometric mean) ratio of the candidate's drift to the noise.
        low: the ratio is at least this with a confidence of 1 - ``ALPHA``.
        visible: the smallest ratio that so many prompts show with a probability of ``POWER``.
        off: prompts that drift further than noise ever did.
        off_in_noise: how many of the noise's own prompts do.
        off_needed: how many must be off before that is none of chance.
    """

    prompts: int
    ratio: float
    low: float
    visible: float
    off: tuple[str, ...]
    off_in_noise: int
    off_needed: int

    @property
    def failed(self) -> bool:
        """Whether the drift is more than noise."""
        return self.low > MARGIN or len(self.off) >= self.off_needed


def test(sizes: Mapping[str, float], noise: Mapping[str, float], exact: bool) -> Test:
    """Compare drift with noise, prompt by prompt: places of one prompt depend on each other, prompts do not.

    Args:
        sizes: prompt -> the candidate's drift.
        noise: prompt -> the noise.
        exact: both sides are float32: no router flips on rounding there, so one prompt that is off is enough.
    """
    shared = [name for name in sizes if name in noise and sizes[name] == sizes[name]]
    largest = max(noise.values(), default=0.0)
    tiny = max(largest * 2.0**-10, 2.0**-30)  # a prompt without noise by chance must not count as infinitely far
    logs = np.log([max(sizes[name], tiny) / max(noise[name], tiny) for name in shared])
    spread = float(logs.std(ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else float("inf")
    off = tuple(name for name in sizes if sizes[name] > TAIL * max(largest, tiny))
    typical = float(np.median(list(noise.values()))) if noise else 0.0
    ever = sum(size > TAIL * max(typical, tiny) and size > largest for size in noise.values())
    return Test(
        len(shared),
        float(np.exp(logs.mean())) if len(logs) else float("nan"),
        float(np.exp(logs.mean() - _Z_ALPHA * spread)) if len(logs) >= FEWEST else 0.0,
        float(MARGIN * np.exp((_Z_ALPHA + _Z_POWER) * spread)) if len(logs) >= FEWEST else float("inf"),
        off,
        ever,
        1 if exact else fewest_beyond_chance(len(sizes), ever, len(noise)),
    )


def fewest_beyond_chance(count: int, seen: int, noise_count: int) -> int:
    """The smallest k for which k of ``count`` is more than ``seen`` of ``noise_count``, at ``ALPHA``.

    Fisher's exact test, one-sided (hypergeometric); ``count + 1`` if no k is.
    """
    for k in range(1, count + 1):
        if k * noise_count > seen * count and _tail(k, count, seen, noise_count) < ALPHA:
            return k
    return count + 1


def _tail(k: int, count: int, seen: int, noise_count: int) -> float:
    """Probability that at least k of the k + seen marked ones are among ``count`` of all."""
    marked, total = k + seen, count + noise_count
    ways = math.comb(total, marked)
    return (
        sum(math.comb(count, i) * math.comb(noise_count, marked - i) for i in range(k, min(marked, count) + 1))
        / ways
    )


def prompts_needed(ratio: float, spread: float = 0.7) -> int:
    """How many prompts show a drift of ``ratio`` times the noise with a probability of ``POWER``.

    Args:
        ratio: above ``MARGIN``.
        spread: standard deviation of the logarithm of drift over noise between prompts.
    """
    return max(FEWEST, math.ceil(((_Z_ALPHA + _Z_POWER) * spread / math.log(ratio / MARGIN)) ** 2))


def power_of(prompts: int, spread: float = 0.7) -> str:
    """One sentence, before anything runs: the smallest drift that so many prompts show; see ``prompts_needed``."""
    if prompts < FEWEST:
        return f"{prompts} prompts show a defect in float32 only; where noise is measured, {FEWEST} are needed"
    ratio = MARGIN * math.exp((_Z_ALPHA + _Z_POWER) * spread / math.sqrt(prompts))
    return f"{prompts} prompts: a drift of {ratio:.2g} times the measured noise will show (95%)"
