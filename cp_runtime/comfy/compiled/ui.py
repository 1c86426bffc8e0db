"""Torch Compile in a graph: its settings, and where it applies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comfy.patcher_extension import WrappersMP
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY, TORCH_COMPILE_KWARGS

from .wire import encode_compile


def compile_of(patcher: Any) -> dict[str, Any] | None:
    """Return what the ranks shall pass to `torch.compile`, in wire form; None if no node asks for it.

    Raises:
        UnsupportedError: the ranks cannot compile like that.
    """
    asked = patcher.model_options.get(TORCH_COMPILE_KWARGS)
    return None if asked is None else encode_compile(asked)


def is_known(patcher: Any, kind: str, key: Any) -> bool:
    """Return whether a model's wrappers belong to a node that says how it compiles."""
    return (kind, key) == (WrappersMP.APPLY_MODEL, COMPILE_KEY) and TORCH_COMPILE_KWARGS in patcher.model_options


class OnOneDevice:
    """Wrapper that replaces a model's modules by compiled ones, unless the model's calls go to the ranks.

    Args:
        wrapper: ComfyUI's wrapper.
        goes_to_ranks: returns whether a transformer's calls do.
    """

    def __init__(self, wrapper: Callable[..., Any], goes_to_ranks: Callable[[Any], bool]) -> None:
        self.wrapper, self.goes_to_ranks = wrapper, goes_to_ranks

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        if self.goes_to_ranks(executor.class_obj.diffusion_model):
            return executor(*args, **kwargs)
        return self.wrapper(executor, *args, **kwargs)
