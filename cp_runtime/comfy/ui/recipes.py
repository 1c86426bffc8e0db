"""The recipe of a model that this process has loaded, and notes taken while ComfyUI loads it.

The ranks load the same file later, perhaps hours later, and must find the same content. If its state were noted only then, a file
replaced in between would pass for the one that ComfyUI holds.

ComfyUI calls a function of a node pack (`cached_patcher_init`) itself, to make a copy of the model for another device. The ranks
call it as well, if they have the same code and all its arguments are plain. For loaders that leave no recipe
(`recipe.NODE_LOADERS`), the call of the node is noted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import comfy.sd
import folder_paths
import torch
from torch import Tensor, nn

from ...errors import MirrorError, UnsupportedError
from ...pool.protocol import flatten
from ..shared.recipe import (
    DECIDED_BY_WORKER,
    FACTORY,
    LOADERS,
    NODE_LOADERS,
    OPTIONS,
    REMEDY,
    VAE_LOADERS,
    Factory,
    FileStamp,
    NodeLoader,
    Recipe,
    file_stamp,
    texts_in,
)
from ..shared.weights import is_dynamic
from .fingerprints import note_state
from .notes import ModelNotes, notes_of
from .runtime import node_folders

VAE_REMEDY = "Use Load VAE or Load Checkpoint."
NOTED = {**NODE_LOADERS, "VAELoader": NodeLoader("vae_name", "vae")}


def watch_loaders() -> None:
    """Wrap ComfyUI's loaders of diffusion models. Call it once.

    Nodes look them up in `comfy.sd` when they run, and a loader registers itself in `cached_patcher_init` by that name too. A pack
    that imported a loader by name before this pack was loaded bypasses the wrapper; `recipe_of` handles that.
    """
    for name in LOADERS:
        setattr(comfy.sd, name, _stamping(getattr(comfy.sd, name)))


def _stamping(loader: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(loader)

    @functools.wraps(loader)
    def load(*args: Any, **kwargs: Any) -> Any:
        path = next(iter(signature.bind(*args, **kwargs).arguments.values()))
        before = _stamp(path)
        loaded = loader(*args, **kwargs)
        patcher, _, vae, *_ = loaded if isinstance(loaded, tuple) else (loaded, None, None)
        for each in filter(None, (patcher, getattr(vae, "patcher", None))):  # a checkpoint may be loaded for its text encoder only
            notes_of(each.model).stamps = before, _stamp(path)
            note_state(each.model)
        return loaded

    return load


def _stamp(path: str) -> FileStamp:
    with contextlib.suppress(MirrorError):  # the loader reports a missing file
        return file_stamp(path)
    return ()


@dataclass(frozen=True)
class NodeCall:
    """A call of a node.

    Args:
        node: its id in NODE_LOADERS.
        cls, method: of the node.
        arguments: by position.
        path: of the loaded model file; "" = the node does not get its name as the table says.
    """

    node: str
    cls: type
    method: str
    arguments: tuple[Any, ...]
    path: str

    def check(self, model: nn.Module) -> None:
        """Raise MirrorError if the node or its model differs from the table, as in another version of its pack."""
        loader, classes = NODE_LOADERS[self.node], {type(module) for module in model.modules()}
        lacking = [setting for setting in loader.settings if not any(hasattr(cls, setting) for cls in classes)]
        if self.path and not lacking:
            return
        what = f"its layers have no {lacking[0]}" if self.path else f"its input {loader.file} names no file of {loader.folder}"
        raise MirrorError(
            f"the workers do not know this version of the node {self.node} ({self.cls.__module__}): {what}. Update ComfyUI's node "
            "packs, or use Load Diffusion Model."
        )


def watch_node_loaders(prompt: Any) -> Any:
    """Wrap the loaders among ComfyUI's nodes; return `prompt` unchanged. ComfyUI calls this, after imports, for every prompt."""
    nodes = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
    for name in NOTED:
        cls: Any = nodes.get(name)
        method = getattr(cls, "FUNCTION", "")
        load = getattr(cls, method, None)
        if inspect.isfunction(load) and getattr(load, "noted_for", None) is not cls:  # a class method's first argument is another
            setattr(cls, method, _noting(name, cls, method, inspect.unwrap(load)))
    return prompt


def _noting(node: str, cls: type, method: str, load: Callable[..., Any]) -> Callable[..., Any]:
    signature, loader = inspect.signature(load), NOTED[node]

    @functools.wraps(load)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        path = folder_paths.get_full_path(loader.folder, str(given.arguments.get(loader.file))) or ""
        before = file_stamp(path) if path else ()
        out = load(self, *args, **kwargs)
        given.apply_defaults()
        patcher: Any = getattr(out[0], "patcher", out[0]) if isinstance(out, tuple) and out else None
        if hasattr(patcher, "model"):
            notes = notes_of(patcher.model)
            notes.call = NodeCall(node, cls, method, given.args[1:], path)
            notes.stamps = (before, file_stamp(path)) if path else None
            note_state(patcher.model)
        return out

    noting.noted_for = cls  # type: ignore[attr-defined]
    return noting


