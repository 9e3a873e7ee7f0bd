"""How is a side started and asked? A recipe: a TOML file, checked whole before anything runs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from moonep_validate.errors import CaseError
from moonep_validate.trace.schema import SchemaError, Within, build, decoded, parsed, read_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

_LIMIT = 2**20
#: Names of variables, headers and arguments whose values are secrets.
_SECRET = re.compile(r"key|token$|_token|secret|passw|auth|credential|cookie", re.IGNORECASE)
#: A shorter value is no secret, and hiding it would eat the text.
_SHORTEST = 6
#: Engine -> command of its server; the arguments of the recipe follow.
COMMANDS = {
    "vllm": ("{python}", "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}"),
    "sglang": ("{python}", "-m", "sglang.launch_server", "--model-path", "{model}"),
}
_ADDRESS = ("--host", "127.0.0.1", "--port", "{port}")


@dataclass(frozen=True)
class Recipe:
    """One side.

    Attributes:
        engine: ``vllm``, ``sglang``, ``transformers``, or any name with a ``command`` or ``url``.
        model: folder or name, as the engine takes it; as the server reports it for a ``url``.
        url: of a server that runs already, up to and without ``/v1``.
        command: of a server, in place of the engine's; ``{python}``, ``{model}`` and ``{port}`` are filled in.
        python: interpreter of the engine's environment.
        arguments: of the server; ``name=value`` for an engine in process.
        environment: variables beside those of this process.
        headers: of each request.
        key_variable: name of the variable that holds the server's key.
        port: 0 for a free one.
        ready: seconds until the server must answer.
        deadline: seconds for all answers.
        timeout: seconds for one answer.
        concurrency: requests at a time.
        log: file of the server's output; kept only for an error if it is empty.
        dialect: ``openai`` (/v1/completions) or ``sglang`` (/generate); by default that of the engine.
        in_process: run the engine by its Python interface, no server.
        ranks: processes of an engine in process, one data-parallel rank each.
        dtype: of activations.
        vocab: size of the vocabulary; 0 to read it from the model's folder.
        longest: tokens of a sequence at most.
        prompt_logprobs: whether the server gives log probabilities of prompts.
        expects: the path that must be used: ``moonep`` puts counting taps into the engine's processes.
    """

    engine: str
    model: str = ""
    url: str = ""
    command: list[str] = field(default_factory=list)
    python: str = sys.executable
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    key_variable: str = ""
    port: Annotated[int, Within(0, 65535)] = 0
    ready: float = 600.0
    deadline: float = 3600.0
    timeout: float = 300.0
    concurrency: Annotated[int, Within(1, 32)] = 32
    log: str = ""
    dialect: Literal["", "openai", "sglang"] = ""
    in_process: bool = False
    ranks: Annotated[int, Within(1, 64)] = 1
    dtype: str = ""
    vocab: Annotated[int, Within(0)] = 0
    longest: Annotated[int, Within(2)] = 4096
    prompt_logprobs: bool = True
    expects: Literal["", "moonep"] = ""
    samples: Annotated[int, Within(0, 1000)] = 12
    sample_every: Annotated[int, Within(1)] = 16

    @property
    def speaks(self) -> str:
        """The dialect."""
        return self.dialect or ("sglang" if self.engine == "sglang" else "openai")

    def started_by(self, port: int) -> list[str]:
        """The command of the server.

        Raises:
            CaseError: for an engine without a command.
        """
        known = (*COMMANDS.get(self.engine, ()), *_ADDRESS) if self.engine in COMMANDS else ()
        if not (wanted := self.command or known):
            raise CaseError(f"engine {self.engine} has no server known here; give command, url or in_process")
        filled = {"{python}": self.python, "{model}": self.model, "{port}": str(port)}
        return [_filled(one, filled) for one in wanted] + self.arguments

    def secrets(self) -> list[str]:
        """Values that no report may show: of variables, headers, arguments and the URL."""
        found = [value for name, value in {**os.environ, **self.environment}.items() if _SECRET.search(name)]
        found += [*self.headers.values(), *_in_arguments([*self.command, *self.arguments])]
        found += re.findall(r"//([^/@]+)@", self.url) + re.findall(r"[?&][^=]*=([^&]+)", self.url)
        return sorted({value for value in found if len(value) >= _SHORTEST}, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """A text without the secrets."""
        for secret in self.secrets():
            text = text.replace(secret, "***")
        return text


def _filled(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def _in_arguments(arguments: Iterable[str]) -> list[str]:
    found, before = [], ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and _SECRET.search(name):
            found.append(value)
        elif before.startswith("-") and "=" not in before and _SECRET.search(before):
            found.append(argument)
        before = argument
    return found


def read_recipe(path: Path) -> Recipe:
    """A recipe of a file.

    Raises:
        CaseError: naming the file, the key, what is needed and what is there.
    """
    try:
        recipe = build(Recipe, parsed(decoded(read_bytes(path, _LIMIT)), tomllib.loads))
    except OSError as error:
        raise CaseError(f"{path} cannot be read: {error.strerror}") from None
    except SchemaError as error:
        raise CaseError(f"recipe {path}: {error}") from None
    if wrong := _wrong(recipe):
        raise CaseError(f"recipe {path}: {wrong}")
    return recipe


def _wrong(recipe: Recipe) -> str | None:
    ways = [name for name in ("url", "command", "in_process") if getattr(recipe, name)]
    if len(ways) > 1:
        return f"{' and '.join(ways)} exclude each other: a side is started in one way"
    if recipe.ranks > 1 and not recipe.in_process:
        return f"ranks = {recipe.ranks} is for in_process = true; a server takes its own arguments"
    if not recipe.url and not recipe.command and not recipe.model:
        return "model is missing: a folder or name as the engine takes it"
    if recipe.url and not re.match(r"https?://[^/]", recipe.url):
        return f"url = {recipe.url!r} does not begin with http:// or https://"
    if recipe.expects and recipe.url:
        return "expects needs taps in the engine's processes, and a url runs already; give command or in_process"
    seconds = [name for name in ("ready", "deadline", "timeout") if not 0 < getattr(recipe, name) < 1e7]
    return f"{seconds[0]} = {getattr(recipe, seconds[0])}: seconds above 0 are needed" if seconds else None
