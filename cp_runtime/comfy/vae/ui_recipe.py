"""The recipe of a VAE that this process has loaded."""

from __future__ import annotations

import os
from typing import Any

from ...errors import MirrorError
from ..memory.ui_file_pages import size_check
from ..model.ui_notes import ModelNotes
from ..model.ui_recipes import loader_name, once, stamp_of
from ..model.wire_recipe import VAE_LOADERS, Recipe

_REMEDY = "Use Load VAE or Load Checkpoint."


def vae_recipe_of(patcher: Any) -> Recipe:
    """Return the recipe of a VAE's ModelPatcher, which is read once per VAE.

    ComfyUI takes no stamp when it loads a VAE, so its file is the one found when the recipe is read. Once the ranks have loaded it,
    their weights are compared (`target.verify`).

    Raises:
        MirrorError: its loader left no recipe, or one that workers do not follow.
    """
    return once(patcher, _read)


def _read(patcher: Any, notes: ModelNotes) -> Recipe:
    init = patcher.cached_patcher_init
    if init is None:
        raise MirrorError(
            f"the loader of this VAE ({type(patcher.model).__name__}) left no recipe (cached_patcher_init), so the workers cannot "
            f"load it: it is made of several files, or came from another node pack. {_REMEDY}"
        )
    function, args = init[0], init[1]
    loader = loader_name(function, VAE_LOADERS)
    if loader is None:
        raise MirrorError(
            f"the loader function {function.__module__}.{function.__qualname__} is not one that the workers may call "
            f"({', '.join(VAE_LOADERS)}). {_REMEDY}"
        )
    metadata = args[1] if loader == VAE_LOADERS[0] and len(args) > 1 else None
    if metadata is not None and "tae_latent_channels" in metadata:
        raise MirrorError(f"this VAE is what its name says, and not what its file says. {_REMEDY}")
    path = os.path.abspath(args[0])
    stamp = stamp_of(path, notes)
    notes.check_file = size_check(patcher.model, path, stamp[0])
    return Recipe(loader, path, {}, stamp)
