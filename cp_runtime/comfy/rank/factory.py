"""Calls the function of a node pack by which ComfyUI loaded a model.

It runs from the user's file in ComfyUI's folder of node packs, the same one that ComfyUI's process has imported. Only that file and
its imports are imported, not the `__init__.py` of its pack, which registers nodes and routes with a server that a rank does not
have.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import comfy.model_patcher
import folder_paths

from ...errors import MirrorError, ProtocolError
from ...pool.protocol import unflatten
from ..shared.recipe import NODE_LOADERS, REMEDY, Factory, file_stamp


def call_factory(factory: Factory) -> Any:
    """Return the function's ModelPatcher. Raises MirrorError if a file of the pack differs from ComfyUI's or needs a server."""
    for path, stamp in factory.sources:
        if file_stamp(path) != stamp:
            raise MirrorError(f"{path} changed on disk after ComfyUI had imported it. Restart ComfyUI.")
    name, _, method = factory.function.partition(".")
    function = vars(_imported(factory.file, factory.folder)).get(name)
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


def _imported(file: str, folder: str) -> ModuleType:
    """Return the module of a file in a node pack, under ComfyUI's name for it; import it if necessary."""
    pack, *packages = Path(file).with_suffix("").relative_to(folder).parts
    path = Path(folder) / pack
    name = str(path).replace(".", "_x_") if packages else pack
    for part in packages:
        if name not in sys.modules:  # a package without an import so far
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(path)]
        name, path = f"{name}.{part}", path / part
    module = sys.modules.get(name)
    if module is not None:
        return module
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise MirrorError(f"{file} is no module of Python")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # any error of a pack's file without a server
        del sys.modules[name]
        raise MirrorError(
            f"{file} cannot be imported in a worker, which has no server and not the rest of its pack: "
            f"{type(error).__name__}: {error}. {REMEDY}"
        ) from error
    return module
