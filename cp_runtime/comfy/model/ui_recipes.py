"""The recipe of a model that this process has loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import comfy.sd
import torch

from ...errors import MirrorError
from .ui_factories import factory_recipe, node_recipe
from .ui_notes import ModelNotes, notes_of
from .wire_dtypes import is_dynamic
from .wire_recipe import DECIDED_BY_WORKER, LOADERS, OPTIONS, REMEDY, FileStamp, Recipe, file_stamp


def recipe_of(patcher: Any) -> Recipe:
    """Return the recipe of a diffusion model's ModelPatcher. It is read once per model.

    Where no stamp was taken when the file was loaded, its present state is taken; then only the comparison of weights
    (`target.verify`) notices that the file was replaced in between.

    Raises:
        MirrorError: its loader left none, or one that workers do not follow; or the file changed while ComfyUI loaded it.
    """
    return once(patcher, lambda *of: replace(_read_recipe(*of), dynamic=is_dynamic(patcher.model)))


def once(patcher: Any, read: Callable[[Any, ModelNotes], Recipe]) -> Recipe:
    """Return the recipe of a ModelPatcher. Read it at the first request, and again once another loader has made the model."""
    init, notes = patcher.cached_patcher_init, notes_of(patcher.model)
    if notes.recipe is None or notes.recipe[0] is not init:
        notes.recipe = init, read(patcher, notes)
    return notes.recipe[1]


def loader_name(function: Any, names: Sequence[str]) -> str | None:
    """Return the name, of these, by which ComfyUI knows a loader; None for another function."""
    return next((name for name in names if getattr(comfy.sd, name) is function), None)


def _read_recipe(patcher: Any, notes: ModelNotes) -> Recipe:
    init, call = patcher.cached_patcher_init, notes.call
    name = type(patcher.model).__name__
    if init is None and call is not None:
        return node_recipe(call, stamp_of(call.path, notes))
    if init is None:
        raise MirrorError(
            f"the loader of this {name} model left no recipe (cached_patcher_init), so the workers cannot load it. {REMEDY}"
        )
    function, args = init[0], init[1]
    loader = loader_name(function, LOADERS)
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
    return Recipe(loader, path, plain, stamp_of(path, notes))


def stamp_of(path: str, notes: ModelNotes) -> FileStamp:
    """Return the state of a model's file as ComfyUI loaded it. Raises MirrorError when it changed meanwhile."""
    before, after = notes.stamps or (file_stamp(path),) * 2
    if before != after:
        raise MirrorError(
            f"{path} changed while ComfyUI loaded it. Wait until it is complete, free ComfyUI's model and node cache, and queue "
            "the prompt again."
        )
    return after
