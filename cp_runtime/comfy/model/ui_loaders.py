"""Notes the state of a model's file at the moment when ComfyUI loads it, and keeps what does not fit in the file's pages. For
loaders without a recipe (`wire_recipe.NODE_LOADERS`), it also notes which call of a node loaded the model.

The ranks load the same file later, perhaps hours later, and must find the same content. If the state were noted only then, a file
that was replaced in between would be taken for the one that ComfyUI holds.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import comfy.sd
import folder_paths
from torch import nn

from ...errors import MirrorError
from ..memory.ui_files import weights_in_file
from .ui_target import guard_size, notes_of
from .wire_recipe import LOADERS, NODE_LOADERS, FileStamp, file_stamp


def watch_loaders() -> None:
    """Wrap ComfyUI's loaders of diffusion models. Call it once.

    Nodes look them up in `comfy.sd` when they run, and a loader notes itself in `cached_patcher_init` by that name too. A pack that
    imported a loader by name before this pack was loaded goes past the wrapper; `recipe_of` says what happens then.
    """
    for name in LOADERS:
        setattr(comfy.sd, name, _stamping(getattr(comfy.sd, name)))


def _stamping(loader: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(loader)

    @functools.wraps(loader)
    def load(*args: Any, **kwargs: Any) -> Any:
        path = next(iter(signature.bind(*args, **kwargs).arguments.values()))
        before = _stamp(path)
        with weights_in_file(path) as in_file:
            loaded = loader(*args, **kwargs)
        patcher = loaded[0] if isinstance(loaded, tuple) else loaded
        if patcher is not None:  # a checkpoint may be loaded for its text encoder only
            notes_of(patcher.model).stamps = before, _stamp(path)
            if in_file and before:
                guard_size(patcher.model, path, before[0])
        return loaded

    return load


def _stamp(path: str) -> FileStamp:
    with suppress(MirrorError):  # a missing file is the loader's to report
        return file_stamp(path)
    return ()


@dataclass(frozen=True)
class NodeCall:
    """A call of a node.

    Args:
        node: its id in NODE_LOADERS.
        cls, method: of the node.
        arguments: by position.
        path: of the model file that it has loaded; "" = the node is not given its name as the table says.
    """

    node: str
    cls: type
    method: str
    arguments: tuple[Any, ...]
    path: str

    def check(self, model: nn.Module) -> None:
        """Raise MirrorError where the node or its model lacks what the table says, as in another version of its pack."""
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
    """Have the loaders among ComfyUI's nodes noted, and return `prompt` as it is: ComfyUI calls this before it queues one, when all
    packs have been imported.
    """
    nodes = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
    for name in NODE_LOADERS:
        cls: Any = nodes.get(name)
        method = getattr(cls, "FUNCTION", "")
        load = getattr(cls, method, None)
        if inspect.isfunction(load) and getattr(load, "noted_for", None) is not cls:  # a class method's first argument is another
            setattr(cls, method, _noting(name, cls, method, inspect.unwrap(load)))
    return prompt


def _noting(node: str, cls: type, method: str, load: Callable[..., Any]) -> Callable[..., Any]:
    signature, loader = inspect.signature(load), NODE_LOADERS[node]

    @functools.wraps(load)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        path = folder_paths.get_full_path(loader.folder, str(given.arguments.get(loader.file))) or ""
        before = file_stamp(path) if path else ()
        out = load(self, *args, **kwargs)
        given.apply_defaults()
        if isinstance(out, tuple) and out and hasattr(out[0], "model"):
            notes = notes_of(out[0].model)
            notes.call = NodeCall(node, cls, method, given.args[1:], path)
            notes.stamps = (before, file_stamp(path)) if path else None
        return out

    noting.noted_for = cls  # type: ignore[attr-defined]
    return noting
