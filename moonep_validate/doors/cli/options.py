"""How do the declared options become those of a command? A command names what it takes, and gets one value."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console

from moonep_validate.cases.case import CaseError
from moonep_validate.pipeline.options import DECLARED, Options, read, spelled

if TYPE_CHECKING:
    from moonep_validate.pipeline.job import Job

#: What all commands print to; a fixed width where nobody looks, so that output can be compared.
console = Console(width=None if sys.stdout.isatty() else 120)


def takes(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the command offers these options of ``Options``, and gets them as its first argument.

    typer reads a command's options from its signature, so the signature is made here.

    Args:
        names: fields of ``Options``; their old names are offered too, hidden from ``--help``.
    """
    chosen = [name for name in DECLARED if name in names]
    old = [declared.old for name in chosen if (declared := DECLARED[name][1]).old]
    hints = get_type_hints(Options)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        shared = [_parameter(name, hints[name]) for name in chosen] + [_hidden(name) for name in old]

        @wraps(command)
        def wrapper(**values: Any) -> None:
            mine = {parameter.name: values.pop(parameter.name) for parameter in own}
            command(read(values, note), **mine)

        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*shared, *own)]
        vars(wrapper)["__signature__"] = inspect.Signature(parameters)
        wrapper.__annotations__ = {one.name: one.annotation for one in parameters}
        del vars(wrapper)["__wrapped__"]  # it has another signature
        return wrapper

    return decorate


def _parameter(name: str, hint: Any) -> inspect.Parameter:
    """One option for typer; several values are a list to it."""
    one, declared = DECLARED[name]
    several = isinstance(one.default, tuple)
    help = f"{declared.help} Known: {', '.join(declared.choices)}." if declared.choices else declared.help
    option = typer.Option(spelled(name), help=help, min=declared.least, show_default=not several)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if several else one.default,
        annotation=Annotated[list[str] | None if several else hint, option],
    )


def _hidden(name: str) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, typer.Option(spelled(name), hidden=True)],
    )


def note(text: str) -> None:
    """Say something beside the output, which may be read by a machine."""
    Console(stderr=True).print(f"moonep-validate: {text}", markup=False, highlight=False, soft_wrap=True)


def job_of(options: Options) -> Job:
    """The job of a command."""
    from moonep_validate.pipeline.make import make_job

    with console.status("starting"):
        return make_job(options)


def one_of(option: str, value: str, known: Iterable[str]) -> None:
    """Refuse a value that an option does not know.

    Raises:
        CaseError: with the known ones.
    """
    if value not in known:
        raise CaseError(f"{option} is {value!r}; known: {', '.join(known)}")
