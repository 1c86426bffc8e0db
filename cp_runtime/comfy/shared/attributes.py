"""Attributes of a model's modules that ComfyUI does not set: node packs note there what they need for the next call."""

from __future__ import annotations

from typing import Any

from torch import nn

from .assigned import set_later
from .modules import BOOKKEEPING
from .objects import STANDARD, is_ours

_FORWARD = "forward"  # replaced for the time of a call


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that ComfyUI does not set by itself."""
    cls: Any = type(module)
    later = set_later(cls)
    return {
        name: value
        for name, value in vars(module).items()
        if not (name in STANDARD or name in later or name == _FORWARD or BOOKKEEPING.fullmatch(name) or is_ours(value))
    }


def set_attributes(module: nn.Module, wanted: dict[str, Any]) -> None:
    """Have a module have these attributes, of those that ComfyUI does not set, and no others."""
    now = attributes_of(module)
    for name in now.keys() - wanted.keys():
        delattr(module, name)
    vars(module).update(wanted)
