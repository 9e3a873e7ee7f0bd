"""A tiny server with both dialects and many faults: ``python served_server.py PORT [FAULT]``.

Its model: the next token is a hash of all tokens before it, with log probabilities that are a function of them.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCAB = 64
MODEL = "tiny"


def token(tokens: list[int]) -> int:
    return 8 + zlib.crc32(bytes(t % 256 for t in tokens)) % (VOCAB - 8)


def logprob(tokens: list[int]) -> float:
    return -0.5 - (zlib.crc32(bytes(t % 256 for t in tokens)) % 1000) / 1000


class Handler(BaseHTTPRequestHandler):
    fault = ""
    served = 0
    lock = threading.Lock()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, data: Any, code: int = 200) -> None:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.fault == "not-ready":
            self.reply({}, 503)
        elif self.fault == "web-page":
            self.reply(b"<html>hello</html>")
        elif self.path == "/v1/models":
            self.reply({"data": [{"id": "other" if self.fault == "other-model" else MODEL}]})
        elif self.path == "/get_model_info":
            self.reply({"model_path": MODEL})
        elif self.path in ("/version", "/get_server_info"):
            self.reply({"version": "1.5", "api_key": "sk-very-secret"})
        else:
            self.reply({}, 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            Handler.served += 1
            number = Handler.served
        if self.fault == "key" and self.headers["Authorization"] != "Bearer sk-very-secret":
            self.reply({"error": f"wrong key, {self.headers['Authorization']}, sk-very-secret is needed"}, 401)
        elif self.fault == "dies" and number > 10:
            sys.stderr.write(f"about to die, key {os.environ.get('MY_API_KEY')}\n")
            sys.stderr.flush()
            os._exit(3)
        elif self.fault == "slow" and number % 10 == 0:
            time.sleep(3)
            self.reply({})
        elif self.fault == "drops" and number % 3 == 0:
            self.close_connection = True
        elif self.fault == "half":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
        elif self.fault == "malformed":
            self.reply(b'{"choices": [}')
        elif self.fault == "hostile":
            self.reply(b"[" * 200_000)
        else:
            self.reply(completion(asked, self.fault) if "prompt" in asked else generation(asked, self.fault))


def continued(asked: list[int], count: int) -> list[int]:
    whole = list(asked)
    for _ in range(count):
        whole.append(token(whole))
    return whole


def spoiled(values: list[Any], fault: str) -> list[Any]:
    """Log probabilities with one that is none, at the last place."""
    last = {"nan": float("nan"), "hole": None, "above": 0.25}
    return [*values[:-1], last[fault]] if fault in last else values


def completion(asked: dict[str, Any], fault: str = "") -> dict[str, Any]:
    start = len(asked["prompt"])
    whole = continued(asked["prompt"], asked["max_tokens"])
    values: list[Any] = [logprob(whole[: i + 1]) for i in range(len(whole))]
    if fault == "beyond":
        whole[-1] = VOCAB
    names = [f"token_id:{one}" for one in whole[start:]]
    values = spoiled(values, fault)
    if fault == "drift":
        values = [value + 0.01 * (i % 3) for i, value in enumerate(values)]
    if fault == "texts":
        names = ["hello"] * len(names)
    given: dict[str, Any] | None = {
        "tokens": names,
        "token_logprobs": values[start:],
        "top_logprobs": [
            {"token_id:4" if fault == "misses" else name: value or -1.0, "token_id:3": -9.0}
            for name, value in zip(names, values[start:], strict=True)
        ],
    }
    prompt = [None] + [{str(whole[i]): {"logprob": values[i]}} for i in range(1, start)]
    one = {"finish_reason": "length", "logprobs": None if fault == "no-logprobs" else given}
    read = [t + 1 for t in asked["prompt"]] if fault == "other-tokenizer" else asked["prompt"]
    return {"choices": [{**one, "prompt_logprobs": prompt, "prompt_token_ids": read}]}


def generation(asked: dict[str, Any], fault: str = "") -> dict[str, Any]:
    start = len(asked["input_ids"])
    whole = continued(asked["input_ids"], asked["sampling_params"]["max_new_tokens"])
    values = spoiled([logprob(whole[: i + 1]) for i in range(len(whole))], fault)
    if fault == "beyond":
        whole[-1] = VOCAB
    entries = [[value, one, None] for value, one in zip(values, whole, strict=True)]
    listed = [[value or -1.0, 4 if fault == "misses" else one, None] for value, one, _ in entries]
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": entries[start:],
        "output_top_logprobs": [[one, [-9.0, 3, None]] for one in listed[start:]],
        "input_token_logprobs": [[None, whole[0], None], *entries[1:start]],
    }
    return {"text": "", "meta_info": meta}


if __name__ == "__main__":
    Handler.fault = sys.argv[2] if len(sys.argv) > 2 else ""
    if Handler.fault == "never":
        print("loading for ever", flush=True)
        time.sleep(1000)
    if Handler.fault == "exits":
        print(f"no GPU here, --api-key {sys.argv[-1]}", flush=True)
        sys.exit(7)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
