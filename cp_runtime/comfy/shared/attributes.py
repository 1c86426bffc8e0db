"""Attributes of a model's modules that ComfyUI does not set: node packs note there what they need for the next call."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from .assigned import set_later
from .modules import BOOKKEEPING
from .objects import STANDARD, is_ours

_FORWARD = "forward"  # replaced for the time of a call


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that ComfyUI does not set by itself. Some µs, as calls look at all modules."""
    cls: Any = type(module)
    return {name: value for name, value in vars(module).items() if _is_free(cls, name) and not is_ours(value)}


@functools.lru_cache(maxsize=1 << 14)
def _is_free(cls: Any, name: str) -> bool:
    """Return whether ComfyUI does not set an attribute of a class's modules by itself."""
    return not (name in STANDARD or name == _FORWARD or name in set_later(cls) or BOOKKEEPING.fullmatch(name))


def set_attributes(module: nn.Module, wanted: dict[str, Any]) -> None:
    """Have a module have these attributes, of those that ComfyUI does not set, and no others."""
    for name in attributes_of(module).keys() - wanted.keys():
        delattr(module, name)
    vars(module).update(wanted)
