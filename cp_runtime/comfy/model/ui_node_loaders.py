"""Notes which call of a node loaded a model, for loaders that leave no recipe (`wire_recipe.NODE_LOADERS`)."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import folder_paths
from torch import nn

from ...errors import MirrorError
from .ui_notes import notes_of
from .wire_recipe import NODE_LOADERS, file_stamp


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
