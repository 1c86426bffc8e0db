"""Notes which call of a node loaded a model, for loaders that leave no recipe (`wire_recipe.NODE_LOADERS`)."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import folder_paths

from .ui_notes import notes_of
from .wire_recipe import NODE_LOADERS, NodeLoader, file_stamp


@dataclass(frozen=True)
class NodeCall:
    """A call of a node.

    Args:
        cls, method: of the node.
        arguments: by position.
        path: of the model file that it has loaded.
    """

    cls: type
    method: str
    arguments: tuple[Any, ...]
    path: str


def watch_node_loaders(prompt: Any) -> Any:
    """Have the loaders among ComfyUI's nodes noted, and return `prompt` as it is: ComfyUI calls this before it queues one, when all
    packs have been imported.
    """
    nodes = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
    for name, loader in NODE_LOADERS.items():
        cls: Any = nodes.get(name)
        method = getattr(cls, "FUNCTION", "")
        load = getattr(cls, method, None)
        if callable(load) and getattr(load, "noted_for", None) is not cls:
            setattr(cls, method, _noting(cls, method, inspect.unwrap(load), loader))
    return prompt


def _noting(cls: type, method: str, load: Callable[..., Any], loader: NodeLoader) -> Callable[..., Any]:
    signature = inspect.signature(load)

    @functools.wraps(load)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        path = folder_paths.get_full_path(loader.folder, str(given.arguments.get(loader.file)))
        if path is None:  # the loader says so
            return load(self, *args, **kwargs)
        before = file_stamp(path)
        out = load(self, *args, **kwargs)
        given.apply_defaults()
        notes = notes_of(out[0].model)
        notes.call, notes.stamps = NodeCall(cls, method, given.args[1:], path), (before, file_stamp(path))
        return out

    noting.noted_for = cls  # type: ignore[attr-defined]
    return noting
