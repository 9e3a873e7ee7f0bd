"""Does the Buffer refuse what it must refuse, on every rank?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moonep_validate.checks import Compared, axes, check, differ
from moonep_validate.facts import Step


@check("Z1", "life")
def refused(s: Step) -> Iterator[Compared]:
    """Bad input and use after destroy raise an exception"""
    what = s.info("refusal", "what")
    got = np.array([call.info.get("raised", "nothing raised") for call in s.calls("refusal")])
    yield differ(f"answer to {what}, an exception", "an exception", got, axes("rank"), bad=got == "nothing raised")
