"""Calls the function of a node pack by which ComfyUI loaded a model.

It runs from the user's file in ComfyUI's folder of node packs, the same one that ComfyUI's process has imported (`packs`).
"""

from __future__ import annotations

import importlib
import inspect
import os
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import comfy.model_patcher
import folder_paths

from ...errors import MirrorError, ProtocolError
from ...pool.protocol import unflatten
from ..shared.recipe import NODE_LOADERS, REMEDY, Factory
from .packs import FAILED, import_packs


def call_factory(factory: Factory) -> Any:
    """Return the function's ModelPatcher. Raises MirrorError if the pack cannot be imported, or has no such function."""
    name, _, method = factory.function.partition(".")
    function = vars(_module(factory.file, factory.folder)).get(name)
    if factory.node in NODE_LOADERS and isinstance(function, type) and method == getattr(function, "FUNCTION", None):
        return _call_node(function, method, factory)
    if not isinstance(function, FunctionType):
        raise MirrorError(f"{factory.file} has no function {factory.function!r}")
    arguments = unflatten(factory.arguments, _no_tensor)
    static = {"disable_dynamic": True} if "disable_dynamic" in inspect.signature(function).parameters else {}
    made = function(*arguments, **static)
    patcher = made if factory.place is None else made[factory.place]
    if type(patcher) is not comfy.model_patcher.ModelPatcher:
        raise MirrorError(f"the loader {factory.function} made a {type(patcher).__qualname__} and no plain model. {REMEDY}")
    return patcher


def _call_node(cls: type, method: str, factory: Factory) -> Any:
    """Return the ModelPatcher that a node makes. It finds the model file where ComfyUI's process has found it."""
    loader, (path, _) = NODE_LOADERS[factory.node], factory.models[0]
    stock = folder_paths.get_full_path

    def full_path(folder: str, filename: str) -> str | None:
        return path if folder == loader.folder and path.endswith(os.sep + filename) else stock(folder, filename)

    folder_paths.get_full_path = full_path
    try:
        made = getattr(cls(), method)(*unflatten(factory.arguments, _no_tensor))[factory.place]
    finally:
        folder_paths.get_full_path = stock
    for module in made.model.modules():
        settings = [setting for setting in loader.settings if hasattr(type(module), setting)]
        vars(module).update({setting: getattr(module, setting) for setting in settings})
    return made


def _no_tensor(leaf: Any) -> Any:
    raise ProtocolError(f"a tensor: {str(leaf)[:80]}")


def _module(file: str, folder: str) -> ModuleType:
    """Return the module of a file in a node pack, which this rank has imported. Raises MirrorError: it could not."""
    pack, *packages = Path(file).with_suffix("").relative_to(folder).parts
    path = os.path.join(folder, pack)
    import_packs([path if packages else file])
    inside = [part for part in packages if part != "__init__"]
    name = ".".join([path.replace(".", "_x_"), *inside]) if packages else path
    try:
        return importlib.import_module(name)  # which the pack may import only when it needs it
    except ImportError as error:
        why = FAILED.get(os.path.basename(path if packages else file), str(error))
        raise MirrorError(f"the workers cannot import {file}: {why}. {REMEDY}") from error
