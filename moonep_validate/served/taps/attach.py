"""Where does a sampler look? Around the methods of ``moonep.Buffer``, and of vLLM around its MoE layer too.

At the Buffer alone nobody sees which weights the experts read; vLLM's experts say it, and its
``MoonEPPrepareAndFinalize`` is where its layer begins and ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from moonep_validate.served.taps.sampling import Sampler
from moonep_validate.subjects.engines import notes


def sample(buffer: Any, sampler: Sampler) -> None:
    """Put a sampler on a Buffer class of generation A; another one has no such prefetch, and is left alone."""
    if not hasattr(buffer, "prefetch_weight"):
        return
    buffer.__init__ = _built(buffer.__init__)
    buffer.dispatch = _dispatch(buffer.dispatch, sampler)
    buffer.prefetch_weight = _prefetch(buffer.prefetch_weight, sampler)
    buffer.combine = _combine(buffer.combine, sampler)


def _built(method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @wraps(method)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        self.__moonep_asked__ = bound.arguments

    return construct


def _dispatch(method: Callable[..., Any], sampler: Sampler) -> Callable[..., Any]:
    @wraps(method)
    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        given: dict[str, Any] = {}
        with sampler.quietly():
            given = dict(zip(notes.ASKED, _values(method, self, args, kwargs), strict=False))
            sampler.asked(self.__moonep_asked__, given, kwargs.get("plan"))
        out = method(self, *args, **kwargs)
        with sampler.quietly():
            sampler.dispatched(given, kwargs.get("plan"), out)
        return out

    return dispatch


def _prefetch(method: Callable[..., Any], sampler: Sampler) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @wraps(method)
    def prefetch(self: Any, *args: Any, **kwargs: Any) -> Any:
        named: dict[str, Any] = {}
        with sampler.quietly():
            named = signature.bind(self, *args, **kwargs).arguments
            sampler.filling(notes.full_of(named), named["plan"])
        out = method(self, *args, **kwargs)
        with sampler.quietly():
            sampler.filled(notes.full_of(named), named["plan"])
        return out

    return prefetch


def _combine(method: Callable[..., Any], sampler: Sampler) -> Callable[..., Any]:
    @wraps(method)
    def combine(self: Any, *args: Any, **kwargs: Any) -> Any:
        given: tuple[Any, ...] = ()
        with sampler.quietly():
            plan, rows, row_weights, *_ = (*_values(method, self, args, kwargs), None)
            given = rows, row_weights, plan
            sampler.combining(*given)
        out = method(self, *args, **kwargs)
        with sampler.quietly():
            sampler.combined(*given, out, bool(kwargs.get("zero_copy")))
        return out

    return combine


def _values(method: Callable[..., Any], *call: Any) -> list[Any]:
    """What a method is given, in the order of its parameters, defaults among them."""
    self, args, kwargs = call
    bound = inspect.signature(method).bind(self, *args, **kwargs)
    bound.apply_defaults()
    return list(bound.arguments.values())[1:]


def sample_vllm_layer(kernel: Any, sampler: Sampler) -> None:
    """Put a sampler on vLLM's ``MoonEPPrepareAndFinalize``."""
    prepare, finalize = kernel.prepare, kernel.finalize

    @wraps(prepare)
    def prepared(self: Any, *args: Any, **kwargs: Any) -> Any:
        with sampler.quietly():
            named = inspect.signature(prepare).bind(self, *args, **kwargs).arguments
            if not named.get("apply_router_weight_on_input"):  # else other rows are dispatched than were given
                sampler.given(id(self), named["a1"], named["topk_ids"], named["topk_weights"])
        return prepare(self, *args, **kwargs)

    @wraps(finalize)
    def finalized(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        done = finalize(self, output, *args, **kwargs)
        with sampler.quietly():
            sampler.came(output)
        return done

    kernel.prepare, kernel.finalize = prepared, finalized


def sample_vllm_experts(experts: Any, sampler: Sampler) -> None:
    """Put a sampler on vLLM's ``MoonEPExperts``, which read ``w1``, ``w2`` and the layout's up projection."""
    apply = experts.apply

    @wraps(apply)
    def applied(self: Any, *args: Any, **kwargs: Any) -> Any:
        with sampler.quietly():
            named = inspect.signature(apply).bind(self, *args, **kwargs).arguments
            sampler.reads({"gate": named["w1"], "up": self.weight_layout.full_up_weight, "down": named["w2"]})
        return apply(self, *args, **kwargs)

    experts.apply = applied
