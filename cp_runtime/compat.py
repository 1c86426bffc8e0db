"""What torch has no public name for. The only module that uses names of torch with a leading underscore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Whether forward hooks are registered on a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def state_dict_loader(cls: type[nn.Module]) -> Callable[..., Any]:
    """The method by which a module class takes its part of a state dict."""
    return cls._load_from_state_dict
