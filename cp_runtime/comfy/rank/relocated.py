"""The file of a load on another computer than ComfyUI's."""

from __future__ import annotations

import importlib
import os
from functools import cache

import folder_paths
from comfy.cli_args import args

from ...pool.messages import Load
from ..shared.recipe import Recipe, relocate

NO_MODELS = ("custom_nodes", "datasets", "configs")
"""Kinds of folders from which no model is read."""


def recipe_of(request: Load, host: str) -> Recipe:
    """Return the recipe of a load. `host`: the name of this computer for ComfyUI's, where that is another one; else empty. Raises
    MirrorError or ChangedFileError: see `relocate`."""
    return Recipe.from_json(relocate(request.recipe, request.file, _model_folders(), host) if host else request.recipe)


@cache
def _model_folders() -> dict[str, list[str]]:
    """Return this ComfyUI's folders by the kind of model in them, as `main.py` has them."""
    files = [os.path.join(os.path.dirname(os.path.abspath(folder_paths.__file__)), "extra_model_paths.yaml")]
    files += [file for given in args.extra_model_paths_config or [] for file in given]
    load = importlib.import_module("utils.extra_config").load_extra_path_config
    for file in filter(os.path.isfile, files):
        load(file)
    known = {kind: folders for kind, (folders, _) in folder_paths.folder_names_and_paths.items() if kind not in NO_MODELS}
    return {kind: [os.path.abspath(folder) for folder in folders] for kind, folders in known.items()}
