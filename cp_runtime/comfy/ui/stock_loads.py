"""Has the ranks drop a model that ComfyUI is about to load without them, onto a device of theirs: see `residency`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import comfy.model_management
from comfy.model_base import BaseModel

from .controller import CONTROLLER
from .patcher import ContextParallelPatcher
from .timing import recipe_key


def watch_stock_loads() -> None:
    """Wrap the function by which ComfyUI loads models onto devices. Call it once."""
    stock = comfy.model_management.load_models_gpu

    @functools.wraps(stock)
    def load_models_gpu(models: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        for patcher in models:
            _drop_from_ranks(patcher)
        return stock(models, *args, **kwargs)

    comfy.model_management.load_models_gpu = load_models_gpu


def _drop_from_ranks(patcher: Any) -> None:
    workers = CONTROLLER.workers
    if workers is None or isinstance(patcher, ContextParallelPatcher) or not _is_diffusion_model(patcher):
        return
    if str(patcher.load_device) in workers.pool.config.devices:
        CONTROLLER.unload(recipe_key(patcher) or "")


def _is_diffusion_model(patcher: Any) -> bool:
    return isinstance(getattr(patcher, "model", None), BaseModel)
