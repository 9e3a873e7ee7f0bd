"""A server as a speaker: requests over HTTP, many at a time, retried within limits."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from moonep_validate.errors import CaseError
from moonep_validate.served.answers import Who
from moonep_validate.served.dialects import DIALECTS, NoLogprobs
from moonep_validate.served.recipe import Recipe
from moonep_validate.served.speakers.speaker import Said
from moonep_validate.trace.schema import SchemaError, decoded, parsed

#: Tries of one request, the pause before the second in seconds (doubled each time), and how many prompts in a row
#: may fail before the rest is not asked.
TRIES, PAUSE, FAILURES = 3, 0.2, 8
#: An answer of more bytes is refused while it is read.
MAX_ANSWER = 64 * 2**20
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)


def _httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise CaseError("servers need httpx: pip install 'moonep-validate[served]'") from None
    return httpx


def ready(recipe: Recipe, url: str) -> bool:
    """Whether a server answers there."""
    httpx = _httpx()
    try:
        models = httpx.get(url + DIALECTS[recipe.speaks].models, headers=headers(recipe), timeout=5)
        return int(models.status_code) == 200
    except httpx.HTTPError:
        return False


def headers(recipe: Recipe) -> dict[str, str]:
    """Headers of each request, the key among them.

    Raises:
        CaseError: if the variable of the key is not set.
    """
    if not recipe.key_variable:
        return recipe.headers
    if not (key := {**os.environ, **recipe.environment}.get(recipe.key_variable)):
        raise CaseError(f"key_variable = {recipe.key_variable}: this variable is not set")
    return {"Authorization": f"Bearer {key}", **recipe.headers}


class Remote:
    """A server that serves one model.

    Args:
        recipe: how it is asked.
        url: of its root.
        died: how it ended, or None while it lives.

    Raises:
        CaseError: if nothing answers there in this dialect, or it serves another model.
    """

    def __init__(self, recipe: Recipe, url: str, died: Callable[[], str | None] = lambda: None) -> None:
        self._recipe, self._url, self._died, self._dialect = recipe, url, died, DIALECTS[recipe.speaks]
        self._http = _httpx().Client(
            headers=headers(recipe),
            timeout=recipe.timeout,
            limits=_httpx().Limits(max_connections=recipe.concurrency),
        )
        self._limit = time.monotonic() + recipe.deadline
        self._lock, self._failures, self._last = threading.Lock(), 0, ""
        self._model = self._served()
        self._who = self._asked_who()

    @property
    def who(self) -> Who:
        """Engine, its own version, model and arguments, without secrets."""
        return self._who

    @property
    def vocab(self) -> int:
        """Of the recipe, or of the model's folder.

        Raises:
            CaseError: if neither says it.
        """
        if found := self._recipe.vocab or vocabulary(self._recipe.model):
            return found
        raise CaseError(
            f"the size of the vocabulary of {self._model} is not known: give vocab in a recipe, or --prompts-file"
        )

    @property
    def longest(self) -> int:
        """Of the recipe."""
        return self._recipe.longest

    def _served(self) -> str:
        where = self._url + self._dialect.models
        try:
            names = self._dialect.serves(self._read("GET", self._dialect.models, None))
        except (Refused, SchemaError) as error:
            text = self._recipe.hide(f"{where} is no server of the dialect {self._recipe.speaks}: {error}")
            raise CaseError(self._died() or text) from None
        wanted = self._recipe.model
        if wanted and wanted not in names:
            served = ", ".join(names)[:200] or "nothing"
            raise CaseError(f"the server serves {served}, the recipe says model = {wanted!r}")
        return wanted or (names[0] if names else "")

    def _asked_who(self) -> Who:
        try:
            said = self._read("GET", self._dialect.version, None)
            version = str(said.get("version", "")) if isinstance(said, dict) else ""
        except (Refused, SchemaError):
            version = ""
        recipe = self._recipe
        arguments = [recipe.hide(one) for one in recipe.arguments]
        return Who(
            recipe.engine,
            version[:60],
            model=self._model,
            dtype=recipe.dtype,
            arguments=arguments,
            expects=recipe.expects,
            vocab=recipe.vocab or vocabulary(recipe.model),
        )

    def say(self, asked: Sequence[Sequence[int]], counts: Sequence[int], top: int) -> Iterator[tuple[int, Said]]:
        """Greedy answers as they come; what failed says why.

        Raises:
            CaseError: if the server gives no log probabilities at all.
        """
        with ThreadPoolExecutor(self._recipe.concurrency) as pool:
            waiting = {
                pool.submit(self._one, ids, count, top): index
                for index, (ids, count) in enumerate(zip(asked, counts, strict=True))
            }
            try:
                for done in as_completed(waiting):
                    yield waiting[done], done.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _one(self, ids: Sequence[int], count: int, top: int) -> Said:
        if self._failures >= FAILURES or time.monotonic() > self._limit:
            why = self._last or f"the deadline of {self._recipe.deadline:g} s is over"
            return Said([], [], [], error=f"not asked: {why}")
        body = self._dialect.body(self._model, ids, count, top, self._recipe.prompt_logprobs)
        try:
            said = self._dialect.said(self._read("POST", self._dialect.path, body), ids)
            self._note("")
            return said
        except NoLogprobs as error:
            raise CaseError(f"{self._recipe.engine} at {self._recipe.hide(self._url)}: {error}") from None
        except (Refused, SchemaError) as error:
            why = self._recipe.hide(self._died() or str(error))
            self._note(why)
            return Said([], [], [], error=why)

    def _note(self, why: str) -> None:
        with self._lock:
            self._failures, self._last = (self._failures + 1, why) if why else (0, "")

    def _read(self, method: str, path: str, body: Any) -> Any:
        """JSON of one request, tried a few times.

        Raises:
            Refused: saying what the last try met.
        """
        why = Refused("")
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                return self._once(method, path, body)
            except Refused as error:
                why = error
                if not error.again or self._died():
                    break
        raise why

    def _once(self, method: str, path: str, body: Any) -> Any:
        httpx = _httpx()
        try:
            with self._http.stream(method, self._url + path, json=body) as answer:
                data = bytearray()
                for part in answer.iter_bytes():
                    data += part
                    if len(data) > MAX_ANSWER:
                        raise Refused(f"the answer has more than {MAX_ANSWER} bytes", again=False)
        except httpx.TimeoutException:
            seconds = self._recipe.timeout
            raise Refused(f"no answer within {seconds:g} s (timeout = … in a recipe)") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Refused(f"the connection broke: {type(error).__name__} {str(error)[:120]}".rstrip()) from None
        if answer.status_code != 200:
            excerpt = " ".join(bytes(data[:300]).decode("utf-8", "replace").split())
            raise Refused(f"HTTP {answer.status_code}: {excerpt}", again=answer.status_code in _TRY_AGAIN)
        return parsed(decoded(bytes(data)))


class Refused(Exception):
    """A request without an answer; ``again``: another try may help."""

    def __init__(self, why: str, again: bool = True) -> None:
        super().__init__(why)
        self.again = again


def vocabulary(model: str) -> int:
    """Size of the vocabulary by the config.json of a model's folder; 0 where there is none."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        found = config.get("vocab_size", config.get("text_config", {}).get("vocab_size", 0))
        return int(found)
    except (OSError, ValueError, AttributeError, TypeError):
        return 0
