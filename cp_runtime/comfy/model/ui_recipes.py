"""The recipe of a model that this process has loaded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import comfy.sd
import torch

from ...errors import MirrorError, UnsupportedError
from .ui_factories import factory_recipe, node_recipe
from .ui_notes import ModelNotes, notes_of
from .wire_dtypes import is_dynamic
from .wire_recipe import DECIDED_BY_WORKER, LOADERS, OPTIONS, REMEDY, VAE_LOADERS, FileStamp, Recipe, file_stamp

VAE_REMEDY = "Use Load VAE or Load Checkpoint."


def recipe_of(patcher: Any) -> Recipe:
    """Return the recipe of the ModelPatcher of a diffusion model or a VAE. It is read once per model, and again once another loader
    has made the model.

    Where no stamp was taken when the file was loaded, as for VAEs, its present state is taken; then only the comparison of weights
    (`target.Target.verify`) notices that the file was replaced in between.

    Raises:
        MirrorError: its loader left none, or one that workers do not follow; or the file changed while ComfyUI loaded it.
    """
    init, notes = patcher.cached_patcher_init, notes_of(patcher.model)
    if notes.recipe is None or notes.recipe[0] is not init:
        if hasattr(patcher.model, "diffusion_model"):
            notes.recipe = init, replace(_of_model(patcher.model, init, notes), dynamic=is_dynamic(patcher.model))
        else:
            notes.recipe = init, _of_vae(patcher.model, init, notes)
    return notes.recipe[1]


def recipe_key(patcher: Any) -> str | None:
    """Return the key of a model's file, or None if its loader left no recipe that workers could follow."""
    with contextlib.suppress(MirrorError, UnsupportedError):
        return recipe_of(patcher).key
    return None


def _of_model(model: Any, init: Any, notes: ModelNotes) -> Recipe:
    if init is None and notes.call is not None:
        notes.call.check(model)
        return node_recipe(notes.call, _stamp_of(notes.call.path, notes))
    if init is None:
        raise MirrorError(
            f"the loader of this {type(model).__name__} model left no recipe (cached_patcher_init), so the workers cannot load it. "
            f"{REMEDY}"
        )
    function, args = init[0], init[1]
    loader = _loader_name(function, LOADERS)
    if loader is None:
        return factory_recipe(init)
    place = 1 if loader == LOADERS[0] else 6
    options = args[place] if len(args) > place else {}
    plain: dict[str, Any] = {}
    for option, value in options.items():
        if option in DECIDED_BY_WORKER or value is None:
            continue
        if option not in OPTIONS:
            raise MirrorError(f"the loader's model option {option!r} cannot be sent to the workers (allowed: {', '.join(OPTIONS)})")
        plain[option] = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    path = os.path.abspath(args[0])
    return Recipe(loader, path, plain, _stamp_of(path, notes))


def _of_vae(model: Any, init: Any, notes: ModelNotes) -> Recipe:
    if init is None:
        raise MirrorError(
            f"the loader of this VAE ({type(model).__name__}) left no recipe (cached_patcher_init), so the workers cannot load it: "
            f"it is made of several files, or came from another node pack. {VAE_REMEDY}"
        )
    function, args = init[0], init[1]
    loader = _loader_name(function, VAE_LOADERS)
    if loader is None:
        raise MirrorError(
            f"the loader function {function.__module__}.{function.__qualname__} is not one that the workers may call "
            f"({', '.join(VAE_LOADERS)}). {VAE_REMEDY}"
        )
    metadata = args[1] if loader == VAE_LOADERS[0] and len(args) > 1 else None
    if metadata is not None and "tae_latent_channels" in metadata:
        raise MirrorError(f"this VAE is what its name says, and not what its file says. {VAE_REMEDY}")
    path = os.path.abspath(args[0])
    return Recipe(loader, path, {}, _stamp_of(path, notes))


def _loader_name(function: Any, names: Sequence[str]) -> str | None:
    """Return the name, of these, by which ComfyUI knows a loader; None for another function."""
    return next((name for name in names if getattr(comfy.sd, name) is function), None)


def _stamp_of(path: str, notes: ModelNotes) -> FileStamp:
    """Return the state of a model's file as ComfyUI loaded it. Raises MirrorError when it changed meanwhile."""
    before, after = notes.stamps or (file_stamp(path),) * 2
    if before != after:
        raise MirrorError(
            f"{path} changed while ComfyUI loaded it. Wait until it is complete, free ComfyUI's model and node cache, and queue "
            "the prompt again."
        )
    return after
