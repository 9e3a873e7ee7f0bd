"""Figures that are no status still have to be right: what padding costs, and what an engine's source passes."""

from __future__ import annotations

from moonep_validate.cases.case import Case
from moonep_validate.pipeline.job import Job
from moonep_validate.pipeline.judge import judge
from moonep_validate.pipeline.record import record
from moonep_validate.subjects.engines.keywords import passed_keywords


def test_padding_on_expert_0_is_compared_with_padding_that_stays_at_home() -> None:
    """One real token on each rank and three on expert 0: rank 0 owns 7 of 8 routes, so 3 rows and one expert move."""
    case = Case.parse("genA+R2+E4+K1+S4+H8+I8+pad1+table:1,0,0,0,3,0,0,0")
    trace = record(Job(), case)
    assert "pads_slots" not in judge(trace).measures  # here the caller padded, not an engine
    for calls in trace.calls:
        for call in calls:
            if call.op == "layer":
                call.info["tokens"] = 1
    found = judge(trace).measures
    assert {name: value for name, value in found.items() if "pads_" in name} == {
        "pads_slots": 1,
        "pads_rows_moved": 3,
        "pads_prefetch_bytes": 3 * 8 * 8 * 2,
        "local_pads_slots": 0,
        "local_pads_rows_moved": 0,
        "local_pads_prefetch_bytes": 0,
    }


def test_keywords_are_read_from_source_over_all_calls_of_a_name() -> None:
    source = "import m\nb = m.Buffer(S=1, B=2)\nBuffer(H=3, **more)\nb.dispatch(x, plan=None)\nother(a=1)\n"
    found = passed_keywords(source, {"Buffer", "dispatch"})
    assert {name: tuple(words) for name, words in found.items()} == {
        "Buffer": ("B", "H", "S"),
        "dispatch": ("plan",),
    }