def recipe_of(patcher: Any) -> Recipe:
    """Return the recipe of the ModelPatcher of a diffusion model or a VAE. It is read once per model, and again after another
    loader has made the model.

    If no stamp was taken when the file was loaded, as with a pack that imported a loader by name, the file's present state is
    taken; then only the comparison of weights (`target.Target.verify`) notices a replacement in between.

    Raises:
        MirrorError: its loader left none, or one that workers do not follow; or the file changed while ComfyUI loaded it.
    """
    init, notes = patcher.cached_patcher_init, notes_of(patcher.model)
    if notes.recipe is None or notes.recipe[0] is not init:
        if hasattr(patcher.model, "diffusion_model"):
            notes.recipe = init, replace(_of_model(patcher.model, init, notes), dynamic=is_dynamic(patcher.model))
        else:
            notes.recipe = init, _of_vae(patcher.model, init, notes)
        note_state(patcher.model)
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
    """Return ComfyUI's name for a loader, of these; None for another function."""
    return next((name for name in names if getattr(comfy.sd, name) is function), None)


def _stamp_of(path: str, notes: ModelNotes) -> FileStamp:
    """Return the state of a model's file as ComfyUI loaded it. Raises MirrorError if it changed meanwhile."""
    before, after = notes.stamps or (file_stamp(path),) * 2
    if before != after:
        raise MirrorError(
            f"{path} changed while ComfyUI loaded it. Wait until it is complete, free ComfyUI's model and node cache, and queue "
            "the prompt again."
        )
    return after


def factory_recipe(init: tuple[Any, ...]) -> Recipe:
    """Return the recipe, given a model's `cached_patcher_init`. Raises MirrorError if the workers cannot call that function, or its
    file has changed since this process imported it."""
    function, given = init[0], init[1]
    name = getattr(function, "__qualname__", type(function).__name__)
    module = getattr(function, "__module__", None) or ""
    named = f"the workers cannot repeat the loader {module}.{name}"
    if not isinstance(function, FunctionType) or vars(sys.modules.get(module, sys)).get(name) is not function:
        raise MirrorError(f"{named}: it does not stand at the top of a module. {REMEDY}")
    arguments = _plain(named, given)
    models = [path for path in dict.fromkeys(texts_in(arguments)) if os.path.isabs(path)]
    if not models:
        raise MirrorError(f"{named}: its arguments name no model file by its whole path. {REMEDY}")
    if not all(map(os.path.isfile, models)):
        raise MirrorError(f"{named}: {next(path for path in models if not os.path.isfile(path))} is no file. {REMEDY}")
    place = init[2] if len(init) > 2 else None
    return _recipe(named, module, name, arguments, place, [(path, file_stamp(path)) for path in models])


def node_recipe(call: NodeCall, stamp: FileStamp) -> Recipe:
    """Return the recipe of a model loaded by a node in NODE_LOADERS. `stamp`: of its file. Raises like `factory_recipe`."""
    name = f"{call.cls.__qualname__}.{call.method}"
    named = f"the workers cannot repeat the node {call.node}, which is {call.cls.__module__}.{name}"
    if getattr(sys.modules.get(call.cls.__module__), call.cls.__qualname__, None) is not call.cls:
        raise MirrorError(f"{named}: it does not stand at the top of a module. {REMEDY}")
    models = [(os.path.abspath(call.path), stamp)]
    return _recipe(named, call.cls.__module__, name, _plain(named, call.arguments), 0, models, call.node)


def _plain(named: str, given: Sequence[Any]) -> Any:
    try:
        return flatten([_without_devices(argument) for argument in given], _no_tensor)
    except UnsupportedError as error:
        raise MirrorError(f"{named}: among its arguments, {error}. {REMEDY}") from error


def _recipe(
    named: str,
    module: str,
    function: str,
    arguments: Any,
    place: int | None,
    models: Sequence[tuple[str, FileStamp]],
    node: str = "",
) -> Recipe:
    file = os.path.abspath(getattr(sys.modules.get(module), "__file__", None) or "")
    folders = [folder for folder in node_folders() if file.startswith(os.path.join(folder, ""))]
    if not folders or not file.endswith(".py"):
        raise MirrorError(f"{named}: it is not of a node pack in ComfyUI's folder custom_nodes. {REMEDY}")
    factory = Factory(folders[0], file, function, arguments, place, tuple(models), node)
    return Recipe(FACTORY, models[0][0], stamp=models[0][1], factory=factory)


def _no_tensor(_: Tensor, path: str) -> Any:
    raise UnsupportedError(f"{path} is a tensor")


def _without_devices(argument: Any) -> Any:
    """Return options of ComfyUI's loaders without the device, which differs from rank to rank."""
    return {k: v for k, v in argument.items() if k not in DECIDED_BY_WORKER} if type(argument) is dict else argument
