"""Device memory that ranks free when this process loads or frees a model on the same device: see `residency`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import comfy.model_management
import torch
from comfy.model_base import BaseModel

from ...controller.prompt_times import LOADING
from ..shared.weights import network_of
from .interception import release
from .notes import notes_of
from .patcher import ContextParallelPatcher
from .residency import LOADED_TOGETHER
from .runtime import CONTROLLER

WHOLE_DEVICE = 1e30
"""Bytes that ComfyUI asks for when it means the whole device, as for `/free`."""


def watch_stock_loads() -> None:
    """Wrap the functions by which ComfyUI loads models onto devices and frees devices. Call it once."""
    stock, stock_free = comfy.model_management.load_models_gpu, comfy.model_management.free_memory

    @functools.wraps(stock)
    def load_models_gpu(models: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(patcher, ContextParallelPatcher) for patcher in models):
            LOADED_TOGETHER.clear()
            LOADED_TOGETHER.update(models)
        for patcher in models:
            if isinstance(getattr(patcher, "model", None), BaseModel) and not isinstance(patcher, ContextParallelPatcher):
                _drop_from_ranks(patcher)
                release(network_of(patcher.model))
        with CONTROLLER.journal.prompt.taking(LOADING):
            return stock(models, *args, **kwargs)

    @functools.wraps(stock_free)
    def free_memory(memory_required: float, device: torch.device, keep_loaded: Sequence[Any] = (), **kwargs: Any) -> Any:
        if memory_required >= WHOLE_DEVICE:
            _drop_all_but(keep_loaded, device)
        elif comfy.model_management.get_free_memory(device) < memory_required:
            CONTROLLER.make_room(device)  # before any model has to go
        return stock_free(memory_required, device, keep_loaded, **kwargs)

    comfy.model_management.load_models_gpu, comfy.model_management.free_memory = load_models_gpu, free_memory


def _drop_from_ranks(patcher: Any) -> None:
    workers = CONTROLLER.workers
    if workers is not None and str(patcher.load_device) in workers.pool.config.devices:
        CONTROLLER.unload(notes_of(patcher.model).key)


def _drop_all_but(kept: Sequence[Any], device: torch.device) -> None:
    """Make the ranks drop their models, when this process frees the device to which it books them."""
    workers = CONTROLLER.workers
    if workers is not None and device == comfy.model_management.get_torch_device():
        used = {notes_of(loaded.model.model).key for loaded in kept if isinstance(loaded.model, ContextParallelPatcher)}
        for key in set(workers.models.held) - used:
            CONTROLLER.unload(key)
