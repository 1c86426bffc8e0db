"""The UI process's own copy of the weights becomes the pages of the model's file, which it shares with the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ..wire.recipe import DTYPE_OPTIONS, Recipe, adopt, load_recipe, parameters_of


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two weights are stored alike; of quantised ones, data and scales."""

    def stored(weight: Tensor) -> list[Tensor]:
        flatten = getattr(weight, "__tensor_flatten__", None)  # torch's protocol for tensors that wrap others
        parts = [weight.detach()] if flatten is None else [getattr(weight, name) for name in flatten()[0]]
        return [part.cpu().contiguous().flatten().view(torch.uint8) for part in parts]

    ones, others = stored(one), stored(other)
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def share_file_pages(patcher: Any, recipe: Recipe) -> int:
    """Point the UI's own copy of plain weights at the mapped file; returns the bytes of private memory given back.

    The UI process does not compute with them, but other branches of a graph may, so they must stay valid.

    Raises:
        UnsupportedError: a weight is not the file's: another node changed it in place, and the workers do not have that.
    """
    import comfy.memory_management

    model = patcher.model
    if comfy.memory_management.aimdo_enabled or patcher.backup or model.current_weight_patches_uuid is not None:
        return 0  # mapped already, or in use by a branch that runs without context parallelism
    if not recipe.options.keys().isdisjoint(DTYPE_OPTIONS) or not recipe.path.lower().endswith((".safetensors", ".sft")):
        return 0  # the file's pages are not the weights
    fresh = load_recipe(recipe).model.diffusion_model
    weights = dict(fresh.named_parameters())
    released = 0
    own = parameters_of(model.diffusion_model)
    for name, module, parameter in own:
        current, file = getattr(module, parameter), weights.get(name)
        if file is not None and (current.dtype, current.shape) == (file.dtype, file.shape) and not same_bits(current, file):
            raise UnsupportedError(
                f"a node changed the weight {name} in place after the model was loaded, which the workers do not have. "
                "Remove that node and load the model again."
            )
    for name, module, parameter in own:
        if adopt(module, parameter, weights.get(name)):
            released += weights[name].nbytes
    return released
