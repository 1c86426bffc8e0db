"""Weights of the UI process as pages of the model's file, like those of the ranks.

Without DynamicVRAM ComfyUI copies a model's weights into private memory. Once the ranks have them, they become the mapped file:
every process can have the pages, and the system can drop them. The mapping is private, so in-place changes of a weight get private
pages. With DynamicVRAM ComfyUI maps the file itself.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import comfy.memory_management
import comfy.model_management

from ...engine.weights.files import MAPPED
from ...engine.weights.pages import give_back, mapped
from ...errors import UnsupportedError
from ...system import system
from ..shared.files import ModelFiles
from ..shared.loading import adopt, load_recipe, parameters_of
from ..shared.recipe import DTYPE_OPTIONS, Recipe
from ..shared.weights import same_weight
from .runtime import reloading_changed_files


def share_file_pages(patcher: Any, recipe: Recipe) -> int:
    """Point the UI's own copy of plain weights at the mapped file; return the bytes of private memory freed.

    The UI process does not compute with them, but other branches of a graph may, so they must stay valid. A weight that the loader
    converted is a `CastWeight` then, until ComfyUI is about to compute with it or to save it.

    Raises:
        UnsupportedError: a weight is not the file's, so the workers do not have it.
        ChangedFileError: the file is not the one that was loaded.
    """
    model = patcher.model
    if comfy.memory_management.aimdo_enabled or patcher.backup or model.current_weight_patches_uuid is not None:
        return 0  # mapped already, or in use by a branch that runs without context parallelism
    on_device = not comfy.model_management.is_device_cpu(patcher.load_device)
    converts = not on_device and not recipe.options.keys().isdisjoint(DTYPE_OPTIONS)
    if recipe.factory is not None or converts or not recipe.path.lower().endswith(MAPPED):
        return 0  # the file's pages are not the weights, or need not be
    fresh, missing, files = load_recipe(recipe, cast_later=on_device)
    weights = {name: weight for name, weight in fresh.model.diffusion_model.named_parameters() if name not in missing}
    released = 0
    own = parameters_of(model.diffusion_model)
    for name, module, parameter in own:
        current, file = getattr(module, parameter), weights.get(name)
        if file is not None and (current.dtype, current.shape) == (file.dtype, file.shape) and not same_weight(current, file):
            raise UnsupportedError(
                f"something changed the weight {name} in place after ComfyUI had loaded it, and the workers have it as it is in "
                f"{os.path.basename(recipe.path)}. Remove the node that did so and load the model again."
            )
    if not system.SHARES_PAGES:
        return 0
    give_back(weights.values(), mapped(recipe.path))  # all of them have been read
    for name, module, parameter in own:
        if adopt(module, parameter, weights.get(name)):
            released += weights[name].nbytes
    guard(model, files)
    return released


def guard(model: Any, files: ModelFiles) -> None:
    """Check before ComfyUI uses a model, and after each of its calls, that its files have not changed.

    ComfyUI asks a model for its dtype before it loads it and in every call, whichever patcher it uses; and the transformer for all
    of its weights before it merges or saves them.
    """
    owner, stock, network = weakref.ref(model), type(model), weakref.ref(model.diffusion_model)
    own_dtype, own_apply = vars(model).get("get_dtype"), vars(model).get("apply_model")  # a node's

    @reloading_changed_files()
    def get_dtype() -> Any:
        files.check()
        return own_dtype() if own_dtype else stock.get_dtype(owner())

    @reloading_changed_files()
    def apply_model(*args: Any, **kwargs: Any) -> Any:
        with files.unchanged():
            return own_apply(*args, **kwargs) if own_apply else stock.apply_model(owner(), *args, **kwargs)

    @reloading_changed_files()
    def state_dict(*args: Any, **kwargs: Any) -> Any:
        files.check()
        found: Any = network()
        return type(found).state_dict(found, *args, **kwargs)

    for weight in model.diffusion_model.parameters():
        weight.cp_files = files  # for merges, which ComfyUI keeps
    model.get_dtype, model.apply_model, model.diffusion_model.state_dict = get_dtype, apply_model, state_dict
