"""What rank scripts do with a model that is context parallel, to see what becomes of it."""

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


TOLERANCE = 1e-5
"""Largest difference, in standard deviations: docs/numerics.md."""


def close(difference: float, what: Any = "") -> None:
    """Assert that a difference is one of rounding, nan not."""
    assert difference <= TOLERANCE, f"{what}: {difference}"


def refused(run: Any, *words: str, kind: type[Exception] = ContextParallelError) -> None:
    """Assert that a call is refused, with these words in the message."""
    said = None
    try:
        run()
    except kind as error:
        said = str(error)
    assert said is not None, f"not refused: {words}"
    assert all(word in said for word in words), f"{words} not in: {said}"


def sharded(model: nn.Module, world: int, plan: Any, inputs: dict[str, Any], **more: Any) -> None:
    """A call in Ulysses mode, which must give what one process gives."""
    expected = forward(model, inputs)
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING), plan, **more)
    try:
        close(relative(forward(model, inputs), expected))
    finally:
        remove_context_parallel(model)
