"""Makes the UI process's own copy of the weights the pages of the model's file, which it then shares with the ranks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import comfy.memory_management
import comfy.model_management

from ...engine.weights.files import MAPPED
from ...engine.weights.pages import give_back, mapped
from ...errors import MirrorError, UnsupportedError
from ..model.wire_loading import adopt, load_recipe, parameters_of
from ..model.wire_recipe import DTYPE_OPTIONS, Recipe
from ..model.wire_samples import same_weight


def share_file_pages(patcher: Any, recipe: Recipe) -> int:
    """Point the UI's own copy of plain weights at the mapped file; returns the bytes of private memory given back.

    The UI process does not compute with them, but other branches of a graph may, so they must stay valid. What the loader converted
    is a `CastWeight` then, until ComfyUI is about to compute with it or to save it.

    Raises:
        UnsupportedError: a weight is not the file's, so the workers do not have it.
        MirrorError: the file is not the one that was loaded.
    """
    model = patcher.model
    if comfy.memory_management.aimdo_enabled or patcher.backup or model.current_weight_patches_uuid is not None:
        return 0  # mapped already, or in use by a branch that runs without context parallelism
    on_device = not comfy.model_management.is_device_cpu(patcher.load_device)
    converts = not on_device and not recipe.options.keys().isdisjoint(DTYPE_OPTIONS)
    if recipe.factory is not None or converts or not recipe.path.lower().endswith(MAPPED):
        return 0  # the file's pages are not the weights, or need not be
    fresh, missing = load_recipe(recipe, cast_later=on_device)
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
    give_back(weights.values(), mapped(recipe.path))  # all of them have been read
    guard_size(model, recipe.path, recipe.stamp[0])
    for name, module, parameter in own:
        if adopt(module, parameter, weights.get(name)):
            released += weights[name].nbytes
    return released


def guard_size(model: Any, path: str, size: int) -> None:
    """Check whenever ComfyUI is about to use the model that its file at `path` still has `size` bytes.

    ComfyUI asks a model for its dtype before it loads it and in every call, whichever patcher it uses, so `get_dtype` is where an
    error can still be raised.
    """
    owner, stock, check = weakref.ref(model), type(model).get_dtype, size_check(model, path, size)

    def get_dtype() -> Any:
        check()
        return stock(owner())

    model.get_dtype = get_dtype


def size_check(model: Any, path: str, size: int) -> Callable[[], None]:
    """Return a check that raises MirrorError once the file at `path` has less than `size` bytes, as long as `model` lives.

    A process that reads a mapped page past the end of a file gets SIGBUS and ends. If the file is cut off in the middle of a call,
    nobody notices.
    """
    descriptor = os.open(path, os.O_RDONLY)  # the mapped file, even if another gets its name
    weakref.finalize(model, os.close, descriptor).atexit = False

    def check() -> None:
        now = os.fstat(descriptor).st_size
        if now < size:
            raise MirrorError(
                f"the model file {path} was cut off while ComfyUI used it: it has {now} bytes, and had {size}. Restore it, "
                "free ComfyUI's model and node cache, and queue the prompt again."
            )

    return check
