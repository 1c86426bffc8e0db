"""Upscale models that are short of memory, or hold something that no other process can have."""

import copy
import itertools
import threading
from typing import Any

import comfy.utils
import torch
from comfy.model_patcher import CoreModelPatcher

from .node import node


class ShortOfMemory:
    """An upscale model on a device without memory for large tiles."""

    def __init__(self, model: Any, tile: int) -> None:
        self._model, self._tile = model, tile
        self.patcher, self.scale = model.patcher, model.scale

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        if max(image.shape[2:]) > self._tile:
            raise torch.OutOfMemoryError("the tile is too large")
        return self._model(image)


@node("UPSCALE_MODEL", model="UPSCALE_MODEL")
def TestShortOfMemory(model: Any, tile: int = 256) -> ShortOfMemory:
    """ComfyUI's node halves its tiles until they have `tile` pixels."""
    return ShortOfMemory(model, tile)


@node("UPSCALE_MODEL", model="UPSCALE_MODEL")
def TestBlendingFails(model: Any, after: int = 3) -> Any:
    """Once, ComfyUI's process is out of memory when it has blended some tiles."""
    stock = comfy.utils.tiled_scale

    def tiled_scale(samples: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        counted = itertools.count(1)

        def upscale(tile: Any) -> Any:
            if kwargs["upscale_amount"] and next(counted) > after:
                comfy.utils.tiled_scale = stock
                raise torch.OutOfMemoryError("blending")
            return function(tile)

        return stock(samples, upscale, *args, **kwargs)

    comfy.utils.tiled_scale = tiled_scale
    return model


@node("UPSCALE_MODEL", model="UPSCALE_MODEL")
def TestUnsendable(model: Any) -> Any:
    """A copy of a model with a lock in its network."""
    made, network = copy.copy(model), copy.deepcopy(model.model)
    network.lock = threading.Lock()
    made._model, made.patcher = network, CoreModelPatcher(network, model.patcher.load_device, model.patcher.offload_device)
    return made
