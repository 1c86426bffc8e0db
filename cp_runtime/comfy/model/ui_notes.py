"""Notes of this pack on a model of ComfyUI: one attribute, which all patchers over the model share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...engine.weights.blocks import Sizes
from .wire_recipe import FileStamp, Recipe

if TYPE_CHECKING:
    from .ui_node_loaders import NodeCall

ATTRIBUTE = "context_parallel_notes"


@dataclass
class ModelNotes:
    """Notes on a `BaseModel`.

    Args:
        stamps: of its file, before and after ComfyUI loaded it; None = it was not loaded through `ui_loaders` or `ui_node_loaders`.
        call: of the node that loaded it, if its loader leaves no recipe: see `ui_node_loaders`.
        recipe: the `cached_patcher_init` that the recipe was read from, and the recipe.
        key: of the recipe, once the controller counts this model as a user of it.
        shares_file: whether its plain weights are the pages of its file.
        sizes: of the transformer's weights.
        check_file: of a VAE, whose weights on the ranks are the pages of its file: see `file_pages.size_check`.
    """

    stamps: tuple[FileStamp, FileStamp] | None = None
    call: NodeCall | None = None
    recipe: tuple[Any, Recipe] | None = None
    key: str = ""
    shares_file: bool = False
    sizes: Sizes | None = None
    check_file: Callable[[], None] | None = None


def notes_of(model: Any) -> ModelNotes:
    """Return the notes on a `BaseModel`; they are created at first use."""
    notes = vars(model).get(ATTRIBUTE)
    if not isinstance(notes, ModelNotes):
        notes = ModelNotes()
        setattr(model, ATTRIBUTE, notes)
    return notes
