"""Does every call return, and does the Buffer refuse bad input, on every rank?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moonep_validate.judge.checks import Compared, axes, differ
from moonep_validate.judge.facts import Step
from moonep_validate.judge.registry import Check, check, register

#: Exceptions that say nothing about the question: something is missing, or its name is wrong.
_ACCIDENTS = ("AttributeError", "ImportError", "ModuleNotFoundError", "NameError")


#: A call that did not return has no taps to compare: the pipeline asks each call itself.
RETURNS = register(Check("F1", "returns", "life", "returns", "Every call returns on every rank"))


@check("Z1", "life")
def bad_input_refused(s: Step) -> Iterator[Compared]:
    """Bad input and use after destroy raise an exception; what is supported does not"""
    what, wanted = s.info("refusal", "what"), s.info("refusal", "wanted", "refused")
    answers = [
        f"{call.info['raised']}: {call.info.get('message', '')}" if "raised" in call.info else "nothing raised"
        for call in s.calls("refusal")
    ]
    got = np.array(answers)
    raised = np.array([call.info.get("raised", "") for call in s.calls("refusal")])
    refused = (raised != "") & ~np.isin(raised, _ACCIDENTS)
    bad = ~refused if wanted == "refused" else raised != ""
    expected = "an exception" if wanted == "refused" else "nothing raised"
    yield differ(f"answer to {what}", expected, got, axes("rank"), bad=bad)
