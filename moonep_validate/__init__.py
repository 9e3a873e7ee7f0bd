"""Correctness and validation suite for MoonEP expert parallelism.

The pipeline, in the order of the files that make it::

    Case -> record(job, case) -> Trace -> judge(trace) -> Verdict -> report

See docs/architecture.md for the one-page model.
"""

__version__ = "0.1.0"
