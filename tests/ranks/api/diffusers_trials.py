"""What rank scripts do with a model that is context parallel, to see what becomes of it."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from diffusers_models import forward, relative
from torch import nn

from cp_runtime import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from cp_runtime.errors import ContextParallelError

ANYTHING = dict(ulysses_anything=True, ring_anything=True)


def fingerprint(model: nn.Module) -> list[Any]:
    """Everything that sharding could leave behind: attributes and hooks of every module, torch's attention function."""
    state: list[Any] = [F.scaled_dot_product_attention]
    for name, module in model.named_modules():
        hooks = [len(value) for key, value in sorted(vars(module).items()) if key.endswith("_hooks") and value is not None]
        state.append((name, sorted(vars(module)), hooks, type(module), type(module).forward))
    return state


def error_of(run: Any) -> str | None:
    try:
        run()
    except ContextParallelError as error:
        return type(error).__name__
    return None


def message_of(run: Any) -> str | None:
    try:
        run()
    except ContextParallelError as error:
        return str(error)
    return None


def refusal(model: nn.Module, world: int, plan: Any, inputs: dict[str, Any], **more: Any) -> str:
    """What a sharded call is refused with; the difference where it is not."""
    expected = forward(model, inputs)
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING), plan, **more)
    try:
        return f"difference {relative(forward(model, inputs), expected)}"
    except ContextParallelError as error:
        return str(error)
    finally:
        remove_context_parallel(model)
