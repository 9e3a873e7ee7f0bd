"""What is said to a server, and what does its answer mean? Two dialects, as pure functions of JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonep_validate.served.speakers.speaker import Said
from moonep_validate.trace.schema import SchemaError, shown


@dataclass(frozen=True)
class Dialect:
    """How servers of one kind are asked.

    Attributes:
        path: of a completion.
        models: path under which a server says what it serves.
        version: path under which it says its version.
        body: (model, token ids, tokens to come, alternatives, with the prompt's) -> JSON to send.
        said: (JSON that came, token ids asked) -> what it says.
        serves: JSON of ``models`` -> names.
    """

    path: str
    models: str
    version: str
    body: Callable[[str, Sequence[int], int, int, bool], dict[str, Any]]
    said: Callable[[Any, Sequence[int]], Said]
    serves: Callable[[Any], list[str]]


def _openai_body(model: str, asked: Sequence[int], count: int, top: int, prompt: bool) -> dict[str, Any]:
    body = {"model": model, "prompt": list(asked), "max_tokens": count, "temperature": 0.0, "logprobs": top}
    extras = {"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}
    return {**body, **extras, "seed": 0, **({"prompt_logprobs": 0} if prompt else {})}


def _openai_said(answer: Any, asked: Sequence[int]) -> Said:
    choice = _get(answer, "choices", list)
    if not choice or not isinstance(choice[0], dict):
        raise SchemaError("choices holds no answer")
    one = choice[0]
    given = one.get("prompt_token_ids", answer.get("prompt_token_ids"))
    if given is not None and given != list(asked):
        raise SchemaError(f"the server read other prompt tokens: {shown(given)} in place of {len(asked)} ids")
    values = one.get("logprobs")
    if not isinstance(values, dict) or not values.get("token_logprobs"):
        raise NoLogprobs("the answer has no log probabilities; start the server so that it gives them")
    tokens = one.get("token_ids") or [_id(token) for token in _get(values, "tokens", list)]
    tops = [{_id(token): _number(value) for token, value in (place or {}).items()} for place in _tops(values)]
    logprobs = [_or_none(value) for value in _get(values, "token_logprobs", list)]
    prompt = _prompt(one.get("prompt_logprobs", answer.get("prompt_logprobs")), asked)
    return Said(_ids(tokens), logprobs, _with_own(tops, tokens, logprobs), prompt, str(one.get("finish_reason")))


def _tops(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = values.get("top_logprobs") or []
    if not isinstance(found, list) or not all(one is None or isinstance(one, dict) for one in found):
        raise SchemaError("top_logprobs must be a list of objects")
    return found


def _with_own(
    tops: list[dict[int, float]], tokens: Sequence[int], logprobs: Sequence[float | None]
) -> list[dict[int, float]]:
    """A token that ties with the last one listed is listed too; one that is missing is left to the verdict."""
    if tops and len(tops) != len(tokens):
        raise SchemaError(f"alternatives are given at {len(tops)} places, and {len(tokens)} tokens came")
    return [
        {**place, token: value} if value is not None and value == min(place.values(), default=value) else place
        for place, token, value in zip(tops, tokens, logprobs, strict=False)
    ]


def _prompt(given: Any, asked: Sequence[int]) -> list[float | None]:
    """vLLM's: for each token of the prompt null, or an object of token id -> {logprob}."""
    if not given:
        return []
    if not isinstance(given, list) or len(given) != len(asked):
        raise SchemaError(f"prompt_logprobs is {shown(given)}, one for each of {len(asked)} tokens is needed")
    found: list[float | None] = []
    for place, token in zip(given, asked, strict=True):
        entry = place.get(str(token)) if isinstance(place, dict) else None
        found.append(_or_none(entry.get("logprob") if isinstance(entry, dict) else entry))
    return found


def _openai_serves(answer: Any) -> list[str]:
    return [str(_get(one, "id", str)) for one in _get(answer, "data", list)]


def _sglang_body(model: str, asked: Sequence[int], count: int, top: int, prompt: bool) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
    start = 0 if prompt else -1
    return {
        "input_ids": list(asked),
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": top,
    }


def _sglang_said(answer: Any, asked: Sequence[int]) -> Said:
    meta = _get(answer, "meta_info", dict)
    values = meta.get("output_token_logprobs")
    if not values:
        raise NoLogprobs("the answer has no log probabilities (meta_info.output_token_logprobs)")
    logprobs, tokens = [_or_none(one[0]) for one in _triples(values)], _ids([one[1] for one in _triples(values)])
    tops = [
        {_id(t[1]): _number(t[0]) for t in _triples(place or [])}
        for place in meta.get("output_top_logprobs") or []
    ]
    prompt = [_or_none(one[0]) for one in _triples(meta.get("input_token_logprobs") or [])]
    if prompt and [one[1] for one in meta["input_token_logprobs"]] != list(asked):
        raise SchemaError(f"the server read other prompt tokens than the {len(asked)} ids that were asked")
    reason = meta.get("finish_reason")
    finish = str(reason.get("type")) if isinstance(reason, dict) else str(reason)
    return Said(tokens, logprobs, _with_own(tops, tokens, logprobs), prompt, finish)


def _triples(values: Any) -> list[Any]:
    if not isinstance(values, list) or not all(isinstance(one, list) and len(one) >= 2 for one in values):
        raise SchemaError("log probabilities must be lists of [value, token id, text]")
    return values


def _sglang_serves(answer: Any) -> list[str]:
    return [str(_get(answer, "model_path", str))]


class NoLogprobs(SchemaError):
    """A server that gives no log probabilities: no answer of it can be judged."""


def _get(data: Any, name: str, kind: type) -> Any:
    if not isinstance(data, dict) or not isinstance(data.get(name), kind):
        got = shown(data.get(name)) if isinstance(data, dict) else shown(data)
        raise SchemaError(f"the answer's {name} is {got}, a {kind.__name__} is needed")
    return data[name]


def _id(token: Any) -> int:
    """A token id, also as ``token_id:7`` or ``"7"``."""
    text = str(token).removeprefix("token_id:")
    if isinstance(token, bool) or not text.isascii() or not text.isdigit() or len(text) > 18:
        raise SchemaError(f"token {shown(token)} is no id; the server must return token ids")
    return int(text)


def _ids(tokens: Any) -> list[int]:
    if not isinstance(tokens, list):
        raise SchemaError(f"token ids are {shown(tokens)}, a list is needed")
    return [_id(token) for token in tokens]


def _or_none(value: Any) -> float | None:
    """Null stays a log probability that is missing."""
    return None if value is None else _number(value)


def _number(value: Any) -> float:
    """A number; NaN stays, for the verdict to name."""
    if type(value) not in (int, float) or abs(value) > 1e300:
        raise SchemaError(f"log probability {shown(value)} is no number")
    return float(value)


DIALECTS = {
    "openai": Dialect("/v1/completions", "/v1/models", "/version", _openai_body, _openai_said, _openai_serves),
    "sglang": Dialect(
        "/generate", "/get_model_info", "/get_server_info", _sglang_body, _sglang_said, _sglang_serves
    ),
}
