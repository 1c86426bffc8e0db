"""Find out which attention function a node chose for a model, from the override that it set."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from comfy.ldm.modules import attention as functions

from ...errors import UnsupportedError
from ..patches.ui_nodes import display_name, node_of
from .wire import FLASH_OF_PACK, ON_CUDA, OVERRIDES, SAGE_MODES, SAGE_OF_PACK, missing_for

OVERRIDE = "optimized_attention_override"


def attention_of(options: Mapping[str, Any], device_type: str) -> str | None:
    """Return the name of the chosen function (see `wire.attention_function`); None if no node did. `device_type`: of the ranks.

    Raises:
        UnsupportedError: the ranks do not have it, or the override is unknown.
    """
    override = options.get(OVERRIDE)
    if override is None:
        return None
    node = display_name(node_of(override))
    name = _name_of(override)
    if name is None:
        raise UnsupportedError(
            f"{node} replaced the attention function by one of its own, which the workers do not have. They have ComfyUI's and "
            "those of SageAttention, chosen by Patch Sage Attention KJ."
        )
    if name in ON_CUDA and device_type != "cuda":
        raise UnsupportedError(f"{node} chose the attention function {name}, which does not run on {device_type}.")
    missing = missing_for(name)
    if missing is not None:
        raise UnsupportedError(
            f"{node} chose the attention function {name}, which needs {missing}. Install it into ComfyUI's Python environment, or "
            "choose another attention function."
        )
    return name


def _name_of(override: Any) -> str | None:
    """Return the function's name, or None if it is unknown: an override that holds anything else has conditions of its own."""
    variable = OVERRIDES.get(_name_in_pack(override))
    held = _held(override)
    if variable is None or set(held) != {variable}:
        return None
    chosen = inspect.unwrap(held[variable])
    for name, function in functions.REGISTERED_ATTENTION_FUNCTIONS.items():
        if chosen is inspect.unwrap(function):
            return str(name) if chosen.__module__ == functions.__name__ else None  # packs may register their own
    made_by = _name_in_pack(chosen)
    if made_by == FLASH_OF_PACK:
        return "flash"
    return _sage_mode(chosen) if made_by == SAGE_OF_PACK else None


def _sage_mode(attention: Callable[..., Any]) -> str | None:
    """Return the mode of KJNodes' function: its inner function closes over SageAttention's and names the precision of its sums."""
    inner = inspect.unwrap(_held(attention).get("sage_func", attention))
    held = _held(inner)
    if "sage_attention" in held:  # it holds the mode itself
        return held["sage_attention"] if held["sage_attention"] in SAGE_MODES else None
    constants = set(getattr(getattr(inner, "__code__", None), "co_consts", ()))
    for name, mode in SAGE_MODES.items():
        if mode.function in held and constants.issuperset(mode.settings.values()):
            return name
    return None


def _held(function: Any) -> Mapping[str, Any]:
    """Return the variables of a closure, by name."""
    return inspect.getclosurevars(function).nonlocals if isinstance(function, FunctionType) else {}


def _name_in_pack(function: Any) -> str:
    """Return `module:qualified.name` without the pack's folder, which ComfyUI puts in front of module names."""
    module = getattr(function, "__module__", None) or ""
    if os.path.isabs(module):
        module = module.rpartition(os.sep)[2].partition(".")[2]
    return f"{module}:{getattr(function, '__qualname__', '')}"
