"""``python -m moonep_validate.served.speak REQUEST.json``: an engine answers, in a process of its own.

Foreign code never runs beside the judge. What it says travels as a file of answers; a process without one
has said nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from moonep_validate.errors import CaseError
from moonep_validate.served.answers import write
from moonep_validate.served.prompts import make_prompts
from moonep_validate.served.record import AGAIN, record
from moonep_validate.served.request import Request, out_of_rank, share
from moonep_validate.served.speakers.speaker import Speaker
from moonep_validate.trace.schema import build

SPEAKERS = {
    "transformers": "moonep_validate.served.speakers.transformers:Transformers",
    "vllm": "moonep_validate.served.speakers.vllm:Vllm",
}


def speaker_class(engine: str) -> Callable[..., Speaker]:
    """The class behind a name, or behind MODULE:CLASS.

    Raises:
        CaseError: if there is none.
    """
    module, colon, name = SPEAKERS.get(engine, engine).partition(":")
    if not colon:
        raise CaseError(f"engine {engine} is not known; known: {', '.join(SPEAKERS)}, or MODULE:CLASS")
    found: Callable[..., Speaker] = getattr(import_module(module), name)
    return found


def main() -> None:
    """Answer one request."""
    request = build(Request, json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), "request")
    speaker = speaker_class(request.engine)(request.model, request.dtype, **request.options)
    prompts = [one.prompt for one in request.prompts]
    prompts = prompts or make_prompts(speaker.vocab, request.count, request.seed, speaker.longest - 1)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    mine = share(prompts, rank, ranks)
    answers = record(speaker, mine, request.top, AGAIN[: request.again], request.forced or None)
    write(answers, Path(out_of_rank(request.out, rank, ranks)))


if __name__ == "__main__":
    main()
