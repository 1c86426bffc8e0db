"""Torch Compile in a graph: what it asks for, and where it acts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comfy.patcher_extension import WrappersMP
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY, TORCH_COMPILE_KWARGS

from .wire import encode_compile


def compile_of(patcher: Any) -> dict[str, Any] | None:
    """What the ranks shall tell `torch.compile`, in wire form; None where no node asks for it.

    Raises:
        UnsupportedError: the ranks cannot do that.
    """
    asked = patcher.model_options.get(TORCH_COMPILE_KWARGS)
    return None if asked is None else encode_compile(asked)


def is_known(patcher: Any, kind: str, key: Any) -> bool:
    """Whether wrappers of a model are those of a node that says what it asks for."""
    return (kind, key) == (WrappersMP.APPLY_MODEL, COMPILE_KEY) and TORCH_COMPILE_KWARGS in patcher.model_options


class OnOneDevice:
    """The wrapper that puts compiled modules in the place of a model's own, unless the model's calls go to the ranks.

    Args:
        wrapper: of ComfyUI.
        goes_to_ranks: whether the calls of a transformer do.
    """

    def __init__(self, wrapper: Callable[..., Any], goes_to_ranks: Callable[[Any], bool]) -> None:
        self.wrapper, self.goes_to_ranks = wrapper, goes_to_ranks

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        if self.goes_to_ranks(executor.class_obj.diffusion_model):
            return executor(*args, **kwargs)
        return self.wrapper(executor, *args, **kwargs)
