"""What does `compare` cost a server? ``python -m tests.e2e.overhead [SECONDS] [PROMPTS]`` prints a ratio.

A trivial local server takes a fixed time for each answer, 32 at a time. What it was idle between the first question
and the last answer of a round is the tool's.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from typing import Any

from moonep_validate.served.prompts import make_prompts
from moonep_validate.served.recipe import Recipe
from moonep_validate.served.record import record
from moonep_validate.served.speakers.remote import Remote
from tests.self.served_server import MODEL, VOCAB, Handler, completion

AT_A_TIME = 32


class Slow(Handler):
    """Each answer takes as long; busy seconds of all places are counted."""

    seconds = 0.25
    busy, first, last = 0.0, 0.0, 0.0
    protocol_version = "HTTP/1.1"  # connections are kept, as real servers do
    disable_nagle_algorithm = True
    one = threading.Lock()

    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        begin = time.monotonic()
        asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps(completion(asked)).encode()
        time.sleep(max(0.0, Slow.seconds - (time.monotonic() - begin)))
        with Slow.one:
            Slow.first = Slow.first or begin
            Slow.last = time.monotonic()
            Slow.busy += Slow.last - begin
        self.reply(answer)


class Server(ThreadingHTTPServer):
    """As many may wait to be let in as ask at a time."""

    daemon_threads = True
    request_queue_size = 2 * AT_A_TIME


def serve(seconds: float, tell: Connection) -> None:
    """Answer in a process of its own; each word that comes is answered with first, last and busy seconds."""
    Slow.seconds = seconds
    server = Server(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tell.send(server.server_port)
    tell.recv()
    tell.send((Slow.first, Slow.last, Slow.busy))


def main() -> None:
    """Print the server's busy time, the time that it took, and their ratio."""
    seconds, count = float([*sys.argv, "1"][1]), int([*sys.argv, "", "320"][2] or 320)
    mine, its = Pipe()
    process = Process(target=serve, args=(seconds, its), daemon=True)
    process.start()
    recipe = Recipe("fake", MODEL, url=f"http://127.0.0.1:{mine.recv()}", vocab=VOCAB, concurrency=AT_A_TIME)
    start = time.process_time()
    record(Remote(recipe, recipe.url), make_prompts(VOCAB, count, 0, 256), again=())
    spent = time.process_time() - start
    mine.send("end")
    first, last, busy = mine.recv()
    whole, busy = last - first, busy / AT_A_TIME
    sys.stdout.write(
        f"{2 * count} answers of {seconds} s, {AT_A_TIME} at a time: the server was busy {busy:.2f} s "
        f"of {whole:.2f} s, {100 * (whole / busy - 1):.1f}% more; CPU of the tool {spent:.2f} s\n"
    )


if __name__ == "__main__":
    main()
