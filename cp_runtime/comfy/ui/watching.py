"""Whether other code than ComfyUI's and this pack's takes part in a sampling run: it may change the model between two calls, or for
the time of one, so that every call looks at all modules then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ..shared.reached import COMFY
from .packs import PACKAGE


def takes_foreign_part(guider: Any, sampler: Any) -> bool:
    """Return whether a guider, its model's options or a sampler have foreign code."""
    functions = [type(guider), type(sampler), *_callables(vars(sampler)), *_callables(guider.model_options)]
    return any(map(is_foreign, functions))


def has_foreign_control(conds: Mapping[str, Any]) -> bool:
    """Return whether a run's conditions have a ControlNet of a class that is not ComfyUI's."""
    return any(is_foreign(type(control)) for control in controls_of(conds))


def controls_of(conds: Mapping[str, Any]) -> Iterator[Any]:
    """Yield every ControlNet of a run's conditions once, with those before it in its chain."""
    seen: set[int] = set()
    for cond in (cond for part in conds.values() for cond in part or ()):
        control = cond.get("control")
        while control is not None and id(control) not in seen:
            seen.add(id(control))
            yield control
            control = control.previous_controlnet


def has_foreign_wrapper(options: Mapping[str, Any]) -> bool:
    """Return whether a call's `transformer_options` have a foreign wrapper or callback."""
    return any(map(is_foreign, _callables([options.get("wrappers"), options.get("callbacks")])))


def _callables(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _callables(each)
    elif callable(value):
        yield value


def is_foreign(thing: Any) -> bool:
    """Return whether a function, an object or a class is neither of ComfyUI nor of this pack."""
    while isinstance(thing, partial) or hasattr(thing, "__func__"):
        thing = thing.func if isinstance(thing, partial) else thing.__func__
    module = str(getattr(thing, "__module__", None) or type(thing).__module__)
    return not (module.partition(".")[0] in COMFY or "comfy_extras" in module or module.startswith(PACKAGE))
